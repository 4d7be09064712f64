"""CUDA arrays when something fails: a driver call, memory that is short, a rank that dies, a deadline."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import bagua
from tests.cuda.device_arrays import Cuda
from tests.cuda.failing_calls import (
    SHORT,
    UNKNOWN,
    Calls,
    check_each,
    count_calls,
    die_in_the_middle,
    fields_of,
    is_lost_within_a_second,
    only,
    run,
)
from tests.cuda.ranks import Ranks

ONES = np.ones(1000, np.float32)
#: CUDA_ERROR_ILLEGAL_ADDRESS.
ILLEGAL = 700


def fails_on_rank_1(rank: int) -> list[dict[str, Any]]:
    cuda, group = Cuda(), bagua.init()
    x = cuda.array(ONES)
    found: list[dict[str, Any]] = []
    # A rank that has the others' data before one of them fails gets the error at its next call.
    while len(found) < 2:
        try:
            group.all_reduce(x, timeout=20.0)
        except bagua.BaguaError as error:
            found.append(fields_of(error))
    bagua.shutdown()
    return found


@pytest.mark.parametrize("code", [UNKNOWN, ILLEGAL])
@pytest.mark.parametrize("api", ["cuMemcpyDtoHAsync", "cuMemcpyHtoDAsync", "cuEventQuery"])
def test_a_failing_call_is_a_device_error_here_and_an_exception_of_this_rank_there(
    ranks: Ranks, api: str, code: int
) -> None:
    # The second copy to the device is the operation's; the first was that of the test.
    nth = 2 if api == "cuMemcpyHtoDAsync" else 1
    there, here = run(ranks, 2, fails_on_rank_1, each=only(1, BAGUA_SIM_FAIL=f"{api}:{nth}:{code}"))
    for error in here:
        assert (error["class"], error["api"], error["code"], error["device"]) == ("DeviceError", api, code, 0)
        assert error["name"] == {UNKNOWN: "CUDA_ERROR_UNKNOWN", ILLEGAL: "CUDA_ERROR_ILLEGAL_ADDRESS"}[code]
        assert f"{api} failed on device 0: {error['name']} ({code})" in error["text"]
    for error in there:
        assert (error["class"], error["rank"], error["kind"]) == ("PeerRaisedError", 1, "DeviceError")
        assert api in error["text"]


def short_of_memory(rank: int) -> dict[str, Any]:
    cuda, group = Cuda(), bagua.init()
    x = cuda.array(ONES)
    with pytest.raises(bagua.DeviceError) as raised:
        group.all_reduce(x)
    group.barrier()
    group.all_reduce(x)
    assert x.read().tolist() == [2.0] * 1000
    bagua.shutdown()
    cuda.close()
    return fields_of(raised.value)


def test_memory_that_is_short_before_anything_was_sent_poisons_nothing(ranks: Ranks) -> None:
    # The first pinned memory is the test's.
    for error in ranks(2, short_of_memory, BAGUA_SIM_FAIL=f"cuMemHostAlloc:3:{SHORT}"):
        assert (error["api"], error["name"]) == ("cuMemHostAlloc", "CUDA_ERROR_OUT_OF_MEMORY")


def one_dies(rank: int, folder: str) -> Any:
    cuda, group = Cuda(), bagua.init()
    x = cuda.array(np.ones(8 << 20, np.float32))
    group.all_reduce(x)
    found = die_in_the_middle(
        rank,
        folder,
        begin=lambda: group.all_reduce(x, async_op=True),
        step=lambda: group.all_reduce(x, async_op=True).wait(30.0),
    )
    bagua.shutdown()
    cuda.close()
    return found


def test_a_rank_that_is_killed_in_the_middle_is_lost_within_a_second(ranks: Ranks, tmp_path: Path) -> None:
    is_lost_within_a_second(ranks, one_dies, tmp_path)


def waits_for_the_other(rank: int) -> Any:
    cuda, group = Cuda(), bagua.init()
    x = cuda.array(ONES)
    group.all_reduce(x)
    found: Any = None
    if rank == 0:
        with pytest.raises(bagua.BaguaTimeoutError) as raised:
            group.all_reduce(x, timeout=0.5)
        found = raised.value.missing
    else:
        # It raises as soon as the other one gives up.
        with pytest.raises(bagua.BaguaTimeoutError):
            group.recv(np.empty_like(ONES), 0)
    bagua.shutdown()
    cuda.close()
    return found


def test_a_deadline_names_the_rank_that_did_not_come(ranks: Ranks) -> None:
    missing, _ = ranks(2, waits_for_the_other)
    assert missing == (1,)


#: What the product calls, by the symbol's name without its version.
CALLED = (
    "cuDevicePrimaryCtxRetain",
    "cuCtxGetCurrent",
    "cuCtxPushCurrent",
    "cuCtxPopCurrent",
    "cuCtxGetStreamPriorityRange",
    "cuThreadExchangeStreamCaptureMode",
    "cuStreamCreateWithPriority",
    "cuStreamDestroy",
    "cuStreamWaitEvent",
    "cuStreamIsCapturing",
    "cuEventCreate",
    "cuEventDestroy",
    "cuEventRecord",
    "cuEventQuery",
    "cuMemHostAlloc",
    "cuMemFreeHost",
    "cuMemcpyDtoHAsync",
    "cuMemcpyHtoDAsync",
    "cuMemcpyDtoDAsync",
    "cuPointerGetAttributes",
)


#: Their failure has no caller to raise it in, and comes after the operation.
NOT_RAISED = ("cuCtxPopCurrent", "cuStreamDestroy", "cuEventDestroy", "cuMemFreeHost")


def any_call_fails(rank: int, verbs: bool) -> str:
    """Every kind of call, by blocking verbs and handles. Returns how the rank ended, and ends by itself."""
    cuda = Cuda()
    x, y, out = (cuda.array(ONES) for _ in range(3))
    exported = cuda.array(ONES, dlpack=True)
    if not verbs:
        return ""
    group = bagua.init()
    outcome = "done"
    try:
        group.all_reduce(x)
        handle = group.all_reduce(y, async_op=True)
        group.broadcast(x, 1, out=out)
        handle.wait(20.0)
        handle.synchronize(20.0)
        handle.is_completed()
        group.all_reduce(exported)
        group.barrier()
    except bagua.BaguaError as error:
        outcome = type(error).__name__
    bagua.shutdown()
    return outcome


@pytest.fixture(scope="module")
def calls(_driver_of_ranks: Path) -> Calls:
    """How often each function is called where nothing fails."""
    return count_calls(Ranks(_driver_of_ranks), any_call_fails)


@pytest.mark.parametrize("function", CALLED)
def test_a_call_that_fails_at_any_place_ends_in_an_error_and_never_in_a_hang_or_an_abort(
    ranks: Ranks, calls: Calls, function: str
) -> None:
    check_each(ranks, any_call_fails, calls, function, raised_for=set(CALLED) - set(NOT_RAISED), last=True)


def test_the_functions_that_may_fail_are_those_that_the_product_names() -> None:
    source = Path(__file__).resolve().parents[2] / "rust/bagua-cuda/src/driver_functions.rs"
    (table,) = re.findall(r"^functions! \{(.*?)\}", source.read_text(), re.MULTILINE | re.DOTALL)
    named = [name.removesuffix("_v2") for name in table.split()]
    # Those of kernels and of timings fail in test_codec_on_device.py and test_compressed_on_device.py.
    kernels = [
        "cuDeviceGetAttribute",
        "cuEventElapsedTime",
        "cuLaunchKernel",
        "cuMemAllocAsync",
        "cuMemFreeAsync",
        "cuMemsetD8Async",
    ]
    assert sorted(named) == sorted([*CALLED, *kernels, "cuModuleGetFunction", "cuModuleLoadData"])
