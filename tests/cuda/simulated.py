"""Builds the simulated CUDA driver."""

from __future__ import annotations

import fcntl
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

#: A driver whose work begins only when a call waits for it.
NEVER = 3_600_000_000


def built(target: str = "cuda-sim") -> Path:
    """The folder with the libraries that a target of the Makefile makes; skips where they cannot be made."""
    if shutil.which("g++") is None or shutil.which("make") is None:
        pytest.skip("the simulated driver is made by make and g++, and one of them is absent")
    made = ROOT / "target" / "cuda-sim"
    made.mkdir(parents=True, exist_ok=True)
    # Each process of a run of pytest comes here, and an object that one compiles is none that another can link.
    with open(made / "making", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        subprocess.run(["make", "--no-print-directory", "--silent", "--jobs=2", target], cwd=ROOT, check=True)
    return made
