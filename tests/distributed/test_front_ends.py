"""Each training of the table by each front end leaves the weights, buffers and gradients of torch's on gloo.

Bit for bit with two ranks. The points are those of ddp_parity.md; Lightning's column is in test_lightning.py.
"""

from __future__ import annotations

import functools
import os
from typing import Any

import pytest
import torch
import torch.distributed as dist

import bagua.torch_api as bagua
from tests.distributed.front_ends import FRONT_ENDS, REFERENCE
from tests.distributed.torch_ranks import ENVIRONMENT
from tests.distributed.training_rows import ROWS, compare, train_rows
from tests.world import make_world


def train(rank: int, backend: str, slow: bool) -> dict[str, dict[str, Any]]:
    """By front end and row."""
    size = int(os.environ["WORLD_SIZE"])
    rows = {name: row.slow for name, row in ROWS.items() if size in row.sizes and not row.left_out}
    torch.set_num_threads(1)
    if backend == "gloo":
        bagua.init_process_group()
    else:
        dist.init_process_group(backend)
    front_ends = [each for each in (REFERENCE, *FRONT_ENDS.values()) if each.backend == backend]
    found = {
        each.name: train_rows(each, rank, [name for name in rows if each.is_slow(name, rows[name]) == slow])
        for each in front_ends
    }
    if backend == "gloo":
        bagua.destroy_process_group()
    else:
        dist.destroy_process_group()
    return found


@functools.cache
def outcomes(size: int, backend: str, slow: bool) -> list[dict[str, dict[str, Any]]]:
    """By rank. Runs once for all tests of a part."""
    world = make_world(size, env=ENVIRONMENT, timeout=240.0)
    found: list[dict[str, dict[str, Any]]] = world.run(train, backend, slow)
    return found


@pytest.mark.parametrize(
    ("name", "size", "front_end"),
    [
        pytest.param(name, size, front_end, marks=[pytest.mark.slow] * FRONT_ENDS[front_end].is_slow(name, row.slow))
        for name, row in ROWS.items()
        for size in row.sizes
        for front_end in FRONT_ENDS
        if row.of(FRONT_ENDS[front_end])
    ],
)
def test_a_front_end_trains_as_ddp_on_gloo_does(name: str, size: int, front_end: str) -> None:
    if ROWS[name].left_out:
        pytest.skip(ROWS[name].left_out)
    column = FRONT_ENDS[front_end]
    ours, gloos = (outcomes(size, each.backend, each.is_slow(name, ROWS[name].slow)) for each in (column, REFERENCE))
    for found, expected in zip(ours, gloos, strict=True):
        # Two summands have one order only; with more, gloo's differs from ours.
        compare(column, name, found[front_end][name], expected[REFERENCE.name][name], exact=size == 2)
