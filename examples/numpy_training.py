"""The engine without torch: logistic regression in NumPy, trained by two ranks.

    python examples/numpy_training.py

This starts two ranks. Under a launcher that sets RANK and WORLD_SIZE, the program runs one rank. Each rank has its own
half of the data. The engine averages gradients while the next ones are computed, and all ranks end with bitwise equal
weights.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile

import numpy as np

import bagua

FEATURES, SAMPLES, STEPS, RATE = 20, 2000, 60, 0.5


def samples() -> tuple[np.ndarray, np.ndarray]:
    """Returns points on both sides of a plane that training has to find."""
    random = np.random.default_rng(0)
    x = random.standard_normal((SAMPLES, FEATURES)).astype(np.float32)
    plane = random.standard_normal(FEATURES).astype(np.float32)
    return x, (x @ plane + 0.25 > 0).astype(np.float32)


def train(group: bagua.Group) -> None:
    """Runs one rank."""
    everything, labels = samples()
    x, y = everything[group.rank :: group.size], labels[group.rank :: group.size]
    weight, bias = np.zeros(FEATURES, np.float32), np.zeros((), np.float32)
    gradient = {"weight": np.zeros_like(weight), "bias": np.zeros_like(bias)}

    # Two buckets in the order in which their gradients become ready. The first is sent while the second is computed.
    buckets = [
        bagua.Bucket(name, {name: gradient[name]}).append_centralized(average=True) for name in ("bias", "weight")
    ]
    with bagua.Engine("logistic regression", group=group) as engine:
        engine.register(buckets)
        for _ in range(STEPS):
            error = 1 / (1 + np.exp(-(x @ weight + bias))) - y
            gradient["bias"][...] = error.mean()
            engine.mark_ready("bias")
            gradient["weight"][...] = x.T @ error / len(x)
            engine.mark_ready("weight")
            engine.wait()
            bias -= RATE * gradient["bias"]
            weight -= RATE * gradient["weight"]

    right = np.array(((x @ weight + bias > 0) == (y > 0)).sum(), dtype=np.int64)
    group.all_reduce(right)
    weights = group.all_gather(weight)
    assert all(row.tobytes() == weight.tobytes() for row in weights), "the ranks' weights differ"
    if group.rank == 0:
        print(
            f"accuracy {right / SAMPLES:.3f} over {group.size} ranks, weights bitwise equal, through {group.collective}"
        )


def main(init_method: str = "env://") -> int:
    """Starts the ranks, or runs one if a launcher has set RANK."""
    if "RANK" in os.environ:
        train(bagua.init(init_method=init_method, timeout=60))
        bagua.shutdown()
        return 0
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, f"file://{folder}/ranks"]
        ranks = [
            subprocess.Popen(command, env={**os.environ, "RANK": str(rank), "WORLD_SIZE": "2"}) for rank in range(2)
        ]
        return max(abs(rank.wait()) for rank in ranks)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
