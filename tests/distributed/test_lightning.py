"""Lightning's Trainer and Fabric with Bagua's strategies: the checks of lightning_checks.md, on two ranks."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.cases import check_outcomes, is_slow
from tests.distributed.front_ends import REFERENCE, Fabric
from tests.distributed.lightning_ranks import CASES, FABRIC, PARITY, QUICK, all_raise_in_a_world_of_gloo, run
from tests.distributed.training_rows import ROWS, compare
from tests.world import ROOT, World

# Ranks import it: it takes 3 s, and every process of pytest imports this module.
pytestmark = pytest.mark.skipif(
    not (find_spec("lightning") and find_spec("pytorch_lightning")), reason="Lightning is not installed: make setup"
)


Table = Mapping[str, bool]

#: By name of a training, row or case, whether `make test` leaves it out.
TRAININGS = {name: name not in QUICK for name in PARITY}
ROWS_OF_FABRIC = {name: Fabric().is_slow(name, ROWS[name].slow) for name in FABRIC}
CHECKS = {name: is_slow(case) for name, case in CASES.items()}


def each_of(table: Table) -> pytest.MarkDecorator:
    """Parameters `name`."""
    return pytest.mark.parametrize(
        "name", [pytest.param(name, marks=[pytest.mark.slow] * slow) for name, slow in table.items()]
    )


@functools.cache
def of_part(slow: bool) -> list[dict[str, Any]]:
    """Returns the results of both ranks. Runs once for all tests of a part."""
    parts = [[name for name in table if table[name] == slow] for table in (TRAININGS, ROWS_OF_FABRIC, CHECKS)]
    found: list[dict[str, Any]] = World(2, timeout=280.0).run(run, "lightning", *parts)
    return found


@each_of(TRAININGS)
def test_a_training_is_bitwise_that_of_ddp(name: str) -> None:
    for found in of_part(TRAININGS[name]):
        assert found[name] == found[f"ddp: {name}"]
        assert found[name][1], "the gradients of the ranks differ"


@each_of(ROWS_OF_FABRIC)
def test_fabric_trains_as_ddp_on_gloo_does(name: str) -> None:
    for found in of_part(ROWS_OF_FABRIC[name]):
        compare(Fabric(), name, found[Fabric.name][name], found[REFERENCE.name][name], exact=True)


@each_of(CHECKS)
def test_the_strategy(name: str) -> None:
    check_outcomes(of_part(CHECKS[name]), name)


@pytest.mark.slow
def test_ranks_that_raised_in_a_world_of_gloo_train_again(tmp_path: Path) -> None:
    assert World(2).run(all_raise_in_a_world_of_gloo, "lightning", str(tmp_path)) == [True, True]


@pytest.mark.slow
# The second namespace has the same code. This training shows that it runs there, by unpickled classes.
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
