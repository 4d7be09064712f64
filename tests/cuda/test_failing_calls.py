"""Each call of the driver and of NCCL that fails, at its first place, in the middle and at its last one."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

import bagua
from bagua import extension
from tests.cuda.buckets import Queue, Tensors
from tests.cuda.device_arrays import Cuda
from tests.cuda.failing_calls import UNKNOWN, Calls, check_each, count_calls
from tests.cuda.ranks import Ranks
from tests.cuda.test_compressed_on_device import bucket, peers, ring

#: ncclInternalError of nccl.h.
INTERNAL = 3

ONES = np.ones(1000, np.float32)

#: What a rank does in its group until a call fails.
Act = Callable[[bagua.Group], None]

# --- scenarios: what comes before the first call that may fail, and what calls ----------------------------------------


def verbs(cuda: Cuda) -> Act:
    """Blocking verbs and handles, by host memory."""
    x, y, out = (cuda.array(ONES) for _ in range(3))
    exported = cuda.array(ONES, dlpack=True)

    def act(group: bagua.Group) -> None:
        group.all_reduce(x)
        handle = group.all_reduce(y, async_op=True)
        group.broadcast(x, 1, out=out)
        handle.wait(20.0)
        handle.synchronize(20.0)
        handle.is_completed()
        group.all_reduce(exported)
        group.barrier()

    return act


def verbs_of_nccl(cuda: Cuda) -> Act:
    """Every kind of call of NCCL."""
    x, y, rows = cuda.array(ONES), cuda.array(ONES), cuda.array(np.ones((2, 8), np.float32))
    single = cuda.empty(8, np.float32)
    whole, part = cuda.empty((2, 1000), np.float32), cuda.empty((1, 8), np.float32)

    def act(group: bagua.Group) -> None:
        group.all_reduce(x)
        group.reduce(y, 0)
        group.broadcast(x, 1)
        group.all_gather(x, out=whole)
        group.reduce_scatter(rows, out=part)
        group.scatter(rows if group.rank == 0 else None, 0, out=single)
        handle = group.all_to_all(rows, async_op=True)
        handle.wait(20.0)
        handle.synchronize(20.0)
        group.barrier()

    return act


@contextmanager
def queue_of(*buckets: Tensors) -> Iterator[Queue]:
    queue = Queue("engine", *buckets)
    try:
        yield queue
    finally:
        queue.raw.shutdown()


def buckets(cuda: Cuda) -> Act:
    """Buckets, and the verbs of an engine."""
    stream = cuda.stream()

    def act(group: bagua.Group) -> None:
        flat, apart = (Tensors(cuda, name, flat=name == "flat", stream=stream) for name in ("flat", "apart"))
        flat.raw.append_compressed(extension.Codec("minmax_u8", {}), True, False, False)
        flat.raw.append_decentralized("all", False)
        flat.attach("peer_weight")
        for each in (flat, apart):
            each.raw.append_centralized(True, False, True)
        with queue_of(flat, apart) as queue:
            for _ in range(2):
                queue.step(stream)
                flat.raw.copy_from_extra("peer_weight", stream=stream)

    return act


def compressed(cuda: Cuda) -> Act:
    """Two communications of tensors that lie apart: compressed, a ring, a mean of peers."""

    def act(group: bagua.Group) -> None:
        made = [bucket(cuda, (1000, 2), padding=3, flat=False)]
        for operation in (ring, peers):
            made.append(Tensors(cuda, operation.__name__, sizes=(100, 7), flat=False))
            operation(made[-1])
        with queue_of(*made) as queue:
            for _ in range(2):
                queue.step()

    return act


def timed(cuda: Cuda) -> Act:
    """The communications in which an automatic operation is timed."""

    def act(group: bagua.Group) -> None:
        tensors = Tensors(cuda, "auto", sizes=(1000, 1), flat=False)
        tensors.raw.append_automatic(extension.Codec("minmax_u8", {}), True, False)
        with queue_of(tensors) as queue:
            for _ in range(11):
                queue.step()

    return act


# --- what each calls --------------------------------------------------------------------------------------------------

#: By the symbols' names without their versions.
OF_VERBS = {
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
}
MESSAGES = {"ncclGroupStart", "ncclSend", "ncclRecv", "ncclGroupEnd", "ncclCommGetAsyncError"}
OF_NCCL = MESSAGES | {
    "ncclGetUniqueId",
    "ncclCommInitRankConfig",
    "ncclCommFinalize",
    "ncclCommDestroy",
    "ncclAllReduce",
    "ncclReduce",
    "ncclBroadcast",
    "ncclAllGather",
    "ncclReduceScatter",
    "cuMemAllocAsync",
    "cuMemFreeAsync",
    "cuMemcpyDtoDAsync",
    "cuEventRecord",
    "cuEventQuery",
    "cuStreamWaitEvent",
    "cuStreamCreateWithPriority",
}
#: Not called for buckets, or once for each process.
OF_BUCKETS = OF_VERBS - {"cuPointerGetAttributes", "cuCtxGetCurrent"} | {"cuMemAllocAsync", "cuMemFreeAsync"}
#: By each collective.
OF_KERNELS = {
    "cuCtxPushCurrent",
    "cuDeviceGetAttribute",
    "cuEventCreate",
    "cuEventQuery",
    "cuEventRecord",
    "cuLaunchKernel",
    "cuMemAllocAsync",
    "cuMemFreeAsync",
    "cuMemHostAlloc",
    "cuMemcpyDtoDAsync",
    "cuMemsetD8Async",
    "cuModuleGetFunction",
    "cuModuleLoadData",
    "cuStreamWaitEvent",
}
#: Their failure has no caller to raise it in, and comes after the operation.
NOT_RAISED = {"cuCtxPopCurrent", "cuStreamDestroy", "cuEventDestroy", "cuMemFreeHost"}


class Row(NamedTuple):
    """A scenario by a collective."""

    begin: Callable[[Cuda], Act]
    collective: str
    called: set[str]
    #: Of these the rank on which the first call fails must raise it.
    raised_for: set[str]
    #: Whether the last call fails, too.
    last: bool = False


ROWS = {
    "verbs by staged": Row(verbs, "staged", OF_VERBS, OF_VERBS - NOT_RAISED, last=True),
    # The query of an event asks whether something can be released.
    "verbs by nccl": Row(
        verbs_of_nccl, "nccl", OF_NCCL, OF_NCCL - {"ncclCommFinalize", "ncclCommDestroy", "cuEventQuery"}, last=True
    ),
    "buckets by staged": Row(buckets, "staged", OF_BUCKETS, OF_BUCKETS - NOT_RAISED - {"cuMemFreeAsync"}),
    **{
        f"compressed by {collective}": Row(
            compressed,
            collective,
            OF_KERNELS | more,
            {"cuLaunchKernel", "cuMemsetD8Async", "cuModuleLoadData"} | MESSAGES,
        )
        for collective, more in (("staged", {"cuMemcpyDtoHAsync", "cuMemcpyHtoDAsync"}), ("nccl", MESSAGES))
    },
    "timed by staged": Row(timed, "staged", {"cuEventElapsedTime"}, {"cuEventElapsedTime"}),
}


def play(rank: int, name: str, whole: bool) -> str:
    """How a rank ended; without `whole` it stops before the first call that may fail. It ends by itself."""
    act = ROWS[name].begin(Cuda())
    if not whole:
        return ""
    group, found = bagua.init(), "done"
    try:
        act(group)
    except bagua.BaguaError as error:
        found = type(error).__name__
    except AssertionError as error:
        # A call of the test's own.
        found = f"test: {error}"
    bagua.shutdown()
    return found


@pytest.fixture(scope="module")
def calls(_driver_of_ranks: Path) -> Callable[[str], Calls]:
    """How often each function is called where nothing fails, by row."""

    @functools.cache
    def of(name: str) -> Calls:
        return count_calls(Ranks(_driver_of_ranks), play, name, BAGUA_CUDA_COLLECTIVE=ROWS[name].collective)

    return of


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "function"), [(name, function) for name, row in ROWS.items() for function in sorted(row.called)]
)
def test_a_call_that_fails_at_any_place_ends_in_an_error_and_never_in_a_hang_or_an_abort(
    ranks: Ranks, calls: Callable[[str], Calls], name: str, function: str
) -> None:
    row = ROWS[name]
    check_each(
        ranks,
        play,
        name,
        calls=calls(name),
        function=function,
        raised_for=row.raised_for,
        rank=0 if function == "ncclGetUniqueId" else 1,
        code=INTERNAL if function.startswith("nccl") else UNKNOWN,
        last=row.last,
        BAGUA_CUDA_COLLECTIVE=row.collective,
    )


def test_the_functions_that_may_fail_are_those_that_the_product_names() -> None:
    source = Path(__file__).resolve().parents[2] / "rust/bagua-cuda/src/driver_functions.rs"
    (table,) = re.findall(r"^functions! \{(.*?)\}", source.read_text(), re.MULTILINE | re.DOTALL)
    failing = {function for row in ROWS.values() for function in row.called if function.startswith("cu")}
    assert sorted(name.removesuffix("_v2") for name in table.split()) == sorted(failing)
