"""NCCL inside hosts and host memory between: NCCL has another version on each host, so no communicator holds all ranks.

On the strict libnccl of tests/cuda/nccl over the simulated driver, at 4 ranks on two pretended hosts. As many cases as
can share a world do.
"""

from __future__ import annotations

import hashlib
import os
from typing import Any

import numpy as np
import pytest

import bagua
from tests.cuda.buckets import check_sums
from tests.cuda.device_arrays import Cuda
from tests.cuda.ranks import Ranks
from tests.cuda.verb_contract import DTYPES, bits, both, moves, near, reductions, values

HOSTS = [[0, 1], [2, 3]]
VERSIONS = {"pretended-host-0": "22703", "pretended-host-1": "23007"}
WHY = "auto: NCCL is 2.27.3 on rank 0 of the group and 2.30.7 on rank {other}; nccl inside the 2 hosts, staged between"
ONES = np.ones(1000, np.float32)


def run(ranks: Ranks, function: Any, *arguments: Any, **options: Any) -> list[Any]:
    """Ranks with a device each."""
    named: dict[str, Any] = {"hosts": HOSTS, "BAGUA_CUDA_COLLECTIVE": "auto", "OWN_DEVICE": 1}
    named |= {"BAGUA_SIM_DEVICES": 4} | options
    return ranks(sum(len(host) for host in named["hosts"]), function, *arguments, **named)


def begin() -> tuple[Cuda, bagua.Group]:
    """A rank whose host has an NCCL of its own version."""
    os.environ["BAGUA_SIM_NCCL_VERSION"] = VERSIONS[os.environ["BAGUA_HOST_ID"]]
    return Cuda(), bagua.init()


def end(cuda: Cuda) -> Any:
    """What the group's statistics are; the rank leaves."""
    found = bagua.stats()["groups"]["world"]["cuda"]
    bagua.shutdown()
    cuda.close()
    return found


# --- values -----------------------------------------------------------------------------------------------------------


def every_value(rank: int) -> Any:
    cuda, group = begin()
    same = hashlib.sha256()
    for dtype in DTYPES if group.size == 4 else ("float16", "int32", "bool"):
        same.update(reductions(cuda, group, dtype, exact=False))
    # Whole numbers, which bfloat16 has exactly.
    whole = (np.arange(16, dtype=np.float32) + rank).view(np.uint32) >> 16
    halves = cuda.array(whole.astype(np.uint16), dlpack=True, bfloat16=True)
    group.all_reduce(halves)
    total = sum(np.arange(16, dtype=np.float32) + each for each in range(group.size)).view(np.uint32) >> 16
    assert halves.read().tolist() == total.tolist()
    # The other verbs have the host's bits.
    moves(cuda, group, "float32", True, (5,))
    moves(cuda, group, "float32", True, (0, 3))
    x = values(rank, (group.size * 3,), "float32")
    both(cuda, True, lambda x, out: group.reduce(x, group.size - 1), x, None)
    both(cuda, True, lambda x, out: group.reduce_scatter(x, out=out), x, np.zeros_like(x[:3]))
    empty = cuda.array(np.zeros(0, np.float32), dlpack=True)
    group.all_reduce(empty)
    # Two pieces of 4 MiB, and one that is not aligned.
    x = values(rank, ((2 << 20) + 4321,), "float32", finite=True)
    expected, y = x.copy(), cuda.array(x)
    group.all_reduce(expected, "avg")
    before, counted = bagua.stats()["groups"]["world"]["cuda"], group.stats()["ops"]["all_reduce"]["hierarchical"]
    group.all_reduce(y, "avg")
    near(y.read(), expected, exact=False)
    same.update(bits(y.read()))
    assert group.stats()["ops"]["all_reduce"]["hierarchical"] == counted + 1
    after = end(cuda)
    copied = [after[name] - before[name] for name in ("to_host_bytes", "to_device_bytes")]
    return after, copied, x.nbytes, same.hexdigest()


@pytest.mark.slow
@pytest.mark.parametrize("hosts", [HOSTS, [[0, 2], [1]]], ids=["two-and-two", "two-and-one"])
def test_every_type_and_operation_is_near_the_hosts_and_equal_on_all_ranks(
    ranks: Ranks, hosts: list[list[int]]
) -> None:
    found = run(ranks, every_value, hosts=hosts)
    for rank, (stats, copied, whole, _) in enumerate(found):
        assert (stats["collective"], stats["device"]) == ("hier", rank)
        assert stats["why"] == WHY.format(other=hosts[1][0])
        assert 0 < stats["pinned_bytes"] <= 16 << 20
        assert (stats["launches"], stats["device_bytes"]) == (0, 0)
        # Only the first rank of a host brings sums to host memory.
        assert copied == ([whole, whole] if any(rank == host[0] for host in hosts) else [0, 0])
    assert len({same for *_, same in found}) == 1


# --- order ------------------------------------------------------------------------------------------------------------


def in_order(rank: int) -> Any:
    cuda, group = begin()
    first, second, third = cuda.stream(), cuda.stream(), cuda.stream()
    total = sum(range(4))
    # Late producers, and streams that only the call and its handle have ordered.
    x, out = cuda.array(ONES * rank, stream=first), cuda.array(7 * ONES, stream=second)
    group.all_reduce(x, out=out, stream=third)
    assert out.read(third).tolist() == [float(total)] * 1000
    x.stream = out.stream = None  # type: ignore[assignment]
    handles, arrays = [], []
    for at in range(6):
        # The second and the fourth one are staged, and two are cut into pieces.
        count = (1 << 20) + 5 if at in (2, 3) else 1000
        arrays.append(cuda.array(np.full(count, rank + at, np.int64), stream=first))
        arrays[-1].stream = None  # type: ignore[assignment]
        op = "bor" if at in (1, 3) else "max"
        handles.append(group.all_reduce(arrays[-1], op, async_op=True, stream=first))
    handles[5].synchronize(30.0)
    assert handles[5].is_completed()
    group.broadcast(arrays[0], 3, async_op=True, stream=first)
    last = group.all_reduce(arrays[0], async_op=True, stream=first)
    # Orders the stream after all of them.
    assert last.wait(30.0, stream=second) is arrays[0]
    expected = [4 * 3, 1 | 2 | 3 | 4, 5, 3 | 4 | 5 | 6, 7, 8]
    for x, value in reversed(list(zip(arrays, expected, strict=True))):
        assert (x.read(second) == value).all()
    # Freed when the verb has returned.
    x = cuda.array(ONES)
    group.all_reduce(x)
    x.free()
    check_sums(cuda, rank, 4, first)
    # The group stays on the device of its first array, and goes on there.
    other = Cuda(device=rank + 4)
    y = other.array(ONES)
    with pytest.raises(TypeError, match=f"the array is on cuda:{rank + 4}, but the group.* on cuda:{rank}"):
        group.all_reduce(y)
    other.close()
    cuda.driver.start(rank)
    left = [cuda.array(ONES) for _ in range(3)]
    for x in left:
        group.all_reduce(x, async_op=True)
    part = group.new_group([1, 2, 3])
    if part is not None:
        y = cuda.array(ONES)
        part.all_reduce(y)
        assert y.read().tolist() == [3.0] * 1000
        assert part.stats()["cuda"]["collective"] == "hier"
        part.leave()
    # Also a rank that is not of the part has come to its own operations.
    group.barrier()
    bagua.shutdown()
    assert all(x.read().tolist() == [4.0] * 1000 for x in left)
    cuda.close()


def test_operations_and_buckets_keep_the_order_of_streams(ranks: Ranks) -> None:
    run(ranks, in_order, BAGUA_SIM_DEVICES=8)


# --- failures ---------------------------------------------------------------------------------------------------------
