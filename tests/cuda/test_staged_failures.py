"""CUDA arrays when something fails: a driver call, memory that is short, a rank that dies, a deadline."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import bagua
from tests.cuda.device_arrays import Cuda
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


# The first pinned memory is the test's.
@on_ranks(2, BAGUA_SIM_FAIL=f"cuMemHostAlloc:3:{SHORT}")
def test_memory_that_is_short_before_anything_was_sent_poisons_nothing(cuda: Cuda, group: bagua.Group) -> None:
    x = cuda.array(ONES)
    with pytest.raises(bagua.DeviceError, match="cuMemHostAlloc failed on device 0: CUDA_ERROR_OUT_OF_MEMORY"):
        group.all_reduce(x)
    group.barrier()
    group.all_reduce(x)
    assert x.read().tolist() == [2.0] * 1000


@device_rank
def one_dies(rank: int, cuda: Cuda, group: bagua.Group, folder: str) -> Any:
    x = cuda.array(np.ones(8 << 20, np.float32))
    group.all_reduce(x)
    found = die_in_the_middle(
        rank,
        folder,
        begin=lambda: group.all_reduce(x, async_op=True),
        step=lambda: group.all_reduce(x, async_op=True).wait(30.0),
    )
    return found


def test_a_rank_that_is_killed_in_the_middle_is_lost_at_once(ranks: Ranks, tmp_path: Path) -> None:
    is_lost_at_once(ranks, one_dies, tmp_path)


@device_rank
def waits_for_the_other(rank: int, cuda: Cuda, group: bagua.Group) -> Any:
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
    return found


def test_a_deadline_names_the_rank_that_did_not_come(ranks: Ranks) -> None:
    missing, _ = ranks(2, waits_for_the_other)
    assert missing == (1,)
