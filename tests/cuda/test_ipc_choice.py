"""When ranks read each other's device memory, and each reason why they do not."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest

import bagua
from tests.cuda.device_arrays import Cuda
from tests.cuda.ranks import Ranks
from tests.cuda.test_ipc_values import run
from tests.cuda.test_nccl_choice import choose, chosen
from tests.cuda.test_staged_failures import CALLED_BY_IPC

ONES = np.ones(1000, np.float32)
NO_NCCL = {"BAGUA_LIBNCCL": "/nowhere/libnccl.so.2"}
TWINS = "auto: ranks 0 and 1 of the group have the same device"


@pytest.mark.parametrize("own", [False, True], ids=["one-device", "device-each"])
def test_auto_takes_ipc_where_nccl_cannot_be_had(ranks: Ranks, own: bool) -> None:
    for text, stats in choose(ranks, own_device=own, **NO_NCCL if own else {}):
        assert text == ""
        assert (stats["collective"], stats["pinned_bytes"]) == ("ipc", 0)
        assert stats["why"].startswith("auto: libnccl") if own else stats["why"] == TWINS


def test_auto_takes_ipc_inside_hosts_and_staged_between(ranks: Ranks) -> None:
    named = {"BAGUA_CUDA_COLLECTIVE": "auto"}
    for text, stats in ranks(4, chosen, False, hosts=[[0, 1], [2, 3]], **named):
        assert text == ""
        why = f"{TWINS}; ipc inside the 2 hosts, staged between"
        assert (stats["collective"], stats["why"]) == ("hier", why)


def only_one_cannot(rank: int, failing: str) -> tuple[str, Any]:
    if rank == 1:
        os.environ["BAGUA_SIM_FAIL"] = failing
    return chosen(rank, True)


NOT_SUPPORTED = 801
#: What has to work before ranks share memory. The test's array is the first allocation.
NEEDED = [f"{name}:{2 if name == 'cuMemAlloc' else 1}:{NOT_SUPPORTED}" for name in CALLED_BY_IPC if "Close" not in name]
NEEDED.remove(f"cuMemFree:1:{NOT_SUPPORTED}")


@pytest.mark.parametrize("failing", NEEDED)
def test_a_rank_that_cannot_share_memory_is_a_reason_for_all_ranks_and_leaves_nothing(
    ranks: Ranks, failing: str
) -> None:
    api = failing.split(":")[0]
    for text, stats in run(ranks, 2, only_one_cannot, failing, BAGUA_CUDA_COLLECTIVE="auto", **NO_NCCL):
        assert text == ""
        assert stats["collective"] == "staged"
        assert f"{api} failed on device 1: CUDA_ERROR_NOT_SUPPORTED (801) (rank 1 of the group)" in stats["why"]
        assert stats["why"].startswith("auto: libnccl")
        assert stats["device_bytes"] == 0


@pytest.mark.parametrize("wish", ["auto", "ipc"])
def test_devices_that_do_not_reach_each_others_memory_do_not_share_it(ranks: Ranks, wish: str) -> None:
    for text, stats in choose(ranks, BAGUA_CUDA_COLLECTIVE=wish, BAGUA_SIM_PEER=0, **NO_NCCL):
        reason = "cuda:0 does not reach the memory of the device of rank 1 (rank 0 of the group)"
        assert stats["collective"] == "staged"
        if wish == "ipc":
            assert text == f"BaguaError: BAGUA_CUDA_COLLECTIVE=ipc: {reason}"
        else:
            assert stats["why"].endswith(f"; {reason}")


def test_ranks_of_one_device_share_memory_whatever_devices_reach(ranks: Ranks) -> None:
    for _, stats in choose(ranks, own_device=False, BAGUA_CUDA_COLLECTIVE="ipc", BAGUA_SIM_PEER=0):
        assert stats["collective"] == "ipc"


def test_hosts_of_one_rank_each_share_no_memory(ranks: Ranks) -> None:
    for text, _ in ranks(2, chosen, False, hosts=[[0], [1]], BAGUA_CUDA_COLLECTIVE="ipc"):
        assert text == "BaguaError: BAGUA_CUDA_COLLECTIVE=ipc: no two ranks of the group share a host"


def without_nvrtc(rank: int) -> str:
    cuda, group = Cuda(), bagua.init()
    x = cuda.array(ONES + rank)
    group.broadcast(x, 1)
    with pytest.raises(bagua.BaguaError, match="need NVRTC on cuda:") as raised:
        group.all_reduce(x)
    group.broadcast(x, 0)
    assert x.read().tolist() == [2.0] * 1000
    bagua.shutdown()
    cuda.close()
    return str(raised.value)


def test_without_nvrtc_auto_takes_staged_and_ipc_only_moves(ranks: Ranks, tmp_path: Any) -> None:
    nowhere = {"BAGUA_LIBNVRTC": "/nowhere/libnvrtc.so", "XDG_CACHE_HOME": tmp_path}
    for _, stats in choose(ranks, own_device=False, **nowhere):
        assert stats["collective"] == "staged"
        assert "/nowhere/libnvrtc.so" in stats["why"]
    for text in run(ranks, 2, without_nvrtc, **nowhere):
        assert "/nowhere/libnvrtc.so" in text
