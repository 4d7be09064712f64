"""Ranks that read each other's device memory: every verb, type and operation has the host's bits.

All cases of a number of ranks run in one world.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import bagua
from tests.cuda.device_arrays import Cuda
from tests.cuda.ranks import Ranks
from tests.cuda.test_staged_values import DTYPES, both, moves, reductions, values

Stats = dict[str, Any]
HOSTS = [[0, 1], [2, 3]]
#: CUDA_ERROR_OUT_OF_MEMORY.
SHORT = 2


def run(ranks: Ranks, size: int, function: Any, *arguments: Any, own: bool = False, **variables: Any) -> list[Any]:
    """Ranks that communicate by `ipc`, on one device, or with a device each where they have their `own`."""
    named = {"BAGUA_CUDA_COLLECTIVE": "ipc", "BAGUA_SIM_DEVICES": max(size, 2)} | ({"OWN_DEVICE": 1} if own else {})
    return ranks(size, function, *arguments, **(named | variables))


def everything(rank: int) -> Stats:
    cuda, group = Cuda(), bagua.init()
    assert min(reductions(cuda, group, dtype) for dtype in DTYPES) >= 3
    found: Stats = bagua.stats()["groups"]["world"]["cuda"]
    for dtype in DTYPES:
        moves(cuda, group, dtype, dtype != "bool", (3, 2))
    moves(cuda, group, "float32", True, (0, 3))
    bagua.shutdown()
    cuda.close()
    return found


@pytest.mark.parametrize(
    ("size", "own"), [(1, False), (2, False), (3, False), (4, False), (2, True), (3, True), (4, True)]
)
def test_every_verb_type_and_operation_has_the_bits_of_the_host(ranks: Ranks, size: int, own: bool) -> None:
    for rank, stats in enumerate(run(ranks, size, everything, own=own)):
        assert (stats["collective"], stats["why"]) == ("ipc", "BAGUA_CUDA_COLLECTIVE=ipc")
        assert stats["device"] == (rank if own else 0)
        assert stats["launches"] > 0
        assert (stats["to_host_bytes"], stats["to_device_bytes"], stats["pinned_bytes"]) == (0, 0, 0)
        assert stats["device_bytes"] == (2 << 20 if size > 1 else 0)


def several_pieces(rank: int) -> Stats:
    cuda, group = Cuda(), bagua.init()
    size = group.size
    # Windows of 1 MiB have to do, or a quarter of the tensor is a piece; the last piece is shorter and not aligned.
    count = size * ((5 << 20) // 4 + 12345)
    x = values(rank, (count,), "float32")
    both(cuda, True, lambda x, out: group.all_reduce(x, "avg"), x, None)
    both(
        cuda, True, lambda x, out: group.reduce(x, size - 1, out=out if rank == size - 1 else None), x, np.zeros_like(x)
    )
    both(cuda, True, lambda x, out: group.reduce_scatter(x, out=out), x, np.zeros(count // size, "float32"))
    both(cuda, True, lambda x, out: group.all_to_all(x), x, None)
    both(cuda, True, lambda x, out: group.broadcast(x, size - 1), x, None)
    part = x[: count // size].copy()
    whole = np.zeros((size, len(part)), "float32")
    both(cuda, True, lambda x, out: group.all_gather(x, out=out), part, whole)
    both(cuda, True, lambda x, out: group.gather(x, 0, out=out if rank == 0 else None), part, whole)
    both(cuda, True, lambda x, out: group.scatter(x if rank == 0 else None, 0, out=out), whole + rank, part)
    found: Stats = bagua.stats()["groups"]["world"]["cuda"]
    bagua.shutdown()
    cuda.close()
    return found


@pytest.mark.parametrize(("size", "own"), [(2, True), (3, False)])
def test_arrays_of_many_pieces_have_the_bits_of_the_host(ranks: Ranks, size: int, own: bool) -> None:
    # Where ranks share a device they would take the whole array at once. The first two allocations are the test's and
    # the first windows; larger ones cannot be had.
    short = {} if own else {"BAGUA_SIM_FAIL": f"cuMemAlloc:3:{SHORT}"}
    for stats in run(ranks, size, several_pieces, own=own, **short):
        assert stats["collective"] == "ipc"
        assert stats["device_bytes"] == ((2 + 16) << 20 if own else 2 << 20)


def over_hosts(rank: int) -> Stats:
    cuda, group = Cuda(), bagua.init()
    for dtype in ("float32", "float16", "int64", "bool"):
        reductions(cuda, group, dtype)
    moves(cuda, group, "float32", True, (5,))
    moves(cuda, group, "float32", True, (0, 3))
    # Two pieces of 4 MiB, and one that is not aligned.
    x = values(rank, ((2 << 20) + 4321,), "float32")
    before = group.stats()["ops"]["all_reduce"]["hierarchical"]
    both(cuda, True, lambda x, out: group.all_reduce(x, "avg"), x, None)
    assert group.stats()["ops"]["all_reduce"]["hierarchical"] == before + 2
    found: Stats = bagua.stats()["groups"]["world"]["cuda"]
    bagua.shutdown()
    cuda.close()
    return found


@pytest.mark.parametrize("hosts", [HOSTS, [[0, 2], [1]]], ids=["two-and-two", "two-and-one"])
def test_ranks_of_several_hosts_have_the_bits_of_the_hosts_hier(ranks: Ranks, hosts: list[list[int]]) -> None:
    size = sum(len(host) for host in hosts)
    for rank, stats in enumerate(run(ranks, size, over_hosts, hosts=hosts)):
        why = "BAGUA_CUDA_COLLECTIVE=ipc; ipc inside the 2 hosts, staged between"
        assert (stats["collective"], stats["why"]) == ("hier", why)
        assert 0 < stats["pinned_bytes"] <= 16 << 20
        # The first rank of a host reduces.
        assert (stats["launches"] > 0) == any(rank == host[0] for host in hosts)
