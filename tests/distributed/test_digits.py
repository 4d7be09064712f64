"""Every algorithm learns the digits as well as gradient_allreduce does: same data, seeds and epochs, four ranks."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

import pytest
import torch

from bagua.torch_api.algorithms import GlobalAlgorithmRegistry
from tests.world import ROOT, World

pytestmark = pytest.mark.slow

#: Points of accuracy that an algorithm may lose: 3.6 of the 359 test images.
ALLOWED = 0.0101
RUNS = [
    *((name, None) for name in GlobalAlgorithmRegistry if name != "gradient_allreduce"),
    ("bytegrad", "onebit"),
    ("bytegrad", "top_k"),
    ("bytegrad", "int4"),
    ("bytegrad", "top_k_chunks"),
]


def train_all(rank: int) -> None:
    torch.set_num_threads(1)
    for name, codec in [("gradient_allreduce", None), *RUNS]:
        arguments = ["--algorithm", name, *(("--compression", codec) if codec else ())]
        sys.argv = ["train_digits.py", *arguments]
        with pytest.raises(SystemExit) as left:
            runpy.run_path(str(Path(ROOT, "examples", "train_digits.py")), run_name="__main__")
        assert not left.value.code, (name, codec)


@pytest.fixture(scope="module")
def found() -> dict[tuple[str, str | None], float]:
    """Accuracy of each run."""
    world = World(4, timeout=480.0)
    world.run(train_all)
    assert "on the wire      shared memory: nothing crosses a socket" in world.output[0]
    shown = [float(value) for value in re.findall(r"test accuracy +([\d.]+)", world.output[0])]
    return dict(zip([("gradient_allreduce", None), *RUNS], shown, strict=True))


@pytest.mark.parametrize("run", RUNS, ids=str)
def test_it_is_within_a_point_of_gradient_allreduce(
    found: dict[tuple[str, str | None], float], run: tuple[str, str | None]
) -> None:
    best = found["gradient_allreduce", None]
    assert best > 0.97
    assert found[run] >= best - ALLOWED, found
