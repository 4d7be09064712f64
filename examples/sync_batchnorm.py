"""Batch normalisation over the batches of all ranks: each rank has two samples and uses the statistics of all.

torchrun --standalone --nproc-per-node 2 examples/sync_batchnorm.py
"""

from __future__ import annotations

import sys

import torch
from torch import nn

import bagua.torch_api as bagua
from bagua.torch_api.contrib.sync_batchnorm import SyncBatchNorm


def main() -> int:
    """Trains, and prints whether the running statistics are equal on all ranks."""
    bagua.init_process_group()
    rank, ranks = bagua.get_rank(), bagua.get_world_size()
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 2))
    # Convert before with_bagua, which registers the parameters.
    model = SyncBatchNorm.convert_sync_batchnorm(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    bagua.with_bagua(model, [optimizer], "gradient_allreduce")
    torch.manual_seed(rank)
    loss = torch.zeros(())
    for _ in range(30):
        labels = torch.randint(2, (2,))
        images = torch.randn(2, 1, 8, 8) + labels.view(-1, 1, 1, 1)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
    mean = model.get_buffer("1.running_mean")
    everybody = torch.empty(ranks * len(mean))
    bagua.allgather(mean, everybody)
    equal = bool((everybody.view(ranks, -1) == mean).all())
    if rank == 0:
        print(f"loss {loss.item():.4f}, running mean {[round(x, 4) for x in mean.tolist()]}")
        print(f"statistics {'equal on all ranks' if equal else 'DIFFER BETWEEN RANKS'}")
    bagua.destroy_process_group()
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
