"""NCCL on a GPU, as torch brings it, with one rank: one GPU has room for no more."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import bagua
from tests.cuda import verb_contract as values
from tests.cuda.device_arrays import Cuda
from tests.cuda.ranks import Ranks, device_rank

ONES = np.ones(1000, np.float32)


@pytest.mark.parametrize("dtype", values.DTYPES)
def test_every_reduction_is_near_the_hosts(ranks: Ranks, dtype: str) -> None:
    ((_, stats),) = ranks.by("nccl", 1, values.reduce_everything, dtype, False)
    assert stats["collective"] == "nccl"


@pytest.mark.parametrize("dlpack", [False, True], ids=["interface", "dlpack"])
def test_every_verb_that_moves_has_the_bits_of_the_host(ranks: Ranks, dlpack: bool) -> None:
    ranks.by("nccl", 1, values.move_everything, "float32", dlpack, (3, 2))


@device_rank
def late_producers(rank: int, cuda: Cuda, group: bagua.Group) -> str:
    first, second = cuda.stream(), cuda.stream()
    x, out = cuda.array(7 * ONES, stream=first), cuda.array(9 * ONES, stream=second)
    # Makes the communicator.
    group.all_reduce(cuda.array(ONES))
    x.read(first)
    out.read(second)
    gate = cuda.late(first)
    x.write(2 * ONES, first)
    # The blocking verb returns although its source has not been written.
    group.all_reduce(x, out=out, stream=second)
    gate.open()
    assert out.read(second).tolist() == [2.0] * 1000
    handle = group.all_reduce(out, async_op=True, stream=second)
    handle.synchronize(30.0)
    assert handle.is_completed()
    found = str(bagua.stats()["groups"]["world"]["cuda"]["collective"])
    return found


def test_a_verb_returns_before_its_source_was_written(anywhere: Ranks) -> None:
    assert anywhere(1, late_producers, BAGUA_CUDA_COLLECTIVE="nccl") == ["nccl"]


@device_rank
def chosen(rank: int, cuda: Cuda, group: bagua.Group) -> Any:
    x = cuda.array(ONES)
    group.all_reduce(x)
    assert x.read().tolist() == [float(group.size)] * 1000
    found = bagua.stats()["groups"]["world"]["cuda"]
    return found["collective"], found["why"]


@pytest.mark.parametrize(("size", "collective"), [(1, "nccl"), (2, "staged")])
def test_what_is_chosen_for_one_rank_of_a_device_and_for_two(ranks: Ranks, size: int, collective: str) -> None:
    for found, why in ranks(size, chosen, BAGUA_CUDA_COLLECTIVE="auto"):
        assert (found, why.startswith("auto")) == (collective, True), why
