"""The limit of file descriptors: a rank raises it as far as its world needs, and says so where it may not."""

from __future__ import annotations

import re
import resource
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import bagua

World = Callable[..., Any]

RANKS = 24

#: Fewer than the control connections of `RANKS` ranks and what is open need.
FEW = 18

TCP = {"BAGUA_TRANSPORT": "tcp"}


def limits() -> tuple[int, int]:
    return resource.getrlimit(resource.RLIMIT_NOFILE)


def joins_with_a_low_soft_limit(rank: int) -> tuple[int, float]:
    hard = limits()[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))
    group = bagua.init(timeout=50)
    x = np.full(1000, rank, np.float32)
    group.all_reduce(x)
    bagua.shutdown()
    assert limits()[1] == hard
    return limits()[0], float(x[0])


def test_the_soft_limit_is_raised_as_far_as_the_world_needs(world: World) -> None:
    for soft, total in world(RANKS, env=TCP).run(joins_with_a_low_soft_limit):
        # A control connection and two streams to each peer.
        assert 3 * (RANKS - 1) < soft < 1024
        assert total == sum(range(RANKS))


def counts_its_connections(rank: int) -> list[dict[str, int]]:
    group = bagua.init(timeout=50)
    shown = [group.stats()["connections"]]
    for count in (1000, 1 << 20):
        x = np.ones(count, np.float32)
        group.all_reduce(x, op="sum")
        assert (x == RANKS).all()
        shown.append(group.stats()["connections"])
    assert 0 < group.stats()["join_s"] < 50
    group.barrier()
    bagua.shutdown()
    return shown


def test_a_rank_of_many_has_few_connections_and_those_for_data_open_when_they_are_needed(world: World) -> None:
    for idle, small, large in world(RANKS, env=TCP).run(counts_its_connections):
        # The distances 1, 2, 4 and 8 in both directions.
        assert idle == {"control": 8, "data": 0, "opened": 0, "closed": 0}
        # Two streams to each peer: of doubling, 2 log2 n at most, and after that of halving or of a ring.
        assert 0 < small["data"] <= 2 * 10
        assert small["data"] <= large["data"] == large["opened"] <= 2 * 14
        assert (large["control"], large["closed"]) == (8, 0)


def joins_with_a_low_hard_limit(rank: int) -> tuple[str, float]:
    resource.setrlimit(resource.RLIMIT_NOFILE, (FEW, FEW))
    start = time.monotonic()
    with pytest.raises(bagua.BaguaError) as raised:
        bagua.init(timeout=50)
    took = time.monotonic() - start
    # The process goes on: it can still build a group that the limit allows.
    alone = bagua.init(0, 1)
    alone.all_reduce(np.ones(3))
    bagua.shutdown()
    return str(raised.value), took


def test_a_hard_limit_that_is_too_low_is_an_error_on_every_rank_at_once(world: World) -> None:
    for rank, (text, took) in enumerate(world(RANKS, env=TCP).run(joins_with_a_low_hard_limit)):
        assert f"rank {rank} of {RANKS}" in text
        assert "file descriptors" in text
        assert f"may have {FEW}" in text
        assert "ulimit" in text
        assert took < 6.0


def joins_with_hard_limit(rank: int, hard: int) -> int:
    """How many descriptors the error asks for, of joining or of an all_reduce; 0 when both succeed."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    x = np.ones(1000)
    try:
        bagua.init(timeout=50).all_reduce(x)
    except bagua.BaguaError as error:
        [needed] = re.findall(r"needs (\d+) file descriptors", str(error))
        return int(needed)
    assert (x == bagua.world_size()).all()
    bagua.shutdown()
    return 0


def test_a_group_works_with_as_many_descriptors_as_the_errors_ask_for(world: World) -> None:
    few = world(6, env=TCP | {"BAGUA_STREAMS_PER_PEER": "16"})
    allowed = [12]
    while asked := max(few.run(joins_with_hard_limit, allowed[-1])):
        assert asked > allowed[-1]
        allowed.append(asked)
    # What joining asks for, what the all_reduce does, and once more for a rank with more open files than the first.
    assert 3 <= len(allowed) <= 4


def joins_with_enough(rank: int) -> tuple[int, int]:
    before = limits()[0]
    group = bagua.init(timeout=50)
    group.barrier()
    bagua.shutdown()
    return before, limits()[0]


def test_a_limit_that_suffices_is_left_alone(world: World) -> None:
    for before, after in world(2, env=TCP).run(joins_with_enough):
        assert before == after
