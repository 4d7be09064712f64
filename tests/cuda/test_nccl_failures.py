"""NCCL when something fails: calls that fail, fail later or never end, a deadline, a rank that leaves.

A rank that dies is in test_failures.py.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest

import bagua
from tests.cuda import failing_calls
from tests.cuda.device_arrays import Cuda
from tests.cuda.failing_calls import only, two_errors
from tests.cuda.ranks import Ranks, on_ranks
from tests.cuda.test_failures import ONES

#: ncclUnhandledCudaError, ncclSystemError, ncclInternalError, ncclRemoteError.
CUDA, SYSTEM, INTERNAL, REMOTE = 1, 2, 3, 6
NAMES = {CUDA: "ncclUnhandledCudaError", INTERNAL: "ncclInternalError", REMOTE: "ncclRemoteError"}


def fail(ranks: Ranks, function: Any, *arguments: Any, each: Any, **variables: object) -> list[Any]:
    """Two ranks that may fail but must end by themselves, with variables of each."""
    named = {"BAGUA_CUDA_COLLECTIVE": "nccl"} | variables
    return failing_calls.run(ranks, 2, function, *arguments, each=each, **named)


def fails(rank: int, timeout: float) -> list[dict[str, Any]]:
    """The errors of this rank, the first and the repeated one; the group is left in the end."""
    cuda, group = Cuda(), bagua.init()
    x, stream = cuda.array(ONES), cuda.stream()

    def step() -> None:
        handle = group.all_reduce(x, async_op=True, timeout=timeout, stream=stream)
        handle.synchronize(20.0)
        group.gather(x, 0, out=cuda.empty((2, 1000), np.float32) if rank == 0 else None, timeout=timeout)

    found = two_errors(step)
    bagua.shutdown()
    return found


@pytest.mark.parametrize(
    ("faults", "api", "code"),
    [
        ({"BAGUA_SIM_FAIL": "ncclAllReduce:2:3"}, "ncclAllReduce", INTERNAL),
        ({"BAGUA_SIM_FAIL": "ncclSend:1:1"}, "ncclSend", CUDA),
        ({"BAGUA_SIM_FAIL": "ncclGroupStart:1:3"}, "ncclGroupStart", INTERNAL),
        ({"BAGUA_SIM_FAIL": "ncclGroupEnd:1:3"}, "ncclGroupEnd", INTERNAL),
        ({"BAGUA_SIM_FAIL": "ncclCommInitRankConfig:1:3"}, "ncclCommInitRankConfig", INTERNAL),
        ({"BAGUA_SIM_FAIL": "ncclCommGetAsyncError:9:3"}, "ncclCommGetAsyncError", INTERNAL),
        ({"BAGUA_SIM_NCCL": "soon:ncclAllReduce:2:3"}, "ncclAllReduce", INTERNAL),
        ({"BAGUA_SIM_NCCL": "soon:ncclCommInitRankConfig:1:6"}, "ncclCommInitRankConfig", REMOTE),
        ({"BAGUA_SIM_NCCL": "later:ncclAllReduce:2:3"}, "ncclCommGetAsyncError", INTERNAL),
        # The next operation or the thread that watches gets it first.
        ({"BAGUA_SIM_NCCL": "later:ncclGroupEnd:1:6"}, "ncclCommGetAsyncError or ncclAllReduce", REMOTE),
    ],
    ids=str,
)
def test_a_failing_call_is_a_device_error_here_and_an_exception_of_this_rank_there(
    ranks: Ranks, faults: dict[str, str], api: str, code: int
) -> None:
    there, here = fail(ranks, fails, 20.0, each=only(1, **faults))
    assert len(there) == len(here) == 2
    for error in here:
        assert (error["class"], error["code"], error["device"]) == ("DeviceError", code, 1)
        assert error["api"] in api.split(" or ")
        assert error["name"] == NAMES[code]
        assert f"{error['api']} failed on device 1: {NAMES[code]} ({code})" in error["text"]
        # NCCL's own words.
        assert next(iter(faults)) in error["text"]
    for error in there:
        assert (error["class"], error["rank"], error["kind"]) == ("PeerRaisedError", 1, "DeviceError")
        assert here[0]["api"] in error["text"]


def test_a_unique_id_that_cannot_be_made_is_raised_on_all_ranks(ranks: Ranks) -> None:
    here, there = fail(ranks, fails, 20.0, each=only(0, BAGUA_SIM_FAIL="ncclGetUniqueId:1:2"))
    assert [error["api"] for error in here] == ["ncclGetUniqueId"] * 2
    assert [error["class"] for error in there] == ["PeerRaisedError"] * 2


@pytest.mark.parametrize(
    "fault",
    ["never:ncclAllReduce:2", "never:ncclCommInitRankConfig:1", "stuck:ncclAllReduce:1", "hang:ncclAllReduce:2"],
)
def test_a_call_or_work_that_never_ends_is_ended_by_the_deadline(ranks: Ranks, fault: str) -> None:
    start = time.monotonic()
    for errors in fail(ranks, fails, 1.5, each=only(1, BAGUA_SIM_NCCL=fault)):
        assert {error["class"] for error in errors} == {"BaguaTimeoutError"}
        assert len(errors) == 2
        assert "all_reduce" in errors[0]["text"]
    assert time.monotonic() - start < 30.0


@on_ranks(2, by=["nccl"])
def test_a_rank_that_left_is_named_by_who_needs_it(rank: int, cuda: Cuda, group: bagua.Group) -> None:
    x = cuda.array(ONES)
    group.all_reduce(x)
    group.barrier()
    if rank == 0:
        with pytest.raises(bagua.PeerLostError, match=r"lost rank 1.*it left the group"):
            group.all_reduce(x, async_op=True).synchronize(30.0)
