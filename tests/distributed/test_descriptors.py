"""The limit of file descriptors: a rank raises it as far as its world needs, and says so where it may not."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import resource
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import bagua
from tests.waits import meet, until

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


@pytest.mark.slow
def test_a_rank_of_many_has_few_connections_and_those_for_data_open_when_they_are_needed(world: World) -> None:
    for idle, small, large in world(RANKS, env=TCP).run(counts_its_connections):
        # The distances 1, 2, 4 and 8 in both directions.
        assert idle == {"control": 8, "data": 0, "opened": 0, "closed": 0}
        # A stream to each peer of doubling, 2 log2 n at most, and for the ring a second one to two of them.
        assert 0 < small["data"] <= 10
        assert small["data"] <= large["data"] == large["opened"] <= small["data"] + 2
        assert (large["control"], large["closed"]) == (8, 0)


def joins_with_a_low_hard_limit(rank: int) -> str:
    # However long the processes took to start.
    meet("have started", rank, range(RANKS))
    resource.setrlimit(resource.RLIMIT_NOFILE, (FEW, FEW))
    with pytest.raises(bagua.BaguaError) as raised:
        bagua.init(timeout=50)
    # The process goes on: it can still build a group that the limit allows.
    alone = bagua.init(0, 1)
    alone.all_reduce(np.ones(3))
    bagua.shutdown()
    return str(raised.value)


@pytest.mark.slow
def test_a_hard_limit_that_is_too_low_is_an_error_on_every_rank_at_once(world: World) -> None:
    for rank, text in enumerate(world(RANKS, env=TCP).run(joins_with_a_low_hard_limit)):
        assert f"rank {rank} of {RANKS}" in text
        assert "file descriptors" in text
        assert f"may have {FEW}" in text
        assert "ulimit" in text


def joins_with_hard_limit(rank: int, hard: int) -> int:
    """How many descriptors the error asks for, of joining or of an all_reduce; 0 when both succeed."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    # Its messages are divided between the streams, so that all open.
    x = np.ones(100_000)
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


def allow(more: int) -> None:
    """Lets this process have so many more descriptors than are open."""
    allowed = len(os.listdir("/proc/self/fd")) - 1 + more
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, allowed))


Groups = list[tuple[tuple[int, ...], bagua.Group]]


def groups_of(world: bagua.Group, *sizes: int) -> Groups:
    """This rank's groups of so many ranks, all of them in the same order on every rank."""
    all_ranks = itertools.chain(*(itertools.combinations(range(world.size), size) for size in sizes))
    built = [(ranks, world.new_group(ranks)) for ranks in all_ranks]
    return [(ranks, group) for ranks, group in built if group is not None]


def sum_in(ranks: tuple[int, ...], group: bagua.Group, rank: int) -> None:
    x = np.full(1000, rank, np.float32)
    group.all_reduce(x)
    assert (x == sum(ranks)).all()


def connections(groups: Groups) -> dict[str, int]:
    each = [group.stats()["connections"] for _, group in groups]
    return {name: sum(counts[name] for counts in each) for name in ("data", "opened", "closed")}


def works_in_more_groups_than_it_has_descriptors(rank: int, more: int) -> dict[str, int]:
    world = bagua.init(timeout=50)
    groups = groups_of(world, 2, 3)
    # Before any peer opens streams for the groups, if not for the barrier: none leaves it before this rank enters it.
    allow(more)
    world.barrier()
    for _ in range(3):
        for ranks, group in groups:
            sum_in(ranks, group, rank)
    shown = connections([*groups, (tuple(range(world.size)), world)])
    world.barrier()
    bagua.shutdown()
    return shown


def test_idle_streams_are_closed_where_descriptors_run_short_and_open_again(world: World) -> None:
    # A stream to each of 5 peers in groups of two, of 20 in groups of three, and those of the barrier.
    of_groups, of_barrier = 5 + 20, 5
    more = of_barrier + 2
    for shown in world(6, env=TCP).run(works_in_more_groups_than_it_has_descriptors, more):
        assert 0 < shown["data"] <= of_barrier + more < of_groups
        assert shown["opened"] > of_groups + of_barrier, "streams that were closed have opened again"
        assert shown["closed"] == shown["opened"] - shown["data"]


def works_while_a_peer_is_in_an_operation(rank: int, folder: str) -> dict[str, int] | None:
    world = bagua.init(timeout=50)
    first = world.new_group([0, 1])
    # Each peer has two groups with rank 0, so that it leaves one of them idle while it is in an operation of the other.
    others = [((0, peer), world.new_group([0, peer])) for _ in range(2) for peer in (2, 3)]
    groups: Groups = [(ranks, group) for ranks, group in others if group is not None]
    begun, limited = Path(folder, "begun"), Path(folder, "limited")
    x = np.full(1000, 2.0 + rank)
    if first is not None:
        first.all_reduce(x, async_op=True).wait()
        assert (x == 5.0).all()
    if first is not None and rank == 1:
        handle = first.all_reduce(x, async_op=True)
        until(lambda: first.stats()["ops"]["all_reduce"]["calls"] >= 2, "the operation begins")
        begun.touch()
    elif rank == 0:
        until(begun.exists)
        # With the streams to rank 1, as many as one group with each peer needs.
        allow(2)
        limited.mkdir()
    else:
        until(limited.exists)
    for _ in range(4):
        for ranks, group in groups:
            sum_in(ranks, group, rank)
    shown = None if first is None else connections([((0, 1), first)])
    if first is not None and rank == 0:
        assert connections(groups)["closed"] > 0
        handle = first.all_reduce(x, async_op=True)
    if first is not None:
        handle.wait()
        assert (x == 10.0).all()
    world.barrier()
    bagua.shutdown()
    return shown


def test_streams_on_which_a_peer_is_in_an_operation_stay_open(world: World, tmp_path: Path) -> None:
    for shown in world(4, env=TCP).run(works_while_a_peer_is_in_an_operation, str(tmp_path))[:2]:
        assert shown == {"data": 1, "opened": 1, "closed": 0}


def goes_on_when_a_rank_dies(rank: int, folder: str) -> set[int]:
    world = bagua.init(timeout=50)
    groups = groups_of(world, 2, 3)
    # The barrier needs 3 descriptors, the groups 3 + 3 * 2.
    allow(4)
    world.barrier()
    for _ in range(2):
        for ranks, group in groups:
            sum_in(ranks, group, rank)
    assert connections([*groups, (tuple(range(world.size)), world)])["closed"] > 0
    done = [Path(folder, str(other)) for other in range(3)]
    if rank == 3:
        # The others no longer read what it has sent.
        until(lambda: all(path.exists() for path in done))
        os.kill(os.getpid(), signal.SIGKILL)
    done[rank].mkdir()
    for _ in range(3):
        for ranks, group in groups:
            if 3 not in ranks:
                sum_in(ranks, group, rank)
    named = set()
    for group in [world, *(group for ranks, group in groups if 3 in ranks)]:
        with pytest.raises(bagua.PeerLostError) as caught:
            group.all_reduce(np.ones(3))
        named.add(caught.value.rank)
    bagua.shutdown()
    return named


def test_a_rank_that_dies_while_idle_streams_are_closed_is_named_and_no_other(world: World, tmp_path: Path) -> None:
    found = world(4, env=TCP, expect_exit={3: -signal.SIGKILL}).run(goes_on_when_a_rank_dies, str(tmp_path))
    assert found[:3] == [{3}, {3}, {3}]


def sends_without_descriptors(rank: int) -> tuple[int, float]:
    world = bagua.init(timeout=50)
    groups: Groups = [((0, 1), group) for _ in range(8) if (group := world.new_group([0, 1])) is not None]
    for ranks, group in groups:
        sum_in(ranks, group, rank)
    world.barrier()
    # A stream of messages has 2 descriptors on each rank, and there is one in each direction.
    allow(1)
    x = np.full(10, rank, np.float32)
    if rank == 0:
        world.send(x, 1)
        world.recv(x, 1)
    else:
        y = np.empty_like(x)
        world.recv(y, 0)
        world.send(x + y, 0)
    closed = connections(groups)["closed"]
    for ranks, group in groups:
        sum_in(ranks, group, rank)
    world.barrier()
    bagua.shutdown()
    return closed, float(x[0])


def test_idle_streams_are_closed_for_messages(world: World) -> None:
    for closed, received in world(2, env=TCP).run(sends_without_descriptors):
        assert closed > 0
        assert received == 1.0


def take_all_descriptors() -> list[int]:
    files = []
    with contextlib.suppress(OSError):
        while True:
            files.append(os.open(os.devnull, os.O_RDONLY))
    return files


def has_no_descriptor_when_its_peer_connects(rank: int, folder: str) -> tuple[float, float]:
    world = bagua.init(timeout=50)
    taken, x = Path(folder, "taken"), np.full(10, rank, np.float32)
    used = 0.0
    if rank == 1:
        until(taken.exists)
    else:
        allow(8)
        files = take_all_descriptors()
        # Needs no descriptor.
        taken.mkdir()
        before = time.process_time()
        time.sleep(1.0)
        used = time.process_time() - before
        for file in files:
            os.close(file)
    world.all_reduce(x, op="sum")
    bagua.shutdown()
    return used, float(x[0])


def test_a_rank_without_a_free_descriptor_does_not_spin_and_its_peer_connects_later(
    world: World, tmp_path: Path
) -> None:
    for used, total in world(2, env=TCP).run(has_no_descriptor_when_its_peer_connects, str(tmp_path)):
        assert used < 0.5
        assert total == 1.0
