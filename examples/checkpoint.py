"""Training that resumes where it stopped: run it twice with the same folder.

torchrun --standalone --nproc-per-node 2 examples/checkpoint.py --folder /tmp/my-checkpoints
"""

from __future__ import annotations

import argparse
import sys

import torch

import bagua.torch_api as bagua
from bagua.torch_api.checkpoint import load_checkpoint, save_checkpoint


def main() -> int:
    """Loads the last checkpoint, trains some more iterations, and saves again."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", default="checkpoints", help="on a file system that all ranks share")
    parser.add_argument("--iterations", type=int, default=20)
    arguments = parser.parse_args()
    bagua.init_process_group()
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
    start = load_checkpoint(arguments.folder, model, optimizer, schedule)
    bagua.with_bagua(model, [optimizer], "gradient_allreduce")
    loss = torch.zeros(())
    for _ in range(start, start + arguments.iterations):
        x = torch.randn(32, 8)
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    save_checkpoint(start + arguments.iterations, arguments.folder, model, optimizer, schedule)
    if bagua.get_rank() == 0:
        print(f"iterations {start} to {start + arguments.iterations}: loss {loss.item():.4f}")
    bagua.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
