"""Ray's TorchTrainer on the backend "bagua". `make test-ray` runs it, not `make test`: Ray takes a minute."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.world import ROOT


def test_the_example_trains_on_two_workers_that_ray_starts(tmp_path: Path) -> None:
    picture = tmp_path / "loss.png"
    command = [sys.executable, str(ROOT / "examples" / "ray_digits.py"), "--png", str(picture)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-5000:]
    assert "2 workers on bagua" in done.stdout
    assert "weights equal on all workers" in done.stdout
    assert picture.read_bytes().startswith(b"\x89PNG")
