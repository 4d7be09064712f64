"""Messages between arrays on devices: values, the order of streams, several at once, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import bagua
from tests.cuda.device_arrays import Cuda
from tests.cuda.ranks import Ranks, device_rank, on_ranks

#: Elements: none, one that is sent at once, more than is, and more than one piece of pinned memory.
COUNTS = (0, 3, 10_000, (4 << 20) // 4 + 7)


@device_rank
def ring(rank: int, cuda: Cuda, group: bagua.Group) -> Any:
    """Messages of every size to the next rank, from devices to devices, and from and to the host."""
    after, before = (rank + 1) % group.size, (rank - 1) % group.size
    stream, other = cuda.stream(), cuda.stream()
    for count in COUNTS:
        values = np.arange(count, dtype=np.float32)
        sent, got = cuda.array(values + rank, stream=stream), cuda.empty(count, np.float32)
        handle = group.send(sent, after, async_op=True, stream=stream)
        assert group.recv(got, before, stream=other) is got
        # What the stream of the receive gets from now on sees the message.
        assert np.array_equal(got.read(other), values + before)
        handle.wait()
        # The message has left: the array may be written.
        sent.write(np.full(count, -1, np.float32), stream)

        here = np.empty(count, np.float32)
        handle = group.send(cuda.array(values - rank, dlpack=True), after, tag=1, async_op=True)
        group.recv(here, before, tag=1)
        handle.synchronize()
        assert np.array_equal(here, values - before)
        handle = group.send(here, after, tag=2, async_op=True)
        x, sender = group.recv_any(got, tag=2)
        assert (x is got, sender) == (True, before)
        handle.wait()
        assert np.array_equal(got.read(), values - (before - 1) % group.size)
    found = bagua.stats()["groups"]["world"]["cuda"]
    return found["to_host_bytes"], found["to_device_bytes"], found["collective"]


def test_messages_of_devices_have_the_bytes_that_were_sent(ranks: Ranks) -> None:
    total = 4 * sum(COUNTS)
    assert ranks(3, ring) == [(2 * total, 2 * total, None)] * 3


@on_ranks(2)
def test_messages_of_devices_arrive_in_the_order_given(rank: int, cuda: Cuda, group: bagua.Group) -> None:
    """Messages of one tag arrive in the order given, although the first waits longest for its device."""
    late, early = cuda.stream(), cuda.stream()
    first, second = (cuda.array(np.full(100, value, np.float32), stream=late) for value in (1, 2))
    gate = cuda.late(late)
    if rank == 0:
        one = cuda.array(np.full(100, 1, np.float32), stream=late)
        handles = [group.send(one, 1, async_op=True, stream=late)]
        handles.append(
            group.send(cuda.array(np.full(100, 2, np.float32), stream=early), 1, async_op=True, stream=early)
        )
        handles.append(group.send(np.full(100, 3, np.float32), 1, async_op=True))
        # Another tag, from the host: it may not overtake either, because it goes to the same rank.
        handles.append(group.send(np.full(100, 4, np.float32), 1, tag=9, async_op=True))
        gate.open()
        for handle in handles:
            handle.wait(30.0)
    else:
        gate.open()
        found = []
        for x in (first, second, cuda.empty(100, np.float32)):
            group.recv(x, 0)
            found.append(float(x.read()[0]))
        last = np.empty(100, np.float32)
        group.recv(last, 0, tag=9)
        assert [*found, float(last[0])] == [1, 2, 3, 4]
    group.barrier()


@on_ranks(2)
def test_what_cannot_be_sent_is_refused_before_anything_is(rank: int, cuda: Cuda, group: bagua.Group) -> None:
    x, here, peer = cuda.array(np.ones(8, np.float32)), np.ones(8, np.float32), 1 - rank
    for call, kind, text in (
        (lambda: group.send(x, rank), ValueError, "itself"),
        (lambda: group.send(x, 2), ValueError, "not a rank"),
        (lambda: group.send(x, peer, tag=-1), ValueError, "tag"),
        (lambda: group.recv(cuda.array(here, data=(x.address, True)), peer), ValueError, "read-only"),
        (lambda: group.send(cuda.array(here, strides=(8,)), peer), ValueError, "contiguous"),
        (lambda: group.exchange([(peer, x)], [(peer, here)]), TypeError, "different devices"),
    ):
        with pytest.raises(kind, match=text):
            call()
    stream = cuda.stream()
    with cuda.driver.captured(stream), pytest.raises(NotImplementedError, match="captured"):
        group.send(x, peer, stream=stream)
    # Nothing was lost, and the group goes on.
    handle = group.send(x, peer, async_op=True)
    group.recv(here, peer)
    handle.wait()
