"""Messages of a group: beside its collectives, matched by sender and tag, named when they cannot arrive."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import bagua
from tests.groups import on_ranks
from tests.waits import meet

World = Callable[..., Any]

LONG = 8 << 20


def pattern(count: int, seed: int) -> np.ndarray:
    return (np.arange(count, dtype=np.int64) * 7 + seed).astype(np.uint8)


TLS = {"BAGUA_TLS": "1", "BAGUA_JOB_SECRET": "of these tests"}


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"env": {"BAGUA_TRANSPORT": "tcp"}}, {"env": TLS}, {"hosts": [[0, 1], [2]]}])
@on_ranks(3)
def test_crossing_messages_of_8_mib_arrive(rank: int, group: bagua.Group, options: dict[str, Any]) -> None:
    for size in (1, 1000, LONG):
        receives, sends = [], []
        for peer in (r for r in range(group.size) if r != rank):
            sends.append(group.send(pattern(size, rank), peer, async_op=True))
            receives.append((peer, group.recv(np.empty(size, np.uint8), peer, async_op=True)))
        for peer, receive in receives:
            np.testing.assert_array_equal(receive.wait(), pattern(size, peer))
        for send in sends:
            send.wait()


@on_ranks(3)
def test_tags_are_received_out_of_order_and_a_receive_from_any_source_names_its_sender(
    rank: int, group: bagua.Group
) -> None:
    if rank == 0:
        sends = [group.send(pattern(size, tag), 1, tag=tag, async_op=True) for tag, size in enumerate((10, LONG, 20))]
        for send in sends:
            send.wait()
    if rank == 1:
        for tag, size in reversed(list(enumerate((10, LONG, 20)))):
            np.testing.assert_array_equal(group.recv(np.empty(size, np.uint8), 0, tag=tag), pattern(size, tag))
    if rank == 2:
        seen = []
        for _ in range(2):
            got, sender = group.recv_any(np.empty(5, np.uint8), tag=2**32 - 1)
            np.testing.assert_array_equal(got, pattern(5, sender))
            seen.append(sender)
        assert sorted(seen) == [0, 1]
    else:
        group.send(pattern(5, rank), 2, tag=2**32 - 1)
    for bad in (-1, 2**32):
        with pytest.raises(ValueError, match="tag="):
            group.send(pattern(1, 0), (rank + 1) % 3, tag=bad)
    group.barrier()


@pytest.mark.parametrize("transport", ["auto", pytest.param("tcp", marks=pytest.mark.slow)])
@on_ranks(3)
def test_messages_and_collectives_do_not_wait_for_each_other(rank: int, group: bagua.Group, transport: str) -> None:
    x = np.ones(1000, np.float32)
    # Open while collectives pass: a receive whose message is sent after them, on every rank.
    receive = group.recv(np.empty(LONG, np.uint8), (rank - 1) % group.size, async_op=True)
    for _ in range(20):
        assert group.all_reduce(x)[0] == group.size
        x[:] = 1
    group.barrier()
    send = group.send(pattern(LONG, rank), (rank + 1) % group.size, async_op=True)
    # A collective that another rank has not begun keeps no message waiting.
    if rank != 0:
        pending = group.all_reduce(x, async_op=True)
    np.testing.assert_array_equal(receive.wait(), pattern(LONG, (rank - 1) % group.size))
    send.wait()
    if rank == 1:
        group.send(np.array([1], np.uint8), 0)
    if rank == 0:
        group.recv(np.empty(1, np.uint8), 1)
        pending = group.all_reduce(x, async_op=True)
    assert pending.wait()[0] == group.size


@on_ranks(4)
def test_each_group_has_messages_of_its_own(rank: int, group: bagua.Group) -> None:
    pairs = group.new_group([rank // 2 * 2, rank // 2 * 2 + 1])
    other = group.new_group([3, 0]) if rank in (0, 3) else None
    assert pairs is not None
    peer = 1 - pairs.rank
    sent = pairs.send(pattern(100_000, rank), peer, async_op=True)
    if other is not None:
        # The same two numbers of ranks in another group: neither takes the other's message.
        there = other.send(pattern(9, 50 + rank), 1 - other.rank, async_op=True)
        got = other.recv(np.empty(9, np.uint8), 1 - other.rank)
        np.testing.assert_array_equal(got, pattern(9, 50 + 3 - rank))
        there.wait()
    np.testing.assert_array_equal(pairs.recv(np.empty(100_000, np.uint8), peer), pattern(100_000, rank ^ 1))
    sent.wait()
    group.barrier()


@on_ranks(3)
def test_a_message_that_does_not_come_names_its_sender(rank: int, group: bagua.Group) -> None:
    meet("before the receive", rank, range(3))
    if rank == 0:
        with pytest.raises(bagua.BaguaTimeoutError, match="send/recv") as raised:
            group.recv(np.empty(4, np.uint8), 2, timeout=0.3)
        assert raised.value.missing == (2,)
    else:
        with pytest.raises(bagua.BaguaTimeoutError):
            # Rank 0 does not come to it.
            group.all_reduce(np.ones(3), timeout=30)


def leaves(rank: int) -> str | None:
    group = bagua.init(timeout=60)
    group.barrier()
    if rank == 1:
        group.send(pattern(1000, 1), 0)
        bagua.shutdown()
        return None
    np.testing.assert_array_equal(group.recv(np.empty(1000, np.uint8), 1), pattern(1000, 1))
    with pytest.raises(bagua.PeerLostError) as raised:
        group.recv(np.empty(1000, np.uint8), 1)
    bagua.shutdown()
    return str(raised.value)


def test_what_a_rank_sent_before_it_left_arrives_and_the_next_receive_says_so(world: World) -> None:
    text = world(2).run(leaves)[0]
    assert "rank 1" in text
    assert "left" in text
