"""`Group.shrink`: the ranks that are left of a group go on without those that it lost."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import bagua
from tests.groups import on_ranks
from tests.waits import for_ever, meet

World = Callable[..., Any]

HEARTBEAT = {"BAGUA_HEARTBEAT_TIMEOUT": "1"}


def pids_of(group: bagua.Group) -> list[int]:
    """Process id of each rank."""
    pids = np.zeros((group.size, 1), np.int64)
    group.all_gather(np.array([os.getpid()], np.int64), out=pids)
    return [int(pid) for pid in pids[:, 0]]


def until_lost(group: bagua.Group) -> bagua.PeerLostError:
    """Works until a rank is lost."""
    x = np.ones(1000, np.float32)
    with pytest.raises(bagua.PeerLostError) as raised:
        for_ever(lambda: group.all_reduce(x, "max"))
    return raised.value


def total(group: bagua.Group, value: float) -> float:
    x = np.full(3, value)
    group.all_reduce(x)
    return float(x[0])


# --- killed, one after the other --------------------------------------------------------------------------------------


def killed_one_by_one(rank: int, victims: list[int]) -> list[Any]:
    group = bagua.init(timeout=60)
    names, seen = list(range(group.size)), []
    for victim in victims:
        meet(f"before rank {victim} dies", rank, names)
        if rank == victim:
            os.kill(os.getpid(), signal.SIGKILL)
        before = group
        lost = until_lost(group)
        group = bagua.Group.shrink(group)
        assert group.former_ranks is not None
        names = [names[former] for former in group.former_ranks]
        assert bagua.group.default() is group
        assert bagua.stats()["groups"].keys() == {"world"}
        assert group.view > before.view
        with pytest.raises(bagua.PeerLostError):
            before.barrier()
        local = (group.local_rank, group.local_world_size)
        seen.append((lost.rank, names, group.rank, local, total(group, float(2**rank))))
    bagua.shutdown()
    return seen


@pytest.mark.parametrize("transport", ["auto", "tcp"])
def test_four_ranks_become_three_two_and_one_by_kills(world: World, transport: str) -> None:
    victims = [0, 2, 1]
    ends = dict.fromkeys(victims, -signal.SIGKILL)
    results = world(4, expect_exit=ends, env={"BAGUA_TRANSPORT": transport}).run(killed_one_by_one, victims)
    assert results[3] == [
        (0, [1, 2, 3], 2, (2, 3), 14.0),
        # Rank 2 was rank 1 of the second group.
        (1, [1, 3], 1, (1, 2), 10.0),
        (0, [3], 0, (0, 1), 8.0),
    ]


# --- frozen -----------------------------------------------------------------------------------------------------------


def frozen_and_continued(rank: int) -> Any:
    group = bagua.init(timeout=60)
    pids = pids_of(group)
    meet("before it freezes", rank, range(3))
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
        # The others have gone on meanwhile.
        with pytest.raises(bagua.PeerLostError) as raised:
            group.shrink(quorum="any")
        bagua.shutdown()
        return raised.value.rank
    until_lost(group)
    group = group.shrink()
    totals = [total(group, 1.0)]
    if group.rank == 0:
        os.kill(pids[1], signal.SIGCONT)
    # Its connections have no effect on the others.
    totals += [total(group, 1.0) for _ in range(1000)]
    bagua.shutdown()
    return group.former_ranks, set(totals)


def test_a_frozen_rank_is_left_behind_and_gets_an_error_when_it_continues(world: World) -> None:
    results = world(3, env=HEARTBEAT).run(frozen_and_continued)
    assert results == [([0, 2], {2.0}), 1, ([0, 2], {2.0})]


def smaller_half(rank: int) -> Any:
    group = bagua.init(timeout=60)
    pids = pids_of(group)
    meet("before they freeze", rank, range(4))
    if rank in (0, 3):
        os.kill(os.getpid(), signal.SIGSTOP)
    until_lost(group)
    # Both missed their heartbeats at about the same time; three ranks never agree, because the third does not answer.
    with pytest.raises(bagua.BaguaError, match="quorum") as refused:
        group.shrink()
    text = str(refused.value)
    group = group.shrink(quorum="any")
    meet("in the new group", rank, (1, 2))
    bagua.shutdown()
    if rank == 1:
        for frozen in (0, 3):
            os.kill(pids[frozen], signal.SIGKILL)
    return text, group.size


def test_the_smaller_half_is_refused_and_goes_on_with_any_quorum(world: World) -> None:
    ends = {0: -signal.SIGKILL, 3: -signal.SIGKILL}
    results = world(4, env=HEARTBEAT, expect_exit=ends).run(smaller_half)
    for text, size in results[1:3]:
        assert "may live on" in text
        assert size == 2


# --- no rank lost -----------------------------------------------------------------------------------------------------


@on_ranks(3)
def test_ranks_that_run_and_have_not_called_are_named_and_the_call_can_be_repeated(
    rank: int, group: bagua.Group
) -> None:
    if rank == 0:
        with pytest.raises(bagua.BaguaTimeoutError) as raised:
            group.shrink(timeout=0.3)
        assert raised.value.missing == (1, 2)
        assert isinstance(raised.value, TimeoutError)
        # The old group still works: nothing was lost.
        group.barrier()
    else:
        group.barrier()
    assert total(group.shrink(), 1.0) == 3.0


@on_ranks(2)
def test_arguments_that_cannot_be_used_are_refused_and_the_group_works_on(group: bagua.Group) -> None:
    pair = group.new_group([0, 1])
    assert pair is not None
    for text, call in (
        ("positive", lambda: group.shrink(timeout=0)),
        ("quorum.*'most'|'most'.*quorum", lambda: group.shrink(quorum="most")),  # type: ignore[arg-type]
        ("sub-group", lambda: pair.shrink()),
    ):
        with pytest.raises(ValueError, match=text):
            call()
    assert total(group, 1.0) == 2.0
