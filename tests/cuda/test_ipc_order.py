"""CUDA arrays by `ipc` in the order of streams: what holds for `staged`, where ranks read each other's memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import bagua
from tests.cuda import test_nccl_order as nccl
from tests.cuda import test_staged_order as staged
from tests.cuda.device_arrays import Cuda
from tests.cuda.ranks import Ranks
from tests.cuda.test_ipc_values import run
from tests.cuda.test_nccl_order import several_groups

ONES = np.ones(1000, np.float32)


@pytest.mark.parametrize(
    "scenario",
    [
        staged.producers,
        staged.receivers,
        staged.handles,
        staged.completion,
        staged.lifetimes,
        staged.freed_at_once,
        staged.left_behind,
        staged.contexts,
        staged.captured,
        nccl.by_turns,
    ],
    ids=lambda scenario: scenario.__name__,
)
def test_what_holds_for_staged_holds_for_ipc(ranks: Ranks, scenario: Any) -> None:
    for stats in run(ranks, 2, scenario):
        assert scenario is not nccl.by_turns or stats["collective"] == "ipc"


def windows_in_turn(rank: int) -> None:
    cuda, group = Cuda(), bagua.init()
    size, first = group.size, np.arange(3000, dtype=np.int64)
    arrays, handles, expected = [], [], []
    # A window has what another rank may not have read yet when the next operation but one comes, and so has that
    # rank's own: no rank waits for the device between them.
    for at in range(12):
        x = first * (rank + 1) + at
        arrays.append(cuda.array(x))
        verb = at % 4
        if verb == 0:
            handles.append(group.all_reduce(arrays[-1], async_op=True))
            expected.append(first * (size * (size + 1) // 2) + size * at)
        elif verb == 1:
            handles.append(group.broadcast(arrays[-1], at % size, async_op=True))
            expected.append(first * (at % size + 1) + at)
        elif verb == 2:
            handles.append(group.all_to_all(arrays[-1], async_op=True))
            part = len(first) // size
            expected.append(
                np.concatenate([first[rank * part : (rank + 1) * part] * (peer + 1) + at for peer in range(size)])
            )
        else:
            handles.append(group.reduce(arrays[-1], at % size, "max", async_op=True))
            expected.append(first * size + at if rank == at % size else x)
    for handle in handles:
        handle.wait()
    # The last ones are asked for first.
    for x, values in reversed(list(zip(arrays, expected, strict=True))):
        assert x.read().tolist() == values.tolist()
    bagua.shutdown()
    cuda.close()


@pytest.mark.parametrize("own", [False, True], ids=["one-device", "device-each"])
def test_a_window_is_filled_again_when_all_ranks_have_read_it(ranks: Ranks, own: bool) -> None:
    run(ranks, 3, windows_in_turn, own=own)


def test_groups_have_windows_of_their_own(ranks: Ranks) -> None:
    run(ranks, 3, several_groups, "ipc")


def other_device(rank: int) -> None:
    cuda, group = Cuda(), bagua.init()
    x = cuda.array(ONES)
    group.all_reduce(x)
    other = Cuda(device=2 + rank)
    y = other.array(ONES)
    with pytest.raises(TypeError, match=f"the array is on cuda:{2 + rank}, and the group's windows .* on cuda:{rank}"):
        group.all_reduce(y)
    other.close()
    cuda.driver.start(rank)
    bagua.shutdown()
    cuda.close()


def test_a_group_stays_on_the_device_of_its_windows(ranks: Ranks) -> None:
    run(ranks, 2, other_device, own=True, BAGUA_SIM_DEVICES=4)


def over_hosts(rank: int) -> None:
    cuda, group = Cuda(), bagua.init()
    stream, arrays = cuda.stream(), []
    for at in range(6):
        x = cuda.array(ONES * (rank + at), stream=stream)
        x.stream = None  # type: ignore[assignment]
        group.all_reduce(x, async_op=True, stream=stream)
        arrays.append(x)
    group.broadcast(arrays[0], 2, async_op=True)
    # Orders the stream after all of them.
    handle = group.all_reduce(arrays[0], async_op=True)
    handle.wait(30.0, stream=stream)
    assert arrays[0].read(stream).tolist() == [24.0] * 1000
    for at, x in enumerate(arrays[1:], start=1):
        assert x.read(stream).tolist() == [6.0 + 4 * at] * 1000
    bagua.shutdown()
    cuda.close()


def test_operations_over_several_hosts_keep_the_order_of_streams(ranks: Ranks) -> None:
    run(ranks, 4, over_hosts, hosts=[[0, 1], [2, 3]])
