"""Asynchronous model averaging: ranks of different speed train alone while a thread averages their weights.

torchrun --standalone --nproc-per-node 2 examples/async.py
"""

from __future__ import annotations

import argparse
import sys
import time

import torch
from torch import nn

import bagua.torch_api as bagua
from bagua.torch_api.algorithms import AsyncModelAverageAlgorithm, AsyncModelAverageAlgorithmImpl


def main() -> int:
    """Fits a line on each rank, in as many steps as there is time for. Returns 1 if the fit failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=2.0, help="how long to train")
    arguments = parser.parse_args()
    bagua.init_process_group()
    rank, ranks = bagua.get_rank(), bagua.get_world_size()
    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    # Gradients are averaged in the first ten steps, weights every 20 ms afterwards.
    bagua.with_bagua(model, [optimizer], AsyncModelAverageAlgorithm(sync_interval_ms=20, warmup_steps=10))
    algorithm = bagua.algorithm_of(model, AsyncModelAverageAlgorithmImpl)

    wanted = torch.arange(8.0).unsqueeze(1) / 8
    samples = torch.Generator().manual_seed(rank)
    steps, end = 0, time.monotonic() + arguments.seconds
    # All ranks make the steps of the warm-up together. Then each continues at its own speed.
    while steps < 11 or time.monotonic() < end:
        x = torch.randn(32, 8, generator=samples)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), x @ wanted).backward()
        optimizer.step()
        steps += 1
        # Rank 1 takes twice as long as rank 0, rank 2 three times as long.
        time.sleep(0.002 * (rank + 1))

    # A round of all ranks at rest makes their weights equal. Without it they would differ by the last steps.
    algorithm.synchronize(model)
    with algorithm.lock(model):
        off = float((model.weight.detach() - wanted.T).abs().max())
    everybody = torch.empty(ranks, dtype=torch.int64)
    bagua.allgather(torch.tensor([steps]), everybody)
    if rank == 0:
        stats = algorithm.stats()
        print(f"steps            {everybody.tolist()}")
        print(f"rounds           {stats['rounds']} of ranks {stats['ranks']}, {stats['round_s'] * 1e3:.1f} ms the last")
        print(f"waited for them  {stats['lock_wait_s'] * 1e3:.1f} ms in all")
        print(f"farthest weight  {off:.1e} off")
    # Wait, so that no rank leaves while others still average with it.
    bagua.barrier()
    bagua.destroy_process_group()
    return 0 if off < 0.01 else 1


if __name__ == "__main__":
    sys.exit(main())
