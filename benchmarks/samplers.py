"""Compares the load-balancing sampler with torch's DistributedSampler in an epoch of four ranks on samples of skewed
lengths.

A step lasts as long as its slowest rank, because gradients are averaged after it. The ranks are threads that sleep for
the cost of their batch and wait at a barrier. The ideal time is the sum of all costs divided by the number of ranks.
"""

from __future__ import annotations

import argparse
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from common import add_output_options, save_if_asked
from torch.utils.data import DistributedSampler

from bagua.torch_api.contrib import LoadBalancingDistributedSampler


def epoch_s(by_rank: list[list[int]], seconds: np.ndarray[Any, Any], batch: int) -> float:
    """Seconds that the ranks take for an epoch in which each sample has a cost in seconds."""
    steps = [[seconds[rank[start : start + batch]].sum() for start in range(0, len(rank), batch)] for rank in by_rank]
    together = threading.Barrier(len(by_rank))

    def rank(costs: list[float]) -> None:
        for cost in costs:
            time.sleep(cost)
            together.wait()

    threads = [threading.Thread(target=rank, args=(costs,)) for costs in steps]
    begun = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return time.perf_counter() - begun


def main() -> None:
    """Prints each sampler's time and its ratio to the ideal."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--samples", type=int, default=4000)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=10.0, help="the ideal time of an epoch")
    add_output_options(parser)
    chosen = parser.parse_args()
    if chosen.quick:
        chosen.samples, chosen.seconds = 400, 0.5
    lengths = np.exp(np.random.default_rng(0).normal(4.0, 1.0, chosen.samples)).astype(np.int64) + 1
    seconds = lengths * (chosen.seconds * chosen.ranks / lengths.sum())
    samplers: dict[str, Callable[[int], Any]] = {
        "LoadBalancingDistributedSampler": lambda rank: LoadBalancingDistributedSampler(
            lengths, None, chosen.ranks, rank, complexities=lengths
        ),
        "DistributedSampler": lambda rank: DistributedSampler(lengths, chosen.ranks, rank),
    }
    rows = []
    for name, make in samplers.items():
        by_rank = [list(make(rank)) for rank in range(chosen.ranks)]
        assert set().union(*by_rank) == set(range(chosen.samples))
        taken = epoch_s(by_rank, seconds, chosen.batch)
        print(f"{name:32} {taken:6.2f} s   {taken / chosen.seconds:.3f} x ideal")
        task = {"ranks": chosen.ranks, "samples": chosen.samples, "batch": chosen.batch, "ideal_s": chosen.seconds}
        rows.append({"sampler": name, **task, "epoch_s": f"{taken:.3f}", "of_ideal": f"{taken / chosen.seconds:.3f}"})
    save_if_asked(chosen, "samplers", rows)


if __name__ == "__main__":
    main()
