"""A mixture of experts that are spread over the ranks, trained, saved and loaded.

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
    """Two experts on each rank, of which each token sees two of all."""

    def __init__(self) -> None:
        super().__init__()
        self.inlet = nn.Linear(4, HIDDEN)
        expert = nn.Sequential(nn.Linear(HIDDEN, 2 * HIDDEN), nn.ReLU(), nn.Linear(2 * HIDDEN, HIDDEN))
        self.moe = MoE(HIDDEN, expert, num_local_experts=2, k=2, capacity_factor=1.5)
        self.outlet = nn.Linear(HIDDEN, 1)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Prediction, and the loss that keeps the experts evenly busy."""
        hidden, balance, _ = self.moe(torch.relu(self.inlet(x)))
        return self.outlet(hidden), balance


def main() -> int:
    """Trains; 1 if what was loaded is not what was saved."""
    bagua.init_process_group()
    # Different on each rank: the experts are, and with_bagua makes the rest equal.
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
