"""By host memory: long arrays, other transports, hosts and lanes. What each verb does is in test_verb_values.py."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import bagua
from tests.cuda.device_arrays import Cuda
from tests.cuda.ranks import Ranks, device_rank, on_ranks
from tests.cuda.verb_contract import bits, both, move_everything, reduce_everything, values


@device_rank
def long_arrays(rank: int, cuda: Cuda, group: bagua.Group, size: int) -> dict[str, Any]:
    # Several pieces of 4 MiB, the last of them shorter and not aligned.
    count = size * (3 * (1 << 20) + 1234567 // size)
    x = values(rank, (count,), "float32")
    both(cuda, True, lambda x, out: group.all_reduce(x, "avg"), x, None)
    both(cuda, True, lambda x, out: group.reduce_scatter(x, out=out), x, np.zeros(count // size, "float32"))
    both(cuda, True, lambda x, out: group.all_to_all(x, out=out), x, np.zeros_like(x))
    both(cuda, True, lambda x, out: group.broadcast(x, size - 1), x, None)
    part = x[: count // size].copy()
    both(cuda, True, lambda x, out: group.all_gather(x, out=out), part, np.zeros((size, len(part)), "float32"))
    found: dict[str, Any] = bagua.stats()["groups"]["world"]["cuda"]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3])
def test_arrays_of_many_pieces_have_the_bits_of_the_host_within_32_mib_of_pinned_memory(
    ranks: Ranks, size: int
) -> None:
    for cuda in ranks(size, long_arrays, size, timeout=120):
        assert cuda["collective"] == "staged"
        assert 0 < cuda["pinned_bytes"] <= 32 << 20


@pytest.mark.parametrize(
    "variables", [{"BAGUA_TRANSPORT": "tcp"}, pytest.param({}, marks=pytest.mark.slow)], ids=["tcp", "shm"]
)
def test_the_transport_makes_no_difference(ranks: Ranks, variables: dict[str, str]) -> None:
    ranks(2, move_everything, "float32", True, (5,), **variables)
    ranks(2, reduce_everything, "float16", True, **variables)


def test_ranks_of_two_hosts_combine_as_the_host_does(ranks: Ranks) -> None:
    ranks(4, reduce_everything, "float32", True, hosts=[[0, 1], [2, 3]])
    ranks(4, move_everything, "float32", True, (5,), hosts=[[0, 1], [2, 3]])


@on_ranks(2)
def test_bfloat16_is_reduced_by_dlpack(rank: int, cuda: Cuda, group: bagua.Group) -> None:
    numbers = np.arange(16, dtype=np.float32) + rank
    halves = (numbers.view(np.uint32) >> 16).astype(np.uint16)
    x = cuda.array(halves, dlpack=True, bfloat16=True)
    group.all_reduce(x)
    expected = ((2 * np.arange(16, dtype=np.float32) + 1).view(np.uint32) >> 16).astype(np.uint16)
    assert bits(x.read()) == bits(expected)


def one_group_serves_both(rank: int) -> None:
    cuda, group = Cuda(device=rank), bagua.init()
    assert bagua.stats()["groups"]["world"]["cuda"] is None
    # Two lanes beside the group's own, in which the ranks' devices differ, too.
    parts = [group.new_group([0, 1]), group.new_group([1, 0], ordered=True)]
    for each in (group, *parts):
        assert each is not None
        on_host, on_device = np.ones(3, np.float32), cuda.array(np.ones(3, np.float32))
        each.all_reduce(on_host)
        each.all_reduce(on_device)
        each.all_reduce(on_host)
        assert on_host.tolist() == [4.0] * 3
        assert on_device.read().tolist() == [2.0] * 3
        assert each.stats()["cuda"]["device"] == rank
    for each in parts:
        assert each is not None
        each.leave()
    bagua.shutdown()
    cuda.close()


def test_one_group_serves_host_and_device_on_several_lanes(ranks: Ranks) -> None:
    ranks(2, one_group_serves_both)
