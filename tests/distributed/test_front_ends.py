"""Each training of the table by each front end leaves the weights, buffers and gradients of torch's on gloo.

Bit for bit with two ranks. The points are those of ddp_parity.md; Lightning's column is in test_lightning.py.
"""

from __future__ import annotations

import functools
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import bagua.torch_api as bagua
from tests.distributed.front_ends import FRONT_ENDS, REFERENCE, Fabric
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


@pytest.mark.parametrize("front_end", [*FRONT_ENDS.values(), Fabric()], ids=lambda each: each.name)
def test_a_front_end_has_rows_in_make_test_and_needs_each_of_its_reasons(front_end: Any) -> None:
    quick = [name for name, row in ROWS.items() if row.of(front_end) and not front_end.is_slow(name, row.slow)]
    assert len(quick) >= 10
    needs = {need for row in ROWS.values() for variant in row.variants for need in variant.needed()}
    assert set(front_end.lacks) - needs == set()


def test_every_test_in_the_table_of_the_documents_exists() -> None:
    folder = Path(__file__).parent
    rows = [line for line in (folder / "ddp_parity.md").read_text().splitlines() if line[:3] != "|--"]
    named = {name for row in rows if row.startswith("|") for name in re.findall(r"`(\w+_\w+)`", row.split("|")[-2])}
    sources = [(folder / f"test_ddp_{which}.py").read_text() for which in ("wrapper", "jobs")]
    defined = {name for source in sources for name in re.findall(r"^def (\w+)", source, re.MULTILINE)}
    assert len(rows) > 22
    assert named - defined - set(ROWS) == set()
    assert set(ROWS) - named == set()
