"""Which collective the ranks choose for CUDA arrays, and why; what ranks compare; the true NCCL without a driver."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest

import bagua
from tests.cuda.buckets import Queue, Tensors
from tests.cuda.device_arrays import Cuda
from tests.cuda.ranks import Ranks, device_rank, on_ranks

ONES = np.ones(1000, np.float32)


def chosen(rank: int, own_device: bool) -> tuple[str, Any]:
    """Returns the error of the first all_reduce, and the choice. After a refusal the group continues with `staged`."""
    cuda, group = Cuda(device=rank if own_device else 0), bagua.init()
    x = cuda.array(ONES)
    found = ""
    try:
        group.all_reduce(x)
    except bagua.BaguaError as error:
        found = f"{type(error).__name__}: {error}"
        assert bagua.stats()["groups"]["world"]["cuda"] is None
        os.environ["BAGUA_CUDA_COLLECTIVE"] = "staged"
        group.all_reduce(x)
    assert x.read().tolist() == [float(group.size)] * 1000
    stats = bagua.stats()["groups"]["world"]["cuda"]
    bagua.shutdown()
    cuda.close()
    return found, stats


def choose(ranks: Ranks, size: int = 2, own_device: bool = True, **variables: object) -> list[tuple[str, Any]]:
    named = {"BAGUA_CUDA_COLLECTIVE": "auto", "BAGUA_SIM_DEVICES": max(2, size)} | variables
    found: list[tuple[str, Any]] = ranks(size, chosen, own_device, **named)
    return found


def test_auto_takes_nccl_where_each_rank_has_a_device_of_its_own(ranks: Ranks) -> None:
    for size in (1, 3):
        for device, (text, stats) in enumerate(choose(ranks, size)):
            assert text == ""
            assert (stats["collective"], stats["why"]) == ("nccl", "auto: NCCL 2.30.7 on all ranks")
            assert stats["device"] == device
            assert (stats["to_host_bytes"], stats["to_device_bytes"], stats["pinned_bytes"]) == (0, 0, 0)


@pytest.mark.parametrize(("version", "collective"), [(23000, "nccl"), (22900, "staged")])
def test_ranks_share_a_device_where_the_variable_is_set_and_nccl_can(
    ranks: Ranks, version: int, collective: str
) -> None:
    variables = {"BAGUA_SIM_NCCL_VERSION": version, "NCCL_MULTI_RANK_GPU_ENABLE": 1}
    for _, stats in choose(ranks, own_device=False, **variables):
        assert stats["collective"] == collective


def test_auto_does_without_nccl_where_it_does_not_load(ranks: Ranks) -> None:
    for _, stats in choose(ranks, BAGUA_LIBNCCL="/nowhere/libnccl.so.2"):
        assert stats["collective"] == "staged"
        assert stats["why"].startswith("auto: libnccl (BAGUA_LIBNCCL=/nowhere/libnccl.so.2) does not load: ")


@pytest.mark.parametrize(
    ("variables", "reason"),
    [
        ({"BAGUA_SIM_NCCL_VERSION": 21803}, "NCCL 2.18.3 is too old: 2.19.0 is needed"),
        ({"BAGUA_LIBNCCL": "/nowhere/libnccl.so.2"}, "libnccl (BAGUA_LIBNCCL=/nowhere/libnccl.so.2) does not load: "),
    ],
    ids=["old", "absent"],
)
def test_nccl_that_cannot_be_used_is_refused_on_all_ranks_and_the_group_goes_on(
    ranks: Ranks, variables: dict[str, object], reason: str
) -> None:
    for text, stats in choose(ranks, **{"BAGUA_CUDA_COLLECTIVE": "nccl"} | variables):
        assert text.startswith(f"BaguaError: BAGUA_CUDA_COLLECTIVE=nccl: {reason}"), text
        assert stats["why"] == "BAGUA_CUDA_COLLECTIVE=staged"


def test_nccl_for_ranks_that_share_a_device_is_refused_on_all_ranks(ranks: Ranks) -> None:
    for text, _ in choose(ranks, own_device=False, BAGUA_CUDA_COLLECTIVE="nccl"):
        assert text.endswith("nccl: ranks 0 and 1 of the group have the same device"), text


def only_one_lacks_it(rank: int) -> tuple[str, Any]:
    if rank == 1:
        os.environ["BAGUA_LIBNCCL"] = "/nowhere/libnccl.so.2"
    return chosen(rank, True)


def test_a_rank_without_nccl_is_named_on_all_ranks(ranks: Ranks) -> None:
    for text, _ in ranks.by("nccl", 2, only_one_lacks_it):
        assert text.endswith("(rank 1 of the group)"), text


@device_rank
def disagree(rank: int, cuda: Cuda, group: bagua.Group, timeout: float) -> str:
    x = cuda.array(ONES)
    group.all_reduce(x)
    x.read()
    found = ""
    try:
        group.all_reduce(x, "max" if rank == 0 else "min", timeout=timeout)
        group.recv(np.empty_like(ONES), 1 - rank)
    except bagua.BaguaError as error:
        found = f"{type(error).__name__}: {error}"
    return found


def test_calls_that_differ_are_a_mismatch_on_all_ranks_where_they_are_compared(ranks: Ranks) -> None:
    for text in ranks.by("nccl", 2, disagree, 20.0, BAGUA_CUDA_CHECK=1):
        assert text.startswith("MismatchError: "), text
        assert "min" in text
        assert "max" in text


@device_rank
def disagreeing_buckets(rank: int, cuda: Cuda, first: int) -> str:
    bucket = Tensors(cuda, "one", sizes=(1000 + rank if first else 1000,))
    bucket.raw.append_centralized(False, False, True)
    queue = Queue("engine", bucket)
    found = ""
    try:
        queue.step()
        other = Tensors(cuda, "other", sizes=(1000 + rank,))
        other.raw.append_centralized(False, False, True)
        queue.register(other)
        queue.step()
    except bagua.BaguaError as error:
        found = f"{type(error).__name__}: {error}"
    queue.raw.shutdown()
    return found


@pytest.mark.parametrize("first", [True, False])
def test_buckets_that_differ_are_a_mismatch_on_all_ranks_after_each_registration(ranks: Ranks, first: bool) -> None:
    for text in ranks.by("nccl", 2, disagreeing_buckets, first):
        assert text.startswith("MismatchError: "), text
        assert "1000" in text
        assert "1001" in text


@device_rank
def steps_apart(rank: int, cuda: Cuda, later: int) -> str:
    buckets = [Tensors(cuda, name, sizes=(1000,)) for name in ("one", "two")]
    for bucket in buckets:
        bucket.raw.append_centralized(False, False, True)
    queue = Queue("engine", *buckets)
    found = ""
    try:
        for step in (1, 2, later + rank):
            queue.raw.set_step(step)
            queue.step()
    except bagua.BaguaError as error:
        found = f"{type(error).__name__}: {error}"
    queue.raw.shutdown()
    return found


@pytest.mark.parametrize("later", [0, 3])
def test_ranks_in_different_steps_are_a_mismatch_at_any_exchange(ranks: Ranks, later: int) -> None:
    for text in ranks.by("nccl", 2, steps_apart, later):
        assert text.startswith("MismatchError: "), text
        assert f" in step {later + 1}" in text


def test_calls_that_differ_and_are_not_compared_time_out_with_each_ranks_call(ranks: Ranks) -> None:
    texts = ranks.by("nccl", 2, disagree, 2.0, BAGUA_SIM_NCCL_HANG=1)
    assert all(text.startswith("BaguaTimeoutError: ") for text in texts), texts
    assert any(op in text for text in texts for op in ("min", "max"))


@on_ranks(2, by=["nccl"], BAGUA_SIM_DEVICES=4)
def test_a_group_stays_on_the_device_of_its_communicator(rank: int, cuda: Cuda, group: bagua.Group) -> None:
    x = cuda.array(ONES)
    group.all_reduce(x)
    other = Cuda(device=2 + rank)
    y = other.array(ONES)
    with pytest.raises(TypeError, match=f"the array is on cuda:{2 + rank}, but .* communicator is on cuda:{rank}"):
        group.all_reduce(y)
    other.close()
    cuda.driver.start(rank)
    group.all_reduce(x)
    assert x.read().tolist() == [4.0] * 1000
