"""What ranks compute together on the host, the kernels compute of the same arrays, bit for bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import bagua
from tests.cuda import kernel_cases as cases
from tests.cuda.kernels_on_host import Array, Kernels, kernels, placed, room, sources
from tests.world import make_world

__all__ = ["kernels"]

RANKS = 3
COUNT = 1001
#: bfloat16 is left out: NumPy has no such type.
OPERATIONS = [(name, op) for name, op in cases.operations() if name != "bf16"]


def typed(name: str, held: Array) -> Array:
    """Elements as NumPy types them."""
    return held.view(np.float16) if name == "f16" else held.astype(np.bool_) if name == "bool" else held


def all_reduce(rank: int) -> list[bytes]:
    """The results of every operation."""
    group = bagua.init()
    results = []
    for name, op in OPERATIONS:
        x = typed(name, cases.arrays(name, RANKS, COUNT)[rank]).copy()
        results.append(group.all_reduce(x, op).tobytes())
    return results


def compressed(rank: int, dtype: str, average: bool) -> bytes:
    """The result of compressed all_reduce."""
    group = bagua.init()
    x = np.zeros(COUNT, dtype)
    bucket = bagua.Bucket("b", {"x": x}).append_centralized(
        average=average, hierarchical=False, compression=bagua.Codec("minmax_u8")
    )
    with bagua.Engine("e") as engine:
        engine.register([bucket])
        x[:] = values(rank, dtype)
        engine.mark_ready("x")
        engine.wait(timeout=60)
    assert group.size == RANKS
    return x.tobytes()


def values(rank: int, dtype: str) -> Array:
    """What a rank gives."""
    return (np.random.default_rng(rank).standard_normal(COUNT) * (rank + 1)).astype(dtype)


def test_all_reduce_of_every_type_and_operation(kernels: Kernels) -> None:
    results: list[list[bytes]] = make_world(RANKS).run(all_reduce)
    assert results == [results[0]] * RANKS
    for (name, op), expected in zip(OPERATIONS, results[0], strict=True):
        given = [placed(held) for held in cases.arrays(name, RANKS, COUNT)]
        out = room(len(expected))
        kernel, times = cases.kernel_of(name, op)
        arguments: list[Any] = [sources(given), cases.U32(RANKS), out, cases.U64(COUNT * times), cases.F64(RANKS)]
        kernels.launch(kernel, (2,), *arguments)
        assert out.tobytes() == expected, f"{op} of {name}"


@pytest.mark.parametrize(("dtype", "average"), [("float32", True), ("float32", False), ("float16", True)])
def test_compressed_all_reduce(kernels: Kernels, dtype: str, average: bool) -> None:
    results: list[bytes] = make_world(RANKS).run(compressed, dtype, average)
    name, size = {"float32": "f32", "float16": "f16"}[dtype], np.dtype(dtype).itemsize
    each = -(-COUNT // RANKS)
    count, chunks, divisor = cases.U64(each), cases.U64(RANKS), RANKS if average else 1
    record = 32 + -(-each // 32) * 32
    sent = []
    for rank in range(RANKS):
        padded = np.zeros(each * RANKS, dtype)
        padded[:COUNT] = values(rank, dtype)
        given, ranges, records = placed(padded), room(RANKS * 2 * 16), room(RANKS * record)
        kernels.launch(f"minmax_u8_range_{name}", (2, RANKS), given, count, chunks, ranges)
        kernels.launch(f"minmax_u8_encode_{name}", (2, RANKS), given, count, chunks, ranges, records, None)
        sent.append(records.reshape(RANKS, record))
    gathered = room(RANKS * record)
    for chunk in range(RANKS):
        received = placed(np.concatenate([records[chunk] for records in sent]))
        tables, ranges, own = room(RANKS * 1024), room(2 * 16), room(record)
        common = (received, count, cases.U32(RANKS), cases.F32(divisor), tables)
        kernels.launch(f"minmax_u8_tables_{name}", (RANKS,), received, count, tables)
        kernels.launch(f"minmax_u8_reduce_range_{name}", (2,), *common, ranges, shared=RANKS * 1024)
        kernels.launch(f"minmax_u8_reduce_{name}", (2,), *common, ranges, own, None, None, shared=RANKS * 1024)
        gathered[chunk * record :][:record] = own
    out = room(each * RANKS * size)
    # A chunk is a tile.
    kernels.launch(f"minmax_u8_decode_{name}", (2,), gathered, count, chunks, cases.U64(1), out)
    assert [out.tobytes()[: COUNT * size]] * RANKS == results
