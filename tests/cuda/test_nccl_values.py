"""By NCCL: what it does not reduce, in pieces and without NVRTC. What each verb does is in test_verb_values.py.

On the strict libnccl of tests/cuda/nccl over the simulated driver.
"""

from __future__ import annotations

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
def test_what_nccl_does_not_reduce_is_reduced_piece_by_piece(ranks: Ranks, size: int) -> None:
    ranks.by("nccl", size, long_bits, size, timeout=120)
