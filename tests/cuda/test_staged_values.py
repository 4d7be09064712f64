"""Every verb, element type and reduce operation on CUDA arrays: the values are the host's, bit for bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import bagua
from tests.cuda.device_arrays import Cuda
from tests.cuda.ranks import Ranks

DTYPES = ("float16", "float32", "float64", "uint8", "int8", "int32", "int64", "bool", "complex64", "complex128")
OPS = ("sum", "avg", "min", "max", "product", "band", "bor", "bxor")


def values(rank: int, shape: Any, dtype: str) -> np.ndarray[Any, Any]:
    """Random values of a rank, some of them not finite where the type has such."""
    random = np.random.default_rng([rank, 7])
    kind = np.dtype(dtype)
    if kind.kind == "b":
        return random.integers(0, 2, shape).astype(bool)
    if kind.kind in "iu":
        return random.integers(0, 100, shape).astype(kind)
    made = random.standard_normal(shape)
    if kind.kind == "c":
        return (made + 1j * random.standard_normal(shape)).astype(kind)
    flat = made.reshape(-1)
    # Not an infinity times a zero and a NaN: of two NaNs either may stay.
    flat[rank % 2 :: 1 + flat.size // 3] = [np.inf, -0.0, np.nan, 1e-40][rank % 4]
    return made.astype(kind)


def bits(array: np.ndarray[Any, Any]) -> bytes:
    return np.ascontiguousarray(array).tobytes()


def both(cuda: Cuda, dlpack: bool, verb: Any, x: np.ndarray[Any, Any], out: np.ndarray[Any, Any] | None) -> None:
    """Runs a verb on host arrays and on copies of them on the device: what they hold afterwards is equal."""
    on_device = cuda.array(x, dlpack=dlpack)
    target = None if out is None else cuda.array(out, dlpack=dlpack)
    x = x.copy()
    verb(x, out)
    verb(on_device, target)
    assert bits(on_device.read()) == bits(x)
    if target is not None and out is not None:
        assert bits(target.read()) == bits(out)


def reductions(cuda: Cuda, group: bagua.Group, dtype: str) -> int:
    """Every reduction of a type; how many operations are defined for it."""
    rank, size, ran = group.rank, group.size, 0
    dlpack = dtype != "bool"
    for op in OPS:
        x = values(rank, (size * 3, 5), dtype)
        try:
            group.all_reduce(x.copy(), op)
        except (TypeError, ValueError):
            with pytest.raises((TypeError, ValueError)):
                group.all_reduce(cuda.array(x), op)
            continue
        same, part = np.zeros_like(x), np.zeros_like(x[:3])
        both(cuda, dlpack, lambda x, out, op=op: group.all_reduce(x, op), x, None)
        both(cuda, dlpack, lambda x, out, op=op: group.all_reduce(x, op, out=out), x, same)
        both(cuda, dlpack, lambda x, out, op=op: group.reduce(x, size - 1, op), x, None)
        both(cuda, dlpack, lambda x, out, op=op: group.reduce(x, 0, op, out=out if rank == 0 else None), x, same)
        both(cuda, dlpack, lambda x, out, op=op: group.reduce_scatter(x, op, out=out), x, part)
        ran += 1
    return ran


def reduce_everything(rank: int, size: int, dtype: str) -> int:
    cuda, group = Cuda(), bagua.init()
    ran = reductions(cuda, group, dtype)
    bagua.shutdown()
    cuda.close()
    return ran


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_reduction_of_a_type_has_the_bits_of_the_host(ranks: Ranks, size: int, dtype: str) -> None:
    ran = ranks(size, reduce_everything, size, dtype)
    assert min(ran) >= 3


def moves(cuda: Cuda, group: bagua.Group, dtype: str, dlpack: bool, shape: tuple[int, ...]) -> None:
    """Every verb that moves."""
    rank, size = group.rank, group.size
    x = values(rank, shape, dtype)
    whole = np.zeros((size, *shape), dtype)
    rows = values(rank + size, (size, *shape), dtype)
    for root in range(size):
        both(cuda, dlpack, lambda x, out, root=root: group.broadcast(x, root), x, None)
        both(cuda, dlpack, lambda x, out, root=root: group.broadcast(x, root, out=out), x, np.zeros_like(x))
        both(cuda, dlpack, lambda x, out, root=root: group.gather(x, root, out=out if rank == root else None), x, whole)
        both(
            cuda,
            dlpack,
            lambda x, out, root=root: group.scatter(x if rank == root else None, root, out=out),
            rows,
            np.zeros_like(x),
        )
    both(cuda, dlpack, lambda x, out: group.all_gather(x, out=out), x, np.zeros_like(whole))
    both(cuda, dlpack, lambda x, out: group.all_to_all(x), rows, None)
    both(cuda, dlpack, lambda x, out: group.all_to_all(x, out=out), rows, np.zeros_like(rows))
    counts = [1 + (rank + peer) % 3 for peer in range(size)]
    given = values(rank, sum(counts), dtype)
    both(cuda, dlpack, lambda x, out: group.all_to_all_v(x, counts, counts, out=out), given, np.zeros_like(given))
    group.barrier()


def move_everything(rank: int, size: int, dtype: str, dlpack: bool, shape: tuple[int, ...]) -> None:
    cuda, group = Cuda(), bagua.init()
    moves(cuda, group, dtype, dlpack, shape)
    bagua.shutdown()
    cuda.close()


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("dlpack", [False, True], ids=["interface", "dlpack"])
def test_every_verb_that_moves_has_the_bits_of_the_host(ranks: Ranks, size: int, dlpack: bool) -> None:
    ranks(size, move_everything, size, "float32", dlpack, (3, 2))


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_type_can_be_moved(ranks: Ranks, dtype: str) -> None:
    ranks(2, move_everything, 2, dtype, True, (7,))


def test_empty_arrays_pass_through_every_verb(ranks: Ranks) -> None:
    ranks(2, move_everything, 2, "float32", True, (0, 3))


def long_arrays(rank: int, size: int) -> dict[str, Any]:
    cuda, group = Cuda(), bagua.init()
    # Several pieces of 4 MiB, the last of them shorter and not aligned.
    count = size * (3 * (1 << 20) + 1234567 // size)
    x = values(rank, (count,), "float32")
    both(cuda, True, lambda x, out: group.all_reduce(x, "avg"), x, None)
    both(cuda, True, lambda x, out: group.reduce_scatter(x, out=out), x, np.zeros(count // size, "float32"))
    both(cuda, True, lambda x, out: group.all_to_all(x, out=out), x, np.zeros_like(x))
    both(cuda, True, lambda x, out: group.broadcast(x, size - 1), x, None)
    part = x[: count // size].copy()
    both(cuda, True, lambda x, out: group.all_gather(x, out=out), part, np.zeros((size, len(part)), "float32"))
    found: dict[str, Any] = bagua.stats()["groups"]["world"]["cuda"]
    bagua.shutdown()
    cuda.close()
    return found


@pytest.mark.parametrize("size", [2, 3])
def test_arrays_of_many_pieces_have_the_bits_of_the_host_within_32_mib_of_pinned_memory(
    ranks: Ranks, size: int
) -> None:
    for cuda in ranks(size, long_arrays, size, timeout=120):
        assert cuda["collective"] == "staged"
        assert 0 < cuda["pinned_bytes"] <= 32 << 20


@pytest.mark.parametrize("variables", [{"BAGUA_TRANSPORT": "tcp"}, {}], ids=["tcp", "shm"])
def test_the_transport_makes_no_difference(ranks: Ranks, variables: dict[str, str]) -> None:
    ranks(2, move_everything, 2, "float32", True, (5,), **variables)
    ranks(2, reduce_everything, 2, "float16", **variables)


def test_ranks_of_two_hosts_combine_as_the_host_does(ranks: Ranks) -> None:
    ranks(4, reduce_everything, 4, "float32", hosts=[[0, 1], [2, 3]])
    ranks(4, move_everything, 4, "float32", True, (5,), hosts=[[0, 1], [2, 3]])


def bfloat16(rank: int) -> None:
    cuda, group = Cuda(), bagua.init()
    numbers = np.arange(16, dtype=np.float32) + rank
    halves = (numbers.view(np.uint32) >> 16).astype(np.uint16)
    x = cuda.array(halves, dlpack=True, bfloat16=True)
    group.all_reduce(x)
    expected = ((2 * np.arange(16, dtype=np.float32) + 1).view(np.uint32) >> 16).astype(np.uint16)
    assert bits(x.read()) == bits(expected)
    bagua.shutdown()
    cuda.close()


def test_bfloat16_is_reduced_by_dlpack(ranks: Ranks) -> None:
    ranks(2, bfloat16)


def one_group_serves_both(rank: int) -> None:
    cuda, group = Cuda(device=rank), bagua.init()
    assert bagua.stats()["groups"]["world"]["cuda"] is None
    # Two lanes beside the group's own, in which the ranks' devices differ, too.
    parts = [group.new_group([0, 1]), group.new_group([1, 0], ordered=True)]
    for each in (group, *parts):
        assert each is not None
        on_host, on_device = np.ones(3, np.float32), cuda.array(np.ones(3, np.float32))
        each.all_reduce(on_host)
        each.all_reduce(on_device)
        each.all_reduce(on_host)
        assert on_host.tolist() == [4.0] * 3
        assert on_device.read().tolist() == [2.0] * 3
        assert each.stats()["cuda"]["device"] == rank
    for each in parts:
        assert each is not None
        each.leave()
    bagua.shutdown()
    cuda.close()


def test_one_group_serves_host_and_device_on_several_lanes(ranks: Ranks) -> None:
    ranks(2, one_group_serves_both)
