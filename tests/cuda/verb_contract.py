"""The contract of every collective of device memory: each verb does on device arrays what it does on host arrays.

Bit for bit, or near where NCCL adds in an order of its own and rounds averages before the sum; then equal on all ranks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest

import bagua
from bagua import extension
from tests.cuda.device_arrays import Cuda

# NumPy has no bfloat16.
DTYPES = tuple(name for name in extension.DTYPES if name != "bfloat16")
OPS = ("sum", "avg", "min", "max", "product", "band", "bor", "bxor")
#: Results may differ from the host's by so many units in the last place of one.
ULPS = 16

Array = np.ndarray[Any, Any]
Verb = Callable[[Any, Any], Any]


def values(rank: int, shape: Any, dtype: str, *, finite: bool = False) -> Array:
    """Random values of a rank, some of them not finite where the type has such."""
    random = np.random.default_rng([rank, 7])
    kind = np.dtype(dtype)
    if kind.kind == "b":
        return random.integers(0, 2, shape).astype(bool)
    if kind.kind in "iu":
        info = np.iinfo(kind)
        return random.integers(info.min, info.max, shape, kind, endpoint=True)
    draw = (lambda: random.uniform(0.5, 2.0, shape)) if finite else (lambda: random.standard_normal(shape))
    made = draw()
    if kind.kind == "c":
        return (made + 1j * draw()).astype(kind)
    if not finite:
        flat = made.reshape(-1)
        # Not an infinity times a zero and a NaN: of two NaNs either may stay.
        flat[rank % 2 :: 1 + flat.size // 3] = [np.inf, -0.0, np.nan, 1e-40][rank % 4]
    return made.astype(kind)


def bits(array: Array) -> bytes:
    return np.ascontiguousarray(array).tobytes()


def near(found: Array, expected: Array, exact: bool) -> None:
    """Checks a result against the host's: bit for bit if `exact`, or else to a few units of the last place."""
    assert found.dtype == expected.dtype
    if exact or found.dtype.kind not in "fc":
        assert bits(found) == bits(expected)
    else:
        # The type of the parts of a complex number has the precision.
        unit = np.finfo(found.dtype).eps
        np.testing.assert_allclose(found, expected, rtol=ULPS * unit, atol=ULPS * unit)


def both(cuda: Cuda, dlpack: bool, verb: Verb, x: Array, out: Array | None, exact: bool = True) -> Array:
    """Runs a verb on host arrays and on copies of them on the device: what they hold afterwards is the same.

    What the device's array of results holds.
    """
    on_device = cuda.array(x, dlpack=dlpack)
    target = None if out is None else cuda.array(out, dlpack=dlpack)
    x = x.copy()
    verb(x, out)
    verb(on_device, target)
    # A source stays as it was.
    near(on_device.read(), x, exact or out is not None)
    if target is None or out is None:
        return on_device.read()
    near(target.read(), out, exact)
    return target.read()


def reductions(cuda: Cuda, group: bagua.Group, dtype: str, exact: bool) -> bytes:
    """Every reduction of a type, by each operation that is defined for it; the results of all_reduce."""
    rank, size, results, ran = group.rank, group.size, b"", 0
    dlpack = dtype != "bool"
    for op in OPS:
        x = values(rank, (size * 3, 5), dtype, finite=not exact)
        try:
            group.all_reduce(x.copy(), op)
        except (TypeError, ValueError):
            with pytest.raises((TypeError, ValueError)):
                group.all_reduce(cuda.array(x, dlpack=dlpack), op)
            continue
        # NCCL has no bitwise operations, and no products of complex numbers.
        same = exact or op in ("min", "max", "bor", "band", "bxor") or (op == "product" and "complex" in dtype)

        def run(verb: Verb, out: Array | None = None, x: Array = x, same: bool = same) -> bytes:
            return bits(both(cuda, dlpack, verb, x, out, same))

        in_place = run(lambda x, out, op=op: group.all_reduce(x, op))
        assert run(lambda x, out, op=op: group.all_reduce(x, op, out=out), np.zeros_like(x)) == in_place
        for root in {0, size - 1}:
            run(lambda x, out, op=op, root=root: group.reduce(x, root, op))
            run(
                lambda x, out, op=op, root=root: group.reduce(x, root, op, out=out if rank == root else None),
                np.zeros_like(x),
            )
        run(lambda x, out, op=op: group.reduce_scatter(x, op, out=out), np.zeros_like(x[:3]))
        results, ran = results + in_place, ran + 1
    assert ran >= 3
    return results


class Found(NamedTuple):
    """The end of a rank: a digest of results that are equal on all ranks, and the group's statistics."""

    digest: str
    stats: dict[str, Any]


def reduce_everything(rank: int, dtype: str, exact: bool) -> Found:
    cuda, group = Cuda(), bagua.init()
    digest = hashlib.sha256(reductions(cuda, group, dtype, exact)).hexdigest()
    stats = bagua.stats()["groups"]["world"]["cuda"]
    bagua.shutdown()
    cuda.close()
    return Found(digest, stats)


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


def move_everything(rank: int, dtype: str, dlpack: bool, shape: tuple[int, ...]) -> None:
    cuda, group = Cuda(), bagua.init()
    moves(cuda, group, dtype, dlpack, shape)
    bagua.shutdown()
    cuda.close()
