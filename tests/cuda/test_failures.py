"""Operations on devices when something fails: a driver call, a rank that dies, a deadline.

An operation joins by a function that makes it. Averaging goes on without the rank that fails:
test_averaging_on_devices.py. What else fails with NCCL is in test_nccl_failures.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

import bagua
from bagua import extension
from tests.cuda.buckets import Queue, Tensors
from tests.cuda.device_arrays import Cuda
from tests.cuda.failing_calls import (
    UNKNOWN,
    die_in_the_middle,
    is_lost,
    only,
    run,
    two_errors,
)
from tests.cuda.ranks import Ranks, device_rank

ONES = np.ones(1000, np.float32)


class Running(NamedTuple):
    """An operation of two ranks on arrays of ones, which both do again and again."""

    step: Callable[[], object]
    #: Begins a step that needs the other rank.
    begin: Callable[[], object]
    #: What a step has left on the device.
    read: Callable[[], np.ndarray[Any, Any]]


def in_place(x: Any, begin: Callable[[], Any]) -> Running:
    """An operation on `x` that `begin` begins."""
    return Running(step=lambda: begin().synchronize(30.0), begin=begin, read=x.read)


@contextmanager
def verb(cuda: Cuda, group: bagua.Group, count: int) -> Iterator[Running]:
    """An all_reduce."""
    x = cuda.array(np.ones(count, np.float32))
    yield in_place(x, lambda: group.all_reduce(x, async_op=True))


@contextmanager
def transposed(cuda: Cuda, group: bagua.Group, count: int) -> Iterator[Running]:
    """An all_to_all, which NCCL has no call for: its messages are grouped."""
    x = cuda.array(np.ones((2, count), np.float32))
    yield in_place(x, lambda: group.all_to_all(x, async_op=True))


@contextmanager
def message(cuda: Cuda, group: bagua.Group, count: int) -> Iterator[Running]:
    """A message to the other rank and one from it."""
    x, got, peer = cuda.array(np.ones(count, np.float32)), cuda.empty(count, np.float32), 1 - group.rank
    yield Running(
        step=lambda: group.exchange([(peer, x)], [(peer, got)]),
        begin=lambda: group.exchange([(peer, x)], [(peer, got)], async_op=True),
        read=got.read,
    )


@contextmanager
def queued(bucket: Tensors, stream: int) -> Iterator[Running]:
    """A bucket in an engine; other ranks may fail before it is registered."""
    queue = Queue("engine")
    bucket.write(1.0, stream)

    def step() -> None:
        if not queue.buckets:
            queue.register(bucket)
        queue.step(stream)

    yield Running(step=step, begin=lambda: queue.mark(bucket, stream), read=lambda: bucket.read(stream))
    queue.raw.shutdown()


@contextmanager
def summed(cuda: Cuda, group: bagua.Group, count: int) -> Iterator[Running]:
    """A bucket whose tensors lie back to back."""
    stream = cuda.stream()
    bucket = Tensors(cuda, "one", sizes=(count, 100), stream=stream)
    bucket.raw.append_centralized(False, False, True)
    with queued(bucket, stream) as running:
        yield running


@contextmanager
def compressed(cuda: Cuda, group: bagua.Group, count: int) -> Iterator[Running]:
    """A bucket that is encoded, and whose tensors lie apart on rank 1."""
    stream = cuda.stream()
    bucket = Tensors(cuda, "one", sizes=(count, 101), flat=group.rank == 0, stream=stream)
    bucket.raw.append_compressed(extension.Codec("minmax_u8", {}), True, False, False)
    with queued(bucket, stream) as running:
        yield running


OPERATIONS = {each.__name__: each for each in (verb, transposed, message, summed, compressed)}

# --- a call that fails ------------------------------------------------------------------------------------------------


def fails_on_rank_1(rank: int, operation: str) -> list[dict[str, Any]]:
    cuda, group = Cuda(), bagua.init()
    with OPERATIONS[operation](cuda, group, 1000) as running:
        found = two_errors(running.step)
    bagua.shutdown()
    return found


@pytest.mark.parametrize(
    ("operation", "api", "nth"),
    # Of the copies to the device, and of the pinned memory, the first are the test's.
    [
        ("verb", "cuMemcpyDtoHAsync", 1),
        ("verb", "cuMemcpyHtoDAsync", 2),
        ("verb", "cuEventQuery", 1),
        ("message", "cuMemcpyDtoHAsync", 1),
        ("message", "cuMemHostAlloc", 2),
        ("message", "cuEventQuery", 1),
        ("summed", "cuMemcpyDtoHAsync", 1),
        ("summed", "cuMemcpyHtoDAsync", 3),
        ("summed", "cuEventRecord", 1),
        ("compressed", "cuMemcpyDtoHAsync", 1),
        ("compressed", "cuMemcpyHtoDAsync", 5),
        ("compressed", "cuEventRecord", 1),
    ],
)
def test_a_failing_call_is_a_device_error_here_and_an_exception_of_this_rank_there(
    ranks: Ranks, operation: str, api: str, nth: int
) -> None:
    there, here = run(ranks, 2, fails_on_rank_1, operation, each=only(1, BAGUA_SIM_FAIL=f"{api}:{nth}:{UNKNOWN}"))
    for error in here:
        assert (error["class"], error["api"], error["code"], error["device"]) == ("DeviceError", api, UNKNOWN, 0)
        assert f"{api} failed on device 0: CUDA_ERROR_UNKNOWN ({UNKNOWN})" in error["text"]
    for error in there:
        assert (error["class"], error["rank"], error["kind"]) == ("PeerRaisedError", 1, "DeviceError")
        assert api in error["text"]


# --- a rank that dies, and one that does not come ---------------------------------------------------------------------


@device_rank
def one_dies(rank: int, cuda: Cuda, group: bagua.Group, folder: str, operation: str, count: int) -> Any:
    with OPERATIONS[operation](cuda, group, count) as running:
        running.step()
        running.read()
        found = die_in_the_middle(rank, folder, begin=running.begin, step=running.step)
        with pytest.raises(bagua.PeerLostError):
            running.step()
    return found


@pytest.mark.parametrize(
    ("collective", "operation", "count"),
    [
        ("staged", "verb", 8 << 20),
        ("staged", "message", 1 << 20),
        pytest.param("staged", "summed", 8 << 20, marks=pytest.mark.slow),
        pytest.param("staged", "compressed", 8 << 20, marks=pytest.mark.slow),
        ("nccl", "verb", 1 << 20),
        ("nccl", "transposed", 1 << 20),
        pytest.param("nccl", "compressed", 8 << 20, marks=pytest.mark.slow),
    ],
)
def test_a_rank_that_is_killed_in_the_middle_is_lost(
    ranks: Ranks, tmp_path: Path, collective: str, operation: str, count: int
) -> None:
    is_lost(ranks, one_dies, tmp_path, operation, count, BAGUA_CUDA_COLLECTIVE=collective)


@device_rank
def waits_for_the_other(rank: int, cuda: Cuda, group: bagua.Group, operation: str) -> Any:
    x = cuda.array(ONES)
    group.all_reduce(x)
    found: Any = None
    if rank == 0:
        with pytest.raises(bagua.BaguaTimeoutError) as raised:
            group.all_reduce(x, timeout=0.5) if operation == "verb" else group.recv(x, 1, timeout=0.5)
        found = raised.value.missing
    else:
        # It raises as soon as the other one gives up.
        with pytest.raises(bagua.BaguaTimeoutError):
            group.recv(np.empty_like(ONES), 0)
    return found


@pytest.mark.parametrize("operation", ["verb", "message"])
def test_a_deadline_names_the_rank_that_did_not_come(ranks: Ranks, operation: str) -> None:
    missing, _ = ranks(2, waits_for_the_other, operation)
    assert missing == (1,)
