"""By NCCL: what it does not reduce, in pieces and without NVRTC. What each verb does is in test_verb_values.py.

On the strict libnccl of tests/cuda/nccl over the simulated driver.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import bagua
from tests.cuda.device_arrays import Cuda
from tests.cuda.ranks import Ranks, device_rank
from tests.cuda.verb_contract import bits


@device_rank
def long_bits(rank: int, cuda: Cuda, group: bagua.Group, size: int) -> None:
    """Several pieces, and more ranks than a launch has sources."""
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


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 9])
def test_what_nccl_does_not_reduce_is_reduced_piece_by_piece(ranks: Ranks, compiler: dict[str, str], size: int) -> None:
    ranks.by("nccl", size, long_bits, size, timeout=120, **compiler)


@device_rank
def without_nvrtc(cuda: Cuda, group: bagua.Group) -> str:
    x = cuda.array(np.arange(8))
    group.all_reduce(x)
    with pytest.raises(bagua.BaguaError, match="need NVRTC on cuda:") as raised:
        group.all_reduce(x, "bor")
    group.all_reduce(x, "max")
    assert x.read().tolist() == (2 * np.arange(8)).tolist()
    return str(raised.value)


def test_without_nvrtc_what_needs_a_kernel_names_it_and_the_group_goes_on(ranks: Ranks, tmp_path: Any) -> None:
    nowhere = {"BAGUA_LIBNVRTC": "/nowhere/libnvrtc.so", "XDG_CACHE_HOME": str(tmp_path)}
    for text in ranks.by("nccl", 2, without_nvrtc, **nowhere):
        assert "/nowhere/libnvrtc.so" in text
