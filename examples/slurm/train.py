"""Training that saves a checkpoint shortly before Slurm's time limit, and resumes from it the next time.

    srun python examples/slurm/train.py --checkpoint FILE

`train.sbatch` in this folder is the job. Slurm sends SIGUSR1 to every rank (`--signal=USR1@120`), but not at the same
moment. So in each step the ranks find out if one of them got the signal, and all stop after the same step. The exit
code is 0 if all steps are done, and 75 (EX_TEMPFAIL of sysexits.h) if the job has to be started again.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from pathlib import Path

import numpy as np

import bagua

#: Exit code after a checkpoint from which another start resumes.
AGAIN = 75

FEATURES, RATE = 8, 0.05


def save(path: Path, step: int, weights: np.ndarray) -> None:
    """Writes a temporary file and renames it, so that a reader never finds half a file."""
    new = path.with_name(f"{path.name}.new")
    with new.open("wb") as file:
        np.savez(file, step=step, weights=weights)
        file.flush()
        os.fsync(file.fileno())
    new.rename(path)


def load(path: Path) -> tuple[int, np.ndarray]:
    """Returns the number of completed steps and the weights after them."""
    if not path.exists():
        return 0, np.zeros(FEATURES, dtype=np.float32)
    with np.load(path) as kept:
        return int(kept["step"]), kept["weights"]


def main() -> int:
    """Trains until all steps are done or a signal arrives."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, required=True, help="a file on a file system that all ranks share")
    parser.add_argument("--steps", type=int, default=200, help="in all, over all starts")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds of computation that each step pretends")
    arguments = parser.parse_args()

    signalled = []
    # A handler runs between two of Python's instructions, so the collectives are not interrupted.
    for number in (signal.SIGUSR1, signal.SIGTERM):
        signal.signal(number, lambda number, _: signalled.append(number))
    group = bagua.init()
    step, weights = load(arguments.checkpoint)
    print(f"rank {group.rank} of {group.size} begins at step {step}", flush=True)
    # All ranks fit the same plane, each from its own samples.
    plane = np.arange(1, FEATURES + 1, dtype=np.float32)
    has_to_stop = np.zeros(1, dtype=np.uint8)
    while step < arguments.steps and not has_to_stop[0]:
        x = np.random.default_rng((step, group.rank)).standard_normal((32, FEATURES)).astype(np.float32)
        gradient = x.T @ (x @ (weights - plane)) / len(x)
        time.sleep(arguments.pause)
        bagua.all_reduce(gradient, "avg")
        weights = weights - RATE * gradient
        step += 1
        has_to_stop[0] = len(signalled) > 0
        bagua.all_reduce(has_to_stop, "max")
    if group.rank == 0:
        save(arguments.checkpoint, step, weights)
        print(f"saved after step {step}: error {np.abs(weights - plane).max():.4f}", flush=True)
    # Wait, so that no rank ends before the checkpoint is complete.
    bagua.barrier()
    bagua.shutdown()
    return 0 if step == arguments.steps else AGAIN


if __name__ == "__main__":
    sys.exit(main())
