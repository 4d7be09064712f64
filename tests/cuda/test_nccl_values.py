"""Every verb, element type and reduce operation by NCCL: within its rules, and equal on all ranks.

On the strict libnccl of tests/cuda/nccl over the simulated driver. It reduces in no order of ranks, and rounds
averages before the sum; what only moves has the host's bits, and so has what NCCL does not reduce.
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import pytest

import bagua
from tests.cuda.device_arrays import Cuda
from tests.cuda.ranks import Ranks
from tests.cuda.test_codec_on_device import _kernels, compiler
from tests.cuda.test_staged_values import DTYPES, OPS, bits, move_everything

__all__ = ["_kernels", "compiler"]

SIZES = [1, 2, 3, 4]
#: Results may differ from the host's by so many units in the last place of one.
ULPS = 16


def run(ranks: Ranks, size: int, function: Any, *arguments: Any, **variables: Any) -> list[Any]:
    """Ranks with a device each, which communicate by NCCL."""
    named = {"BAGUA_CUDA_COLLECTIVE": "nccl", "BAGUA_SIM_DEVICES": max(size, 2)} | variables
    return ranks(size, function, *arguments, **named)


def values(rank: int, shape: Any, dtype: str) -> np.ndarray[Any, Any]:
    """Random finite values of a rank."""
    random = np.random.default_rng([rank, 11])
    kind = np.dtype(dtype)
    if kind.kind == "b":
        return random.integers(0, 2, shape).astype(bool)
    if kind.kind in "iu":
        return random.integers(0, 100, shape).astype(kind)
    made = random.uniform(0.5, 2.0, shape)
    return (made + 1j * random.uniform(0.5, 2.0, shape) if kind.kind == "c" else made).astype(kind)


def near(found: np.ndarray[Any, Any], expected: np.ndarray[Any, Any], exact: bool) -> None:
    """As the host's: bit for bit, or to a few units of the last place."""
    assert found.dtype == expected.dtype
    if exact or found.dtype.kind not in "fc":
        assert bits(found) == bits(expected)
    else:
        # The type of the parts of a complex number has the precision.
        unit = np.finfo(found.dtype).eps
        np.testing.assert_allclose(found, expected, rtol=ULPS * unit, atol=ULPS * unit)


def reduce_everything(rank: int, size: int, dtype: str) -> tuple[list[str], str, int]:
    """The operations that are defined, a digest of the results, and the kernels that were launched."""
    cuda, group = Cuda(), bagua.init()
    dlpack, same_everywhere, ran = dtype != "bool", hashlib.sha256(), []
    for op in OPS:
        x = values(rank, (size * 3, 5), dtype)
        expected = x.copy()
        try:
            group.all_reduce(expected, op)
        except (TypeError, ValueError):
            with pytest.raises((TypeError, ValueError)):
                group.all_reduce(cuda.array(x, dlpack=dlpack), op)
            continue
        exact = op in ("min", "max", "bor", "band", "bxor") or (op == "product" and "complex" in dtype)
        make = lambda what: cuda.array(what, dlpack=dlpack)  # noqa: E731 - short
        in_place, y, out = make(x), make(x), make(np.zeros_like(x))
        group.all_reduce(in_place, op)
        group.all_reduce(y, op, out=out)
        near(in_place.read(), expected, exact)
        assert bits(out.read()) == bits(in_place.read())
        assert bits(y.read()) == bits(x)
        same_everywhere.update(bits(in_place.read()))
        for root in {0, size - 1}:
            y, out = make(x), make(np.zeros_like(x))
            group.reduce(y, root, op)
            group.reduce(make(x), root, op, out=out if rank == root else None)
            if rank == root:
                near(y.read(), expected, exact)
                near(out.read(), expected, exact)
            else:
                assert bits(y.read()) == bits(x)
        part = make(np.zeros_like(x[:3]))
        group.reduce_scatter(make(x), op, out=part)
        near(part.read(), expected[3 * rank : 3 * rank + 3], exact)
        ran.append(op)
    stats = bagua.stats()["groups"]["world"]["cuda"]
    assert (stats["to_host_bytes"], stats["to_device_bytes"], stats["pinned_bytes"]) == (0, 0, 0)
    bagua.shutdown()
    cuda.close()
    return ran, f"{stats['collective']} {same_everywhere.hexdigest()}", stats["launches"]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_reduction_of_a_type_is_equal_on_all_ranks_and_near_the_hosts(
    ranks: Ranks, compiler: dict[str, str], size: int, dtype: str
) -> None:
    found = run(ranks, size, reduce_everything, size, dtype, **compiler)
    assert len({same for _, same, _ in found}) == 1
    assert found[0][1].startswith("nccl ")
    assert len(found[0][0]) >= 3
    # Those that NCCL lacks, by our kernels.
    assert all((launches > 0) == (dtype not in ("float16", "float32", "float64")) for _, _, launches in found)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dlpack", [False, True], ids=["interface", "dlpack"])
def test_every_verb_that_moves_has_the_bits_of_the_host(ranks: Ranks, size: int, dlpack: bool) -> None:
    run(ranks, size, move_everything, size, "float32", dlpack, (3, 2))


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_type_can_be_moved(ranks: Ranks, dtype: str) -> None:
    run(ranks, 2, move_everything, 2, dtype, True, (7,))


def test_empty_arrays_pass_through_every_verb(ranks: Ranks) -> None:
    run(ranks, 2, move_everything, 2, "float32", True, (0, 3))


def long_bits(rank: int, size: int) -> None:
    """Several pieces, and more ranks than a launch has sources."""
    cuda, group = Cuda(), bagua.init()
    # One piece is 32 MiB of all ranks together.
    count = (32 << 20) // size // 8 + size * 1001
    x = np.random.default_rng(rank).integers(0, 1 << 62, count // size * size).astype(np.int64)
    y, expected = cuda.array(x), x.copy()
    group.all_reduce(expected, "bxor")
    group.all_reduce(y, "bxor")
    assert bits(y.read()) == bits(expected)
    part = cuda.empty(len(x) // size, np.int64)
    group.reduce_scatter(cuda.array(x), "bxor", out=part)
    assert bits(part.read()) == bits(expected[rank * len(x) // size :][: len(x) // size])
    bagua.shutdown()
    cuda.close()


@pytest.mark.parametrize("size", [2, 9])
def test_what_nccl_does_not_reduce_is_reduced_piece_by_piece(ranks: Ranks, compiler: dict[str, str], size: int) -> None:
    run(ranks, size, long_bits, size, timeout=120, **compiler)


def without_nvrtc(rank: int) -> str:
    cuda, group = Cuda(), bagua.init()
    x = cuda.array(np.arange(8))
    group.all_reduce(x)
    with pytest.raises(bagua.BaguaError, match="need NVRTC on cuda:") as raised:
        group.all_reduce(x, "bor")
    group.all_reduce(x, "max")
    assert x.read().tolist() == (2 * np.arange(8)).tolist()
    bagua.shutdown()
    cuda.close()
    return str(raised.value)


def test_without_nvrtc_what_needs_a_kernel_names_it_and_the_group_goes_on(ranks: Ranks, tmp_path: Any) -> None:
    nowhere = {"BAGUA_LIBNVRTC": "/nowhere/libnvrtc.so", "XDG_CACHE_HOME": str(tmp_path)}
    for text in run(ranks, 2, without_nvrtc, **nowhere):
        assert "/nowhere/libnvrtc.so" in text
