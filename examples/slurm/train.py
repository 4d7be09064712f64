"""A training that saves a checkpoint when Slurm's time is nearly over, and goes on there the next time.

    srun python examples/slurm/train.py --checkpoint FILE

`train.sbatch` beside it is its job. Slurm sends SIGUSR1 to every rank (`--signal=USR1@120`), but not at one moment: so
the ranks combine in each step whether one of them has it, and all stop after the same step. Ends with 0 when all steps
are done, and with 75 (EX_TEMPFAIL of sysexits.h) when the job has to be started again.
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

#: The exit code after a checkpoint that another start goes on from.
AGAIN = 75

FEATURES, RATE = 8, 0.05


def save(path: Path, step: int, weights: np.ndarray) -> None:
    """Writes beside the file and renames, so that no reader finds half of it."""
    new = path.with_name(f"{path.name}.new")
    with new.open("wb") as file:
        np.savez(file, step=step, weights=weights)
        file.flush()
        os.fsync(file.fileno())
    new.rename(path)


def load(path: Path) -> tuple[int, np.ndarray]:
    """The number of steps that are done, and the weights after them."""
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
    # All ranks find the same plane, each from its own samples.
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
    # No rank ends before the checkpoint is complete.
    bagua.barrier()
    bagua.shutdown()
    return 0 if step == arguments.steps else AGAIN


if __name__ == "__main__":
    sys.exit(main())
