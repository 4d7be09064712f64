"""Lightning's Trainer and Fabric with Bagua's strategies: the checks of lightning_checks.md, on two ranks."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lightning", reason="lightning is not installed: make setup")
pytest.importorskip("pytorch_lightning", reason="pytorch_lightning is not installed: make setup")

from tests.cases import check_outcomes
from tests.distributed.front_ends import REFERENCE, Fabric
from tests.distributed.lightning_ranks import CASES, FABRIC, PARITY, run
from tests.distributed.training_rows import compare
from tests.world import ROOT, World

#: The second name has the same code: a part of the cases shows that it runs there.
SHORT = ["reductions", "checkpoints_fit_everywhere", "the_monitor_logs_to_every_logger", "fabric_trains"]


@functools.cache
def outcomes(namespace: str) -> list[dict[str, Any]]:
    """What both ranks found. Runs once for all tests."""
    cases = list(CASES) if namespace == "lightning" else SHORT
    found: list[dict[str, Any]] = World(2, timeout=280.0).run(run, namespace, cases)
    return found


@pytest.mark.parametrize("name", PARITY)
@pytest.mark.parametrize("namespace", ["lightning", pytest.param("pytorch_lightning", marks=pytest.mark.slow)])
def test_a_training_is_bitwise_that_of_ddp(namespace: str, name: str) -> None:
    for found in outcomes(namespace):
        assert found[name] == found[f"ddp: {name}"]
        assert found[name][1], "the gradients of the ranks differ"


@pytest.mark.parametrize("name", FABRIC)
@pytest.mark.parametrize("namespace", ["lightning", pytest.param("pytorch_lightning", marks=pytest.mark.slow)])
def test_fabric_trains_as_ddp_on_gloo_does(namespace: str, name: str) -> None:
    for found in outcomes(namespace):
        compare(Fabric(), name, found[Fabric.name][name], found[REFERENCE.name][name], exact=True)


@pytest.mark.parametrize(
    ("namespace", "name"),
    [
        *(("lightning", name) for name in CASES),
        *(pytest.param("pytorch_lightning", name, marks=pytest.mark.slow) for name in SHORT),
    ],
)
def test_the_strategy(namespace: str, name: str) -> None:
    check_outcomes(outcomes(namespace), name)


@pytest.mark.slow
@pytest.mark.parametrize(("namespace", "start"), [("lightning", "fork"), ("pytorch_lightning", "spawn")])
def test_processes_that_lightning_starts_train_as_ddp_does(namespace: str, start: str, tmp_path: Path) -> None:
    program = str(ROOT / "tests" / "distributed" / "lightning_job.py")
    command = [sys.executable, program, namespace, start, str(tmp_path)]
    # Lightning starts no processes where a launcher seems to have done it.
    done = subprocess.run(command, env=outside_of_jobs(), capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.strip().splitlines()[-1].startswith("equal ")


@pytest.mark.slow
def test_the_example_draws_its_loss_on_processes_that_are_started_again(tmp_path: Path) -> None:
    picture = tmp_path / "loss.png"
    command = [sys.executable, str(ROOT / "examples" / "lightning_digits.py"), "--png", str(picture), "--epochs", "3"]
    done = subprocess.run(command, env=outside_of_jobs(), capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "on 2 rank(s)" in done.stdout
    assert picture.read_bytes().startswith(b"\x89PNG")


def outside_of_jobs() -> dict[str, str]:
    """The environment of a program that no launcher starts."""
    ours = ("MASTER_", "LOCAL_", "RANK", "WORLD_SIZE", "NODE_RANK", "TORCHELASTIC_", "SLURM_")
    return {key: value for key, value in os.environ.items() if not key.startswith(ours)} | {"OMP_NUM_THREADS": "1"}
