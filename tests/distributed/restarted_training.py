"""Trains by DistributedDataParallel on "bagua" and resumes from its last checkpoint: what torchrun runs in a test.

torchrun ... restarted_training.py FOLDER [--rank-1-dies]
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import bagua.c10d  # noqa: F401  registers the backend

EPOCHS, STEPS = 4, 3


def main(folder: Path, dies: bool) -> None:
    """Four epochs, or those that are left; rank 0 writes a checkpoint after each, and the weights at the end."""
    torch.set_num_threads(1)
    # torchrun ends a survivor as soon as it sees the death. This one ends by its own error.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    dist.init_process_group("bagua")
    rank, attempt = dist.get_rank(), os.environ["TORCHELASTIC_RESTART_COUNT"]
    torch.manual_seed(5)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1)), bucket_cap_mb=0.001)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    checkpoint, first = folder / "checkpoint", 0
    if checkpoint.exists():
        state: dict[str, Any] = torch.load(checkpoint, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["epoch"]
    print(f"rank {rank} begins attempt {attempt} at epoch {first}", flush=True)
    for epoch in range(first, EPOCHS):
        samples = torch.Generator().manual_seed(100 * epoch + rank)
        for step in range(STEPS):
            if dies and attempt == "0" and (rank, epoch, step) == (1, 2, 1):
                os.kill(os.getpid(), signal.SIGKILL)
            x = torch.randn(16, 8, generator=samples)
            nn.functional.mse_loss(model(x), x.sum(1, keepdim=True)).backward()
            optimizer.step()
            optimizer.zero_grad()
        if rank == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch + 1}
            torch.save(state, folder / "being-written")
            os.replace(folder / "being-written", checkpoint)
    if rank == 0:
        torch.save(model.state_dict(), folder / "weights")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), "--rank-1-dies" in sys.argv)
