"""Ranks that read each other's device memory when something fails: a driver call, a rank that dies, a deadline."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import bagua
from tests.cuda import test_staged_failures as staged
from tests.cuda.device_arrays import Cuda
from tests.cuda.driver import until
from tests.cuda.failing_calls import UNKNOWN, only, run
from tests.cuda.ranks import Ranks
from tests.cuda.test_staged_failures import CALLED_BY_IPC

ONES = np.ones(1000, np.float32)
IPC = {"BAGUA_CUDA_COLLECTIVE": "ipc"}
HOSTS = [[0, 1], [2, 3]]


@pytest.mark.parametrize("api", ["cuMemcpyDtoDAsync", "cuLaunchKernel", "cuStreamWaitEvent", "cuEventRecord"])
def test_a_failing_call_is_a_device_error_here_and_an_exception_of_this_rank_there(ranks: Ranks, api: str) -> None:
    # The first record and waits are those of the call's start, which poison nothing.
    nth = 5 if api in ("cuStreamWaitEvent", "cuEventRecord") else 1
    fail = only(1, BAGUA_SIM_FAIL=f"{api}:{nth}:{UNKNOWN}")
    there, here = run(ranks, 2, staged.fails_on_rank_1, each=fail, **IPC)
    for error in here:
        assert (error["class"], error["api"], error["code"], error["device"]) == ("DeviceError", api, UNKNOWN, 0)
    for error in there:
        assert (error["class"], error["rank"], error["kind"]) == ("PeerRaisedError", 1, "DeviceError")


def grows(rank: int, failing: str) -> str:
    """Small arrays, then a larger one, for which the ranks make larger windows. What the rank was told."""
    if rank == 1:
        os.environ["BAGUA_SIM_FAIL"] = failing
    cuda = Cuda()
    x, large = cuda.array(ONES), cuda.array(np.ones(1 << 19, np.float32))
    group, told = bagua.init(), "done"
    try:
        group.all_reduce(x)
        group.all_reduce(large)
        group.barrier()
        assert large.read()[-1] == 2.0
    except bagua.BaguaError as error:
        told = type(error).__name__
    bagua.shutdown()
    cuda.close()
    return told


#: The first of each, and the second of those that come again with larger windows.
PLACES = [(name, 1) for name in CALLED_BY_IPC if name not in ("cuDeviceCanAccessPeer", "cuMemAlloc")]
PLACES += [("cuIpcGetMemHandle", 2), ("cuIpcOpenMemHandle", 2)]


@pytest.mark.parametrize(("name", "nth"), [*PLACES, ("cuMemAlloc", 3), ("cuMemAlloc", 4)])
def test_a_call_that_fails_at_any_place_ends_in_an_error_or_in_smaller_windows(
    ranks: Ranks, name: str, nth: int
) -> None:
    # Each rank has six events; a rank that cannot make the first windows refuses the wish.
    first = nth == (3 if name == "cuMemAlloc" else 1) or "Event" in name
    nobody_hears = name in ("cuMemFree", "cuIpcCloseMemHandle")
    failing = f"{name}:{nth}:{UNKNOWN}"
    told = ranks(2, grows, failing, clean=not nobody_hears, BAGUA_TIMEOUT=10, **IPC)
    assert told == ["BaguaError" if first and not nobody_hears else "done"] * 2


def dies(rank: int, folder: str) -> Any:
    """The last rank dies while all work at operations; what the others are told, and after how many seconds."""
    cuda, group = Cuda(), bagua.init()
    x = cuda.array(np.ones(1 << 20, np.float32))
    group.all_reduce(x)
    group.barrier()
    if rank == group.size - 1:
        group.all_reduce(x, async_op=True).wait(30.0)
        Path(folder, "dying").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    pending, lost = [], None
    while lost is None:
        try:
            pending.append(group.all_reduce(x, async_op=True))
            pending[-1].wait(30.0)
        except bagua.PeerLostError as error:
            lost = error
    after = time.time() - Path(folder, "dying").stat().st_mtime
    # The device of this rank may wait for work that the other one did not do.
    for handle in pending:
        try:
            handle.synchronize(30.0)
        except bagua.PeerLostError:
            until(handle.is_completed)
    bagua.shutdown()
    cuda.close()
    return lost.rank, after


@pytest.mark.parametrize(("size", "hosts"), [(2, None), (4, HOSTS)], ids=["ipc", "hier"])
def test_a_rank_that_is_killed_in_the_middle_is_lost_within_a_second(
    ranks: Ranks, tmp_path: Path, size: int, hosts: Any
) -> None:
    with ranks.world(size, hosts=hosts, **IPC) as world:
        world._expect_exit = {size - 1: -signal.SIGKILL}
        *found, _ = world.run(dies, str(tmp_path))
    assert all((lost, after < 1.0) == (size - 1, True) for lost, after in found), found
    ranks.check()


def test_a_deadline_names_the_rank_that_did_not_come(ranks: Ranks) -> None:
    missing, _ = ranks(2, staged.waits_for_the_other, **IPC)
    assert missing == (1,)


def leaves_early(rank: int) -> None:
    cuda, group = Cuda(), bagua.init()
    x = cuda.array(ONES)
    group.all_reduce(x, async_op=True)
    group.barrier()
    if rank == 1:
        # The other rank frees its windows only when this one has read and closed them.
        time.sleep(0.5)
    bagua.shutdown()
    assert x.read().tolist() == [2.0] * 1000
    cuda.close()


def test_a_rank_that_leaves_first_keeps_its_memory_until_the_others_have_closed_it(ranks: Ranks) -> None:
    ranks(2, leaves_early, **IPC)
