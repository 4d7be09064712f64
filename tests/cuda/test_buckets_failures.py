"""Buckets on devices when something fails: a driver call, memory that is short, a rank that dies, a deadline."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import bagua
from bagua import engine
from tests.cuda.buckets import Queue, Tensors
from tests.cuda.device_arrays import Cuda
from tests.cuda.driver import HOST_FUNCTION
from tests.cuda.failing_calls import (
    SHORT,
    UNKNOWN,
    die_in_the_middle,
    fields_of,
    is_lost_at_once,
    only,
    run,
)
from tests.cuda.ranks import Ranks, device_rank, on_ranks


def fails_on_rank_1(rank: int, compressed: bool) -> list[dict[str, Any]]:
    cuda, _ = Cuda(), bagua.init()
    stream = cuda.stream()
    bucket = Tensors(cuda, "one", stream=stream)
    if compressed:
        bucket.raw.append_compressed(engine.Codec("minmax_u8", {}), True, False, False)
    else:
        bucket.raw.append_centralized(True, False, True)
    found: list[dict[str, Any]] = []
    queue = Queue("engine")
    # A rank that has the others' data before one of them fails gets the error at its next call.
    while len(found) < 2:
        try:
            if not queue.buckets:
                queue.register(bucket)
            queue.step(stream)
        except bagua.BaguaError as error:
            found.append(fields_of(error))
    queue.raw.shutdown()
    bagua.shutdown()
    return found


@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize(("api", "nth"), [("cuEventRecord", 1), ("cuMemcpyDtoHAsync", 1), ("cuMemcpyHtoDAsync", 2)])
def test_a_failing_call_is_a_device_error_here_and_an_exception_of_this_rank_there(
    ranks: Ranks, api: str, nth: int, compressed: bool
) -> None:
    # The first copy to the device is the test's.
    fail = f"{api}:{nth}:{UNKNOWN}"
    there, here = run(ranks, 2, fails_on_rank_1, compressed, each=only(1, BAGUA_SIM_FAIL=fail))
    for error in here:
        assert (error["class"], error["api"], error["code"], error["device"]) == ("DeviceError", api, UNKNOWN, 0)
    for error in there:
        assert (error["class"], error["rank"], error["kind"]) == ("PeerRaisedError", 1, "DeviceError")
        assert api in error["text"]


# The first pinned memory is the test's, twice.
@on_ranks(2, BAGUA_SIM_FAIL=f"cuMemHostAlloc:3:{SHORT}")
def test_memory_that_is_short_at_the_registration_poisons_nothing(cuda: Cuda) -> None:
    bucket = Tensors(cuda, "one")
    bucket.raw.append_centralized(False, False, True)
    bucket.write(1.0)
    queue = Queue("engine")
    with pytest.raises(bagua.DeviceError, match="cuMemHostAlloc failed on device 0: CUDA_ERROR_OUT_OF_MEMORY"):
        queue.register(bucket)
    queue.register(bucket)
    queue.step()
    assert set(bucket.read()) == {2.0}
    queue.raw.shutdown()


@device_rank
def one_dies(rank: int, cuda: Cuda, folder: str, compressed: bool) -> Any:
    bucket = Tensors(cuda, "one", flat=not compressed, sizes=(8 << 20, 100))
    if compressed:
        bucket.raw.append_compressed(engine.Codec("minmax_u8", {}), True, False, False)
    else:
        bucket.raw.append_centralized(True, False, True)
    queue = Queue("engine", bucket)
    queue.step()
    found = die_in_the_middle(rank, folder, begin=lambda: queue.mark(bucket), step=queue.step)
    queue.raw.shutdown()
    return found


@pytest.mark.parametrize("compressed", [False, True])
def test_a_rank_that_is_killed_in_the_middle_is_lost_at_once(ranks: Ranks, tmp_path: Path, compressed: bool) -> None:
    is_lost_at_once(ranks, one_dies, tmp_path, compressed)


@device_rank
def waits_for_a_producer(rank: int, cuda: Cuda, group: bagua.Group, folder: str) -> str:
    stream = cuda.stream()
    bucket = Tensors(cuda, "one", stream=stream)
    bucket.raw.append_compressed(engine.Codec("minmax_u8", {}), True, False, False)
    queue = Queue("engine", bucket)
    if rank == 1:
        # The other rank is in the middle of its step.
        while not Path(folder, "waits").exists():
            time.sleep(0.01)
        group.communicator.raise_("RuntimeError", "of the user")
        return ""
    # Work of the caller that comes to its end only after the other rank has failed.
    ended = Path(folder, "ended")

    @HOST_FUNCTION
    def blocks(_: Any) -> None:
        deadline = time.monotonic() + 60
        while not ended.exists() and time.monotonic() < deadline:
            time.sleep(0.01)

    cuda.driver.cuLaunchHostFunc(stream, blocks, None)
    queue.mark(bucket, stream)
    Path(folder, "waits").touch()
    try:
        queue.raw.wait(30.0, stream=stream)
        text = ""
    except bagua.PeerRaisedError as error:
        text = str(error)
    ended.touch()
    queue.raw.shutdown()
    return text


def test_a_wait_for_a_producer_ends_when_another_rank_fails(ranks: Ranks, tmp_path: Path) -> None:
    assert "of the user" in ranks(2, waits_for_a_producer, str(tmp_path))[0]


@on_ranks(2)
def test_the_bits_of_a_bucket_do_not_change_when_its_tensors_are_large(rank: int, cuda: Cuda) -> None:
    sides = []
    for on in (None, cuda):
        bucket = Tensors(on, "large", flat=False, sizes=((1 << 20) + 17, 5))
        bucket.raw.append_compressed(engine.Codec("minmax_u8", {}), True, False, True)
        bucket.attach("error", dtype=np.float32)
        sides.append((bucket, Queue("host" if on is None else "device", bucket)))
    values = np.random.default_rng(rank).standard_normal(sides[0][0].count).astype(np.float32)
    for bucket, queue in sides:
        bucket.write(values)
        queue.step()
    host, device = sides[0][0], sides[1][0]
    assert host.read().tobytes() == device.read().tobytes()
    assert host.extra["error"].read().tobytes() == device.extra["error"].read().tobytes()
    for _, queue in sides:
        queue.raw.shutdown()
