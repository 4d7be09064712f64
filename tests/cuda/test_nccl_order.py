"""CUDA arrays by NCCL in the order of streams: what holds for `staged`, on a device of each rank's own.

The strict libnccl puts work on a stream only when its call is polled to its end, and says so where an event is recorded
before.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import bagua
from tests.cuda import test_staged_order as staged
from tests.cuda.buckets import check_sums
from tests.cuda.device_arrays import Cuda
from tests.cuda.ranks import Ranks
from tests.cuda.test_codec_on_device import _kernels, compiler
from tests.cuda.test_nccl_values import run

__all__ = ["_kernels", "compiler"]

ONES = np.ones(1000, np.float32)


@pytest.mark.parametrize(
    "scenario",
    [
        staged.producers,
        staged.receivers,
        staged.handles,
        staged.lifetimes,
        staged.freed_at_once,
        staged.left_behind,
        staged.contexts,
        staged.captured,
    ],
    ids=lambda scenario: scenario.__name__,
)
def test_what_holds_for_staged_holds_for_nccl(ranks: Ranks, scenario: Any) -> None:
    run(ranks, 2, scenario)


def completion(rank: int) -> None:
    cuda, group = Cuda(), bagua.init()
    x = cuda.array(ONES)
    handle = group.all_reduce(x, async_op=True)
    handle.wait()
    # The question lets the device begin.
    while not handle.is_completed():
        pass
    late = cuda.array(ONES)
    if rank == 0:
        handle = group.all_reduce(late, async_op=True)
        # The host's part is over, although the other rank has not come.
        handle.wait(30.0)
        with pytest.raises(bagua.BaguaTimeoutError):
            handle.synchronize(0.05)
        assert not handle.is_completed()
        group.send(ONES, 1)
    else:
        group.recv(np.empty_like(ONES), 0)
        handle = group.all_reduce(late, async_op=True)
    handle.synchronize(30.0)
    assert handle.is_completed()
    assert late.read().tolist() == [2.0] * 1000
    bagua.shutdown()
    cuda.close()


def test_a_handle_is_completed_when_the_device_is_done(ranks: Ranks) -> None:
    run(ranks, 2, completion)


def by_turns(rank: int) -> dict[str, Any]:
    cuda, group = Cuda(), bagua.init()
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
    found: dict[str, Any] = bagua.stats()["groups"]["world"]["cuda"]
    bagua.shutdown()
    cuda.close()
    return found


def test_operations_of_one_group_keep_their_order_whatever_runs_them(ranks: Ranks, compiler: dict[str, str]) -> None:
    for stats in run(ranks, 2, by_turns, **compiler):
        assert stats["collective"] == "nccl"


def several_groups(rank: int, collective: str) -> None:
    cuda, group = Cuda(), bagua.init()
    parts = [group.new_group([0, 1, 2]), group.new_group([2, 0], ordered=True), group.new_group([1])]
    for _ in range(2):
        for each in (group, *parts):
            if each is not None:
                x = cuda.array(ONES)
                each.all_reduce(x)
                assert x.read().tolist() == [each.size] * 1000
                assert each.stats()["cuda"]["collective"] == collective
    for each in parts:
        if each is not None:
            each.leave()
    bagua.shutdown()
    cuda.close()


def test_groups_have_communicators_of_their_own(ranks: Ranks) -> None:
    run(ranks, 3, several_groups, "nccl")


def large(rank: int) -> None:
    cuda, group = Cuda(), bagua.init()
    x = cuda.array(np.full(5 << 20, rank + 1, np.float32))
    y = cuda.array(np.arange(2 * (1 << 20), dtype=np.float32) + rank)
    handle = group.all_reduce(x, async_op=True)
    group.all_to_all(y)
    handle.wait()
    assert (x.read() == 3.0).all()
    assert (y.read().reshape(2, -1)[1 - rank] == np.arange(1 << 20) + rank * (1 << 20) + (1 - rank)).all()
    stats = bagua.stats()["groups"]["world"]["cuda"]
    assert (stats["to_host_bytes"], stats["pinned_bytes"]) == (0, 0)
    bagua.shutdown()
    cuda.close()


def test_large_arrays_do_not_pass_through_host_memory(ranks: Ranks) -> None:
    run(ranks, 2, large)


def buckets(rank: int) -> Any:
    cuda = Cuda()
    group, stream = bagua.init(), cuda.stream()
    check_sums(cuda, rank, 2, stream)
    found = bagua.stats()["groups"][group.name]["cuda"]
    bagua.shutdown()
    cuda.close()
    return found["to_host_bytes"]


def test_buckets_whose_tensors_lie_apart_are_gathered_before_and_scattered_after(ranks: Ranks) -> None:
    assert run(ranks, 2, buckets) == [0, 0]
