"""torchrun restarts a job on the backend "bagua" that has lost a rank."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.distributed import restarted_training
from tests.world import ROOT

pytestmark = pytest.mark.slow


def run(folder: Path, *arguments: str) -> dict[str, torch.Tensor]:
    """The weights at the end of a job of two ranks, which may be restarted once; its logs are in the folder."""
    folder.mkdir()
    command = ["--standalone", "--nproc-per-node", "2", "--max-restarts", "1"]
    command += ["--log-dir", str(folder / "logs"), "--redirects", "3", restarted_training.__file__, str(folder)]
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *command, *arguments],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "BAGUA_TRACE_DIR": str(folder / "traces")},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr + "".join(text for _, text in sorted(logs(folder).items()))
    weights: dict[str, torch.Tensor] = torch.load(folder / "weights", weights_only=True)
    return weights


def logs(folder: Path) -> dict[str, str]:
    """Returns the output of each rank, by "attempt_0/0/stderr.log" and so on."""
    found = {}
    for path in (folder / "logs").rglob("*.log"):
        found["/".join(path.parts[-3:])] = path.read_text()
    return found


def test_a_restarted_job_ends_with_the_weights_of_an_undisturbed_one(tmp_path: Path) -> None:
    undisturbed = run(tmp_path / "undisturbed")
    restarted = run(tmp_path / "restarted", "--rank-1-dies")
    printed = logs(tmp_path / "restarted")
    assert "lost rank 1" in printed["attempt_0/0/stderr.log"]
    assert printed["attempt_1/0/stdout.log"] == "rank 0 begins attempt 1 at epoch 2\n"
    assert printed["attempt_1/1/stdout.log"] == "rank 1 begins attempt 1 at epoch 2\n"
    assert restarted.keys() == undisturbed.keys()
    assert all(torch.equal(restarted[name], tensor) for name, tensor in undisturbed.items())
