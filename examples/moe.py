"""A mixture of experts, spread over the ranks: trains, saves and loads it.

torchrun --standalone --nproc-per-node 2 examples/moe.py
"""

from __future__ import annotations

import sys
import tempfile

import torch
from torch import nn

import bagua.torch_api as bagua
from bagua.torch_api.checkpoint import load_checkpoint, save_checkpoint
from bagua.torch_api.moe import MoE

HIDDEN = 16


class Model(nn.Module):
    """A model with two experts on each rank. Each token goes to two experts of the job."""

    def __init__(self) -> None:
        super().__init__()
        self.inlet = nn.Linear(4, HIDDEN)
        expert = nn.Sequential(nn.Linear(HIDDEN, 2 * HIDDEN), nn.ReLU(), nn.Linear(2 * HIDDEN, HIDDEN))
        self.moe = MoE(HIDDEN, expert, num_local_experts=2, k=2, capacity_factor=1.5)
        self.outlet = nn.Linear(HIDDEN, 1)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the prediction, and the loss that keeps the experts evenly busy."""
        hidden, balance, _ = self.moe(torch.relu(self.inlet(x)))
        return self.outlet(hidden), balance


def main() -> int:
    """Trains, saves and loads. Returns 1 if the loaded weights differ from the saved ones."""
    bagua.init_process_group()
    # A different seed on each rank, because experts differ; with_bagua makes the other weights equal.
    torch.manual_seed(bagua.get_rank())
    model = Model()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    bagua.with_bagua(model, [optimizer], "gradient_allreduce")
    for step in range(200):
        x = torch.randn(64, 4)
        predicted, balance = model(x)
        loss = (predicted - (x[:, :1] * x[:, 1:2]).abs()).square().mean()
        optimizer.zero_grad()
        (loss + 0.01 * balance).backward()
        optimizer.step()
        if bagua.get_rank() == 0 and step % 50 == 49:
            print(f"step {step + 1}: loss {loss.item():.4f}, balance {balance.item():.3f}")
    folder = bagua.broadcast_object(tempfile.mkdtemp())
    save_checkpoint(200, folder, model, optimizer)
    other = Model()
    iteration = load_checkpoint(folder, other)
    same = all(map(torch.equal, model.parameters(), other.parameters()))
    print(f"rank {bagua.get_rank()}: loaded iteration {iteration}, {'as saved' if same else 'NOT AS SAVED'}")
    bagua.destroy_process_group()
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
