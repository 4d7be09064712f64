"""torch's own DistributedDataParallel on the backend "bagua": only the name of the backend differs from gloo.

torchrun --standalone --nproc-per-node 2 examples/ddp_backend.py
torchrun --standalone --nproc-per-node 2 examples/ddp_backend.py --backend gloo
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import matplotlib
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

import bagua.c10d  # noqa: F401  only for a torch that does not find backends by their entry points


def draw(losses: list[float], path: Path) -> None:
    """Plots the loss of each step as a PNG."""
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots()
    axes.semilogy(losses)
    axes.set(xlabel="step", ylabel="loss", title="DistributedDataParallel on the backend bagua")
    figure.savefig(path)
    pyplot.close(figure)


def main() -> int:
    """Fits a function. Returns 1 if the loss did not become small."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="bagua", help="a backend of torch.distributed")
    parser.add_argument("--steps", type=int, default=200, help="how long to train")
    parser.add_argument("--png", type=Path, default=Path("ddp_backend.png"), help="where rank 0 draws the loss")
    arguments = parser.parse_args()
    dist.init_process_group(arguments.backend)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 1)))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

    # Each rank has its own samples.
    samples = torch.Generator().manual_seed(rank)
    losses: list[float] = []
    for _ in tqdm(range(arguments.steps), unit="step", disable=rank != 0):
        x = torch.rand(128, 2, generator=samples) * 2 - 1
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), (x[:, :1] * x[:, 1:]).sin())
        loss.backward()
        optimizer.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean, dist.ReduceOp.SUM)
        losses.append(float(mean) / ranks)
    if rank == 0:
        draw(losses, arguments.png)
        print(
            f"{ranks} ranks on {dist.get_backend()}: loss {losses[0]:.4f}, after {len(losses)} steps {losses[-1]:.5f}"
        )
    dist.destroy_process_group()
    return 0 if losses[-1] < losses[0] / 10 else 1


if __name__ == "__main__":
    sys.exit(main())
