"""Ranks of one job that run a script each, as a launcher would start them."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from tests import forks
from tests.world import free_port

DEADLINE_S = 150

#: Starts a rank with this number, script and environment; what it prints goes to the file.
Start = Callable[[int, Path, dict[str, str], Path], "subprocess.Popen[bytes] | forks.Fork"]


def processes(*runner: str) -> Start:
    """Each rank is a new process, with these arguments of Python before its script."""

    def start(rank: int, script: Path, environment: dict[str, str], output: Path) -> subprocess.Popen[bytes]:
        with open(output, "wb") as file:
            command = [sys.executable, *runner, str(script)]
            return subprocess.Popen(command, env=environment, stdout=file, stderr=subprocess.STDOUT)

    return start


def run_ranks(code: str, size: int, folder: Path, start: Start) -> list[str]:
    """Runs the code as ranks of one job; its output per rank. A rank that fails fails the test, in its own words."""
    script = folder / "script.py"
    script.write_text(code)
    world = {
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "OMP_NUM_THREADS": "1",
    }
    outputs = [folder / f"output{rank}" for rank in range(size)]
    ranks: list[subprocess.Popen[bytes] | forks.Fork] = []
    with free_port() as port:
        try:
            for rank, output in enumerate(outputs):
                place = {"MASTER_PORT": str(port), "RANK": str(rank), "LOCAL_RANK": str(rank)}
                ranks.append(start(rank, script, {**os.environ, **world, **place}, output))
            until = time.monotonic() + DEADLINE_S
            codes = [process.wait(max(0.0, until - time.monotonic())) for process in ranks]
        finally:
            for process in ranks:
                process.kill()
                process.wait()
    shown = [output.read_text() for output in outputs]
    assert codes == [0] * size, "\n".join(shown)
    return shown
