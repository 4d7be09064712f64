"""The trial of `bagua doctor`: two processes that run an all_reduce.

python -m bagua.commands.all_reduce_check RANK RANKS FILE
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

import bagua
from bagua import config
from bagua.distributed import end_with_parent

__all__ = ["main", "run_check"]

#: Timeout of the ranks' operations, and seconds until the ranks are killed.
_TIMEOUT, _LIMIT = 20.0, 60.0

# Large enough for more than one chunk.
_ELEMENTS = 1 << 20


def run_check(ranks: int = 2) -> tuple[dict[str, Any], str]:
    """Runs the trial. Returns `ranks`, `ok` and `seconds` in a dict, and the reason for a failure, or ""."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="bagua-doctor-") as folder:
        wrapper = [sys.executable, "-I", "-S", end_with_parent.__file__, str(os.getpid())]
        command = [*wrapper, sys.executable, "-m", "bagua.commands.all_reduce_check"]
        # Keep the trial's metrics and flight records apart from those of a running job.
        variables = config.environment({"BAGUA_METRICS_PORT": "", "BAGUA_TRACE_DIR": "", "OMP_NUM_THREADS": "1"})
        processes: list[subprocess.Popen[str]] = []
        try:
            for rank in range(ranks):
                processes.append(
                    subprocess.Popen(
                        [*command, str(rank), str(ranks), str(Path(folder, "rendezvous"))],
                        env=variables,
                        stdin=subprocess.DEVNULL,
                        stdout=subprocess.DEVNULL,
                        stderr=subprocess.PIPE,
                        text=True,
                    )
                )
            why = _failure(processes, time.monotonic() + _LIMIT)
        except OSError as error:
            why = f"a process cannot be started: {error}"
        finally:
            for process in processes:
                process.kill()
                process.wait()
                if process.stderr is not None:
                    process.stderr.close()
    return {"ranks": ranks, "ok": not why, "seconds": round(time.monotonic() - began, 3)}, why


def _failure(processes: Sequence[subprocess.Popen[str]], until: float) -> str:
    """Returns the last line that the first failed rank wrote; "" if there is none."""
    for rank, process in enumerate(processes):
        try:
            _, errors = process.communicate(timeout=max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            return f"rank {rank} was still running after {_LIMIT:.0f} s"
        if process.returncode != 0:
            last = (errors.strip().splitlines() or ["no message"])[-1]
            return f"rank {rank} ended with exit code {process.returncode}: {last}"
    return ""


def main(arguments: Sequence[str]) -> int:
    rank, ranks, path = int(arguments[0]), int(arguments[1]), arguments[2]
    bagua.init(rank, ranks, f"file://{path}", local_rank=rank, local_world_size=ranks, timeout=_TIMEOUT)
    x = np.arange(_ELEMENTS, dtype=np.float32) % 1000 + rank
    bagua.all_reduce(x)
    expected = ranks * (np.arange(_ELEMENTS, dtype=np.float32) % 1000) + ranks * (ranks - 1) / 2
    bagua.shutdown()
    if not np.array_equal(x, expected):
        print("all_reduce gave a wrong sum", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
