"""Buckets on devices in the order of streams: late producers, waits, lifetimes, callbacks, captures.

The simulated driver begins work only when a call waits for it, so that what Bagua forgets to wait for has not happened.
"""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest

import bagua
from bagua import extension
from tests.cuda.buckets import Memory, Queue, Tensors
from tests.cuda.device_arrays import Cuda
from tests.cuda.ranks import on_ranks

FLAT = [True, False]


def operate(bucket: Tensors, operation: str) -> None:
    """An operation by which two equal ranks keep their values."""
    if operation == "centralized":
        bucket.raw.append_centralized(False, False, True)
    else:
        bucket.raw.append_compressed(extension.Codec("minmax_u8", {}), False, False, False)


@pytest.mark.parametrize("flat", FLAT)
@pytest.mark.parametrize("operation", ["centralized", "compressed"])
@on_ranks(2)
def test_a_bucket_begins_after_the_streams_of_its_marks_and_a_wait_orders_its_stream(
    cuda: Cuda, operation: str, flat: bool
) -> None:
    first, second, third = cuda.stream(), cuda.stream(), cuda.stream()
    one, two = (Tensors(cuda, name, flat=flat, stream=first) for name in ("one", "two"))
    for bucket in (one, two):
        operate(bucket, operation)
    queue = Queue("engine", one, two)
    # Two steps back to back: the second writes behind the results of the first, and no call has waited for the device.
    for step in (1.0, 2.0):
        one.write(step, first)
        two.write(3.0 * step, second)
        # Each tensor is marked on a stream of its own; the last stream that has work on it is the one that counts.
        queue.mark(one, first)
        queue.mark(two, second)
        assert queue.raw.wait(30.0, stream=third) == 2
        for stream in (first, second):
            cuda.order(third, stream)
    assert set(one.read(third)) == {4.0}
    assert set(two.read(first)) == {12.0}
    queue.raw.shutdown()


@on_ranks(2)
def test_a_tensor_that_moved_is_communicated_and_held_until_the_device_is_done(cuda: Cuda) -> None:
    stream = cuda.stream()
    bucket = Tensors(cuda, "one", sizes=(500, 300), stream=stream)
    operate(bucket, "centralized")
    queue = Queue("engine", bucket)
    moved = Memory(cuda, 300, stream=stream)
    moved.write(5.0, stream)
    bucket.write(1.0, stream)
    kept = Kept(moved)
    held = weakref.ref(kept)
    queue.raw.mark_ready(queue.numbers["one.0"], stream=stream)
    queue.raw.mark_ready(queue.numbers["one.1"], moved.address, 300, stream=stream, keep=kept)
    del kept
    assert queue.raw.wait(30.0, stream=stream) == 1
    gc.collect()
    # The device has not begun to write it.
    assert held() is not None
    assert bucket.read(stream).tolist() == [2.0] * 500 + [1.0] * 300
    assert set(moved.read(stream)) == {10.0}
    steps = 1
    while held() is not None and steps < 5:
        # A later step asks the device, and lets go.
        steps += 1
        queue.step(stream)
        assert set(moved.read(stream)) == {5.0 * 2**steps}
        gc.collect()
    assert held() is None
    queue.raw.shutdown()


class Kept:
    """Something that a bucket holds."""

    def __init__(self, memory: Memory) -> None:
        self.memory = memory


@on_ranks(2)
def test_a_bucket_that_is_replaced_is_held_until_the_device_is_done(cuda: Cuda) -> None:
    stream = cuda.stream()
    bucket = Tensors(cuda, "one", stream=stream)
    operate(bucket, "centralized")
    held = weakref.ref(bucket.memory[0])
    queue = Queue("engine", bucket)
    bucket.write(1.0, stream)
    queue.step(stream)
    array = bucket.memory[0].array
    # Registered anew without it, and no object refers to it: the copies to it have not begun.
    other = Tensors(cuda, "other", flat=False, stream=stream)
    operate(other, "centralized")
    del bucket
    queue.register(other)
    gc.collect()
    assert held() is not None
    assert set(array.read(stream)) == {2.0}
    other.write(2.0, stream)
    queue.step(stream)
    assert set(other.read(stream)) == {4.0}
    gc.collect()
    assert held() is None
    # The same bucket in another engine.
    next_queue = Queue("next", other)
    next_queue.step(stream)
    assert set(other.read(stream)) == {8.0}
    queue.raw.shutdown()
    next_queue.raw.shutdown()


@on_ranks(2)
def test_a_callback_runs_on_the_legacy_stream_between_the_operations_around_it(cuda: Cuda, group: bagua.Group) -> None:
    late, stream = cuda.stream(), cuda.stream()
    bucket = Tensors(cuda, "one", stream=late)
    seen: list[Any] = []

    def doubles(name: str) -> None:
        # The user's code on the device: its own stream there is the legacy stream.
        cuda.driver.cuCtxSetCurrent(cuda.driver.get("cuDevicePrimaryCtxRetain", 0))
        values = bucket.memory[0].array.read()
        seen.append(set(values))
        bucket.write(2 * values)

    bucket.raw.append_callback(doubles)
    bucket.raw.append_centralized(False, False, True)
    bucket.raw.append_callback(doubles)
    queue = Queue("engine", bucket)
    for step in (1.0, 3.0):
        bucket.write(step, late)
        queue.mark(bucket, late)
        assert queue.raw.wait(30.0, stream=stream) == 1
        assert set(bucket.read(stream)) == {8.0 * step}
        cuda.order(stream, late)
    assert seen == [{1.0}, {4.0}, {3.0}, {12.0}]
    queue.raw.shutdown()
    group.barrier()


@on_ranks(2)
def test_a_stream_that_is_captured_is_refused_and_its_capture_stays_valid(cuda: Cuda) -> None:
    stream, other = cuda.stream(), cuda.stream()
    bucket = Tensors(cuda, "one", sizes=(500,), stream=other)
    operate(bucket, "centralized")
    queue = Queue("engine", bucket)
    bucket.write(1.0, other)
    with cuda.driver.captured(stream):
        with pytest.raises(NotImplementedError, match="captured"):
            queue.mark(bucket, stream)
        # It was not marked.
        queue.mark(bucket, other)
        with pytest.raises(NotImplementedError, match="captured"):
            queue.raw.wait(30.0, stream=stream)
    # The wait that was refused has reported nothing.
    assert queue.raw.wait(30.0, stream=stream) == 1
    assert set(bucket.read(stream)) == {2.0}
    queue.raw.shutdown()
