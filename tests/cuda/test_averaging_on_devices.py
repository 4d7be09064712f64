"""Asynchronous averaging of weights on devices: the bits of the host, the order of streams, the lock, and failures."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import bagua
from bagua import extension
from bagua import group as groups
from bagua.cuda.arrays import device_of
from tests.cases import attempt
from tests.cuda.buckets import Memory, Queue, Tensors
from tests.cuda.device_arrays import LEGACY, Cuda
from tests.cuda.driver import until
from tests.cuda.failing_calls import die_in_the_middle, is_lost
from tests.cuda.kernel_cases import narrowed, widened
from tests.cuda.ranks import Ended, Ranks, ended

#: Seconds: no round without a request; and many in a short test.
NEVER, OFTEN = 3600.0, 0.002
COUNT = 5003
LIMIT = 30.0


class Averaged:
    """An array that a thread averages under a lock: on the host, without `cuda`, or on the device."""

    def __init__(
        self,
        cuda: Cuda | None,
        name: str,
        values: Any,
        interval: float = NEVER,
        stream: int = LEGACY,
        codec: Any = None,
        dtype: Any = None,
    ) -> None:
        self.cuda, self.lock = cuda, extension.WeightLock()
        self.memory = Memory(cuda, len(values), dtype or values.dtype, stream)
        self.memory.write(values, stream)
        described = [(self.memory.address, len(values), self.memory.code, cuda is not None)]
        device = None if cuda is None else (device_of(cuda.device), stream, self.memory)
        communicator = groups.default(required=True).communicator
        self.raw = communicator.averager(
            name, described, self.lock, interval, codec, buffers=[], join_server=None, digest=bytes(32),
            takes_part=True, device=device,
        )  # fmt: skip

    def write(self, values: Any, stream: int = LEGACY) -> None:
        """New values under the lock; on a device late."""
        self.lock.lock(stream=stream)
        self.memory.write(values, stream)
        self.lock.unlock(stream=stream)

    def read(self, stream: int = LEGACY) -> np.ndarray[Any, Any]:
        """The values under the lock, as work of the stream sees them."""
        self.lock.lock(stream=stream)
        self.lock.unlock(stream=stream)
        return self.memory.read(stream)

    def synchronize(self) -> None:
        """A round that all ranks ask for."""
        self.raw.synchronize(LIMIT)

    def wait_until(self, what: str, done: Callable[[], bool]) -> None:
        """Returns when it is so; raises what failed in the averaging."""
        until(lambda: self.raw.check() is not None or done(), what)


def values_of(rank: int, dtype: Any, step: int = 0) -> np.ndarray[Any, Any]:
    """Returns the values of a rank, as integers for bfloat16."""
    drawn = np.random.default_rng((rank, step)).standard_normal(COUNT) * 2.0 ** (step % 3)
    drawn[:3] = 1e8, -0.0, 2.0**-24
    return narrowed("bf16", drawn) if dtype == "bfloat16" else drawn.astype(dtype)


def moved(values: np.ndarray[Any, Any], step: np.ndarray[Any, Any], dtype: str) -> np.ndarray[Any, Any]:
    """The sum, rounded to the type."""
    if dtype != "bfloat16":
        return values + step
    return narrowed("bf16", widened("bf16", values) + widened("bf16", step))


# --- arrays -----------------------------------------------------------------------------------------------------------


def has_the_bits_of_the_host(rank: int, cuda: Cuda) -> None:
    stream = cuda.stream()
    for dtype in ("float32", "float64", "float16", "bfloat16"):
        for codec in (None, extension.Codec("minmax_u8", {})) if dtype == "float32" else (None,):
            begin = values_of(rank, dtype)
            both = [
                Averaged(on, f"{on is None} {dtype} {codec}", begin, codec=codec, stream=stream, dtype=dtype)
                for on in (None, cuda)
            ]
            for step in range(1, 4):
                for each in both:
                    each.synchronize()
                host, device = (each.read(stream) for each in both)
                assert host.tobytes() == device.tobytes(), (dtype, codec, step)
                for each in both:
                    each.write(moved(host, values_of(rank, dtype, step), dtype), stream)
            for each in both:
                each.raw.stop(LIMIT)
    assert bagua.stats()["groups"]["world"]["cuda"]["launches"] >= 15


def runs_as_an_operation_of_a_bucket(rank: int, cuda: Cuda) -> None:
    stream, other = cuda.stream(), cuda.stream()
    buckets, operations, locks = [], [], []
    for on in (None, cuda):
        bucket = Tensors(on, f"bucket {on is None}", flat=on is None, stream=other)
        lock = extension.WeightLock()
        operations.append(bucket.raw.append_asynchronous_model_average(lock))
        locks.append(lock)
        buckets.append(bucket)
    queue = Queue("averaged", *buckets)
    for step, takes_part in enumerate((True, True, False, True)):
        for bucket, operation, lock in zip(buckets, operations, locks, strict=True):
            operation.set_takes_part(takes_part or rank != 0)
            # Work of a stream that no mark names.
            lock.lock(stream=other)
            bucket.write(np.resize(values_of(rank, np.float32, step), bucket.count), other)
            lock.unlock(stream=other)
        queue.step(stream)
        host, device = (bucket.read(stream) for bucket in buckets)
        assert host.tobytes() == device.tobytes(), step
    queue.raw.shutdown()


def averages_nothing_between_abort_and_resume(rank: int, cuda: Cuda) -> None:
    size, stream = groups.default(required=True).size, cuda.stream()
    averaged = Averaged(cuda, "abort", np.full(COUNT, float(rank), np.float32), OFTEN, stream)
    averaged.wait_until("a round", lambda: averaged.raw.stats()["rounds"] > 0)
    if rank == 0:
        averaged.raw.abort(LIMIT)
        averaged.lock.order(stream=stream)
        # No lock is needed: nothing writes any more.
        averaged.memory.write(np.full(COUNT, 100.0, np.float32), stream)
        assert averaged.raw.stats()["state"] == "stopped"
    bagua.barrier()
    rounds = averaged.raw.stats()["rounds"]
    if rank and size > 2:
        averaged.wait_until("rounds of the others", lambda: averaged.raw.stats()["rounds"] > rounds + 2)
    bagua.barrier()
    if rank == 0:
        averaged.lock.mark(stream=stream)
        averaged.raw.resume()
    # A status from before the call of `resume` may be in flight.
    rounds = averaged.raw.stats()["rounds"]
    averaged.wait_until("rounds of all", lambda: averaged.raw.stats()["rounds"] > rounds + 1)
    bagua.barrier()
    averaged.synchronize()
    found = set(averaged.read(stream))
    assert len(found) == 1
    assert found.pop() > 100.0 / size - 1.0
    averaged.raw.stop(LIMIT)
    # What is there stays after the end, and the lock still works.
    averaged.write(np.full(COUNT, 3.0, np.float32), stream)
    assert set(averaged.read(stream)) == {3.0}


def refuses_a_stream_that_is_being_captured(rank: int, cuda: Cuda) -> None:
    captured = cuda.stream()
    averaged = Averaged(cuda, "captured", np.full(COUNT, float(rank), np.float32))
    with cuda.driver.captured(captured, mode=2):
        for take in (averaged.lock.lock, averaged.lock.begin_training, averaged.lock.order):
            with pytest.raises(NotImplementedError, match="captured"):
                take(stream=captured)
    # It was not taken.
    averaged.synchronize()
    assert set(averaged.read()) == {sum(range(groups.default(required=True).size)) / groups.default(required=True).size}
    averaged.raw.stop(LIMIT)


CASES: tuple[Callable[[int, Cuda], None], ...] = (
    has_the_bits_of_the_host,
    runs_as_an_operation_of_a_bucket,
    averages_nothing_between_abort_and_resume,
    refuses_a_stream_that_is_being_captured,
)


def arrays(rank: int) -> dict[str, str]:
    bagua.init()
    cuda = Cuda()
    found = attempt({case.__name__: lambda case=case: case(rank, cuda) for case in CASES}, bagua.barrier)
    bagua.shutdown()
    cuda.close()
    return found


# --- worlds -----------------------------------------------------------------------------------------------------------


NAMED: dict[str, Any] = {"timeout": 120.0, "BAGUA_TIMEOUT": 30}


@pytest.fixture(scope="module")
def of_arrays(_driver_of_ranks: Path) -> Ended:
    return ended(_driver_of_ranks, 3, arrays, **NAMED)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_a_thread_averages_arrays_on_devices(of_arrays: Ended, case: Callable[..., None]) -> None:
    of_arrays.check(case.__name__)


def test_averaging_makes_no_fault_leaves_nothing_and_does_not_wait_for_the_device(of_arrays: Ended) -> None:
    of_arrays.ranks.check()


# --- failures ---------------------------------------------------------------------------------------------------------


def dies(rank: int, folder: str) -> int | None:
    cuda = Cuda()
    bagua.init()
    averaged = Averaged(cuda, "dying", np.full(COUNT, float(rank), np.float32), OFTEN)
    averaged.wait_until("rounds", lambda: averaged.raw.stats()["rounds"] > 2)
    found = die_in_the_middle(
        rank, folder, begin=lambda: None, step=lambda: averaged.wait_until("a loss", lambda: False)
    )
    bagua.shutdown()
    cuda.close()
    return found


def test_a_rank_that_is_killed_is_lost(ranks: Ranks, tmp_path: Path) -> None:
    is_lost(ranks, dies, tmp_path)
