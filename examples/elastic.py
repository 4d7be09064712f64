"""An elastic job: a rank fails during training, is restarted, and rejoins the averaging of the others.

python -m bagua.distributed.run --keep-going --nproc-per-node 2 examples/elastic.py
"""

from __future__ import annotations

import argparse
import os
import sys
import time

import torch
from torch import nn

import bagua.torch_api as bagua
from bagua.torch_api.algorithms import AsyncModelAverageAlgorithm, AsyncModelAverageAlgorithmImpl


def main() -> int:
    """Fits a line, while one rank fails once. Returns 0 if the final weights are right."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fails", type=int, default=1, metavar="RANK", help="the rank that fails once; -1: none")
    parser.add_argument("--seconds", type=float, default=3.0, help="how long to train with all ranks")
    arguments = parser.parse_args()
    # The runner sets BAGUA_ELASTIC and counts the restarts of this rank.
    bagua.init_process_group()
    rank, ranks = bagua.get_rank(), bagua.get_world_size()
    fails = rank == arguments.fails and os.environ.get("BAGUA_RESTART_COUNT") == "0"
    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    # In a restarted process, this returns with the average of the other ranks' weights.
    bagua.with_bagua(model, [optimizer], AsyncModelAverageAlgorithm(sync_interval_ms=20))
    algorithm = bagua.algorithm_of(model, AsyncModelAverageAlgorithmImpl)
    came = "came back" if bagua.rejoined() else "began"
    print(f"rank {rank} {came} at forward {model.bagua_ddp.bagua_train_step_counter}", flush=True)

    wanted = torch.arange(8.0).unsqueeze(1) / 8
    began = time.monotonic()
    lost, whole_since = bagua.rejoined(), 0.0
    while time.monotonic() - began < 120:
        x = torch.randn(32, 8)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), x @ wanted).backward()
        optimizer.step()
        time.sleep(0.002)
        present = len(algorithm.stats()["ranks"])
        if fails and time.monotonic() - began > 1:
            print(f"rank {rank} fails", flush=True)
            os._exit(7)
        if present < ranks and not lost:
            print(f"rank {rank} goes on with {present} of {ranks} ranks", flush=True)
        lost = lost or present < ranks
        # Remember since when the failed rank is back.
        if lost and present == ranks:
            whole_since = whole_since or time.monotonic()
        # Ranks learn of each other at different times, so another rank may already have ended.
        if whole_since and (present < ranks or time.monotonic() - whole_since > arguments.seconds):
            break

    with algorithm.lock(model):
        off = float((model.weight.detach() - wanted.T).abs().max())
    print(f"rank {rank}: farthest weight {off:.1e} off, after {algorithm.stats()['rounds']} rounds", flush=True)
    bagua.destroy_process_group()
    return 0 if off < 0.01 and whole_since else 1


if __name__ == "__main__":
    sys.exit(main())
