"""CUDA arrays in the order of streams: late producers, consumers, handles, lifetimes, threads and contexts.

The simulated driver begins work only when a call waits for it (or `BAGUA_SIM_DELAY_US` after), so that what Bagua
forgets to wait for has not happened. The strict libnccl puts work on a stream only when its call is polled to its end,
and says so where an event is recorded before.
"""

from __future__ import annotations

import gc
import threading
import weakref
from typing import Any

import numpy as np
import pytest

import bagua
from bagua import extension
from tests.cuda.device_arrays import LEGACY, Cuda
from tests.cuda.ranks import BOTH, on_ranks

ONES = np.ones(1000, np.float32)


@on_ranks(2, by=BOTH)
def test_an_operation_begins_after_every_producer_of_its_arrays(cuda: Cuda, group: bagua.Group) -> None:
    first, second = cuda.stream(), cuda.stream()
    # The interface names a stream of its own; the call's is another one.
    x = cuda.array(ONES, stream=first)
    group.all_reduce(x, stream=second)
    assert x.read(second).tolist() == [2.0] * 1000
    # The array names no stream: the caller's has the work.
    x = cuda.array(ONES, stream=second)
    x.stream = None  # type: ignore[assignment]
    group.all_reduce(x, stream=second)
    assert x.read(second).tolist() == [2.0] * 1000
    # DLPack orders the stream that it is given.
    x = cuda.array(ONES, stream=first, dlpack=True)
    group.all_reduce(x, stream=second)
    assert x.asked == [second]
    assert x.read(second).tolist() == [2.0] * 1000
    # None is the legacy stream, by DLPack's number.
    x = cuda.array(ONES, stream=first, dlpack=True)
    group.all_reduce(x)
    assert x.asked == [LEGACY]
    assert x.read().tolist() == [2.0] * 1000
    # Source and target have producers of their own.
    x, out = cuda.array(ONES, stream=first), cuda.array(7 * ONES, stream=second)
    group.broadcast(x, 1, out=out)
    assert out.read().tolist() == [1.0] * 1000


@on_ranks(2, by=BOTH)
def test_a_result_does_not_overtake_work_on_its_array(rank: int, cuda: Cuda, group: bagua.Group) -> None:
    stream = cuda.stream()
    # Rank 0 only sends, rank 1 only gets: its copy to the device must not overtake the work on the array, either.
    x = cuda.array(ONES * rank, stream=stream)
    x.stream = None  # type: ignore[assignment]
    group.broadcast(x, 0, stream=stream)
    assert x.read(stream).tolist() == [0.0] * 1000


@on_ranks(2, by=BOTH)
def test_a_handle_orders_the_streams_that_it_gets(cuda: Cuda, group: bagua.Group) -> None:
    first, second, third = cuda.stream(), cuda.stream(), cuda.stream()
    x, y = cuda.array(ONES, stream=first), cuda.array(2 * ONES, stream=first)
    one = group.all_reduce(x, async_op=True, stream=second)
    two = group.all_reduce(y, async_op=True, stream=second)
    # The call's stream, and another one.
    assert one.wait() is x
    assert x.read(second).tolist() == [2.0] * 1000
    assert two.wait(30.0, stream=third) is y
    assert y.read(third).tolist() == [4.0] * 1000
    # In place three times, without a wait between.
    many = [group.all_reduce(x, async_op=True) for _ in range(3)]
    assert many[-1].synchronize(30.0) is x
    assert all(handle.is_completed() for handle in many)
    assert x.read(third).tolist() == [16.0] * 1000
    done: list[Any] = []
    group.all_reduce(x, async_op=True).then(done.append)
    group.all_reduce(y, async_op=True).synchronize()
    # The call happens on another thread, which nothing else here waits for.
    extension.wait_for_callbacks(60)
    assert done == [None]


@on_ranks(2)
def test_a_handle_is_completed_when_the_device_is_done(rank: int, cuda: Cuda, group: bagua.Group) -> None:
    x, late = cuda.array(ONES), cuda.array(ONES)
    handle = group.all_reduce(x, async_op=True)
    handle.wait()
    # The question lets the device begin; the copy to it was not there before.
    assert not handle.is_completed()
    while not handle.is_completed():
        pass
    if rank == 0:
        handle = group.all_reduce(late, async_op=True)
        for wait in (handle.wait, handle.synchronize):
            with pytest.raises(bagua.BaguaTimeoutError):
                wait(0.05)
        assert not handle.is_completed()
        group.send(ONES, 1)
    else:
        group.recv(np.empty_like(ONES), 0)
        handle = group.all_reduce(late, async_op=True)
    handle.wait()
    assert late.read().tolist() == [2.0] * 1000


@on_ranks(2, by=BOTH)
def test_an_operation_holds_its_array_until_the_device_is_done(cuda: Cuda, group: bagua.Group) -> None:
    x = cuda.array(ONES)
    cuda.arrays.remove(x)
    weakref.finalize(x, cuda.driver.cuMemFree_v2, x.address)
    held = weakref.ref(x)
    group.all_reduce(x, async_op=True).wait()
    # Neither the array nor the handle is referred to, and the copy to the device has not begun.
    del x
    gc.collect()
    assert held() is not None
    y = cuda.array(ONES)
    group.all_reduce(y, async_op=True).synchronize()
    # A later call lets go.
    group.all_reduce(y)
    group.barrier()
    gc.collect()
    assert held() is None


@on_ranks(2, by=BOTH)
def test_dropped_handles_leave_nothing_behind_when_the_group_is_left(cuda: Cuda, group: bagua.Group) -> None:
    arrays = [cuda.array(ONES) for _ in range(5)]
    for x in arrays:
        group.all_reduce(x, async_op=True)
    group.barrier()
    bagua.shutdown()
    for x in arrays:
        assert x.read().tolist() == [2.0] * 1000


@on_ranks(2, by=BOTH)
def test_any_thread_may_call_with_any_context_or_none(cuda: Cuda, group: bagua.Group) -> None:
    x = cuda.array(ONES)
    other = int(cuda.driver.get("cuDevicePrimaryCtxRetain", 1 - cuda.device))
    mine = int(cuda.driver.get("cuDevicePrimaryCtxRetain", cuda.device))
    for current in (0, other, mine):
        cuda.driver.cuCtxSetCurrent(current)
        group.all_reduce(x)
        assert (cuda.driver.get("cuCtxGetCurrent") or 0) == current
    threads = []

    def call() -> None:
        # A thread without a context.
        group.all_reduce(x, async_op=True).wait()
        threads.append(cuda.driver.get("cuCtxGetCurrent") or 0)

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    assert threads == [0]
    assert x.read().tolist() == [16.0] * 1000


@on_ranks(2, by=BOTH)
def test_a_stream_that_is_captured_is_refused_and_its_capture_stays_valid(cuda: Cuda, group: bagua.Group) -> None:
    stream, other = cuda.stream(), cuda.stream()
    arrays = [cuda.array(ONES, dlpack=True), cuda.array(ONES)]
    mine = cuda.array(ONES)
    handle = group.all_reduce(mine, async_op=True)
    with cuda.driver.captured(stream):
        for x in arrays:
            with pytest.raises(NotImplementedError, match="captured"):
                group.all_reduce(x, stream=stream)
        with pytest.raises(NotImplementedError, match="captured"):
            handle.wait(stream=stream)
        # Work on other streams goes on meanwhile, and disturbs no capture.
        arrays[1].stream = other
        for x in arrays:
            group.all_reduce(x, stream=other)
    for x in arrays:
        assert x.read(other).tolist() == [2.0] * 1000
    handle.wait()
    assert mine.read().tolist() == [2.0] * 1000


# --- by NCCL ----------------------------------------------------------------------------------------------------------


@on_ranks(2, by=["nccl"])
def test_operations_of_one_group_keep_their_order_whatever_runs_them(cuda: Cuda, group: bagua.Group) -> None:
    x = cuda.array(np.arange(1000, dtype=np.int32))
    # NCCL, our kernel, NCCL, host memory, NCCL, without a wait between.
    group.all_reduce(x, "max", async_op=True)
    group.all_reduce(x, "bor", async_op=True)
    group.all_reduce(x, "sum", async_op=True)
    out = cuda.empty(1000, np.int32)
    group.all_to_all_v(x, [500, 500], [500, 500], out=out, async_op=True)
    group.all_reduce(x, "max", async_op=True)
    handle = group.broadcast(out, 0, async_op=True)
    handle.wait()
    assert x.read().tolist() == (2 * np.arange(1000)).tolist()
    half = 2 * np.arange(1000)[:500]
    assert out.read().tolist() == [*half, *half]
    assert group.stats()["cuda"]["collective"] == "nccl"
