"""The example runs, learns, and shows that compression is compression."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

from tests.world import ROOT, World

pytestmark = pytest.mark.slow


def run_example(rank: int) -> None:
    import torch

    torch.set_num_threads(1)
    runpy.run_path(str(Path(ROOT, "examples", "aggregation.py")), run_name="__main__")


def test_the_example_runs_and_its_replicas_are_equal() -> None:
    world = World(2, timeout=150.0)
    world.run(run_example)
    lines = re.findall(r"^(\S.*?) +(\d+) bytes a step, loss ([\d.]+)$", world.output[0], re.MULTILINE)
    cost = {variant: int(size) for variant, size, _ in lines}
    loss = {variant: float(value) for variant, _, value in lines}
    assert set(cost) == {"all-reduce", "low rank", "sparsified", "CentralizedSGD", "DecentralizedSGD"}
    assert cost["low rank"] < cost["all-reduce"] / 4
    assert cost["sparsified"] < cost["all-reduce"] / 2
    # An untrained model is at about 0.9.
    assert max(loss.values()) < 0.6
    assert "replicas are equal" in world.output[0]
