"""Trains a deep, narrow model with plain and with fused steps: bitwise equal weights in less time.

python examples/fused_optimizer.py                                      one process
torchrun --standalone --nproc-per-node 2 examples/fused_optimizer.py    two ranks
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch

import bagua.torch_api as bagua
from bagua.torch_api.contrib import fuse_optimizer


def train(layers: int, steps: int, fused: bool) -> tuple[torch.Tensor, float]:
    """Trains a model. Returns all weights and the seconds that the optimizer took."""
    torch.manual_seed(0)
    parts = [part for _ in range(layers) for part in (torch.nn.Linear(8, 8), torch.nn.Tanh())]
    model = torch.nn.Sequential(*parts, torch.nn.Linear(8, 1))
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.01)
    if fused:
        fuse_optimizer(optimizer)
    model = bagua.with_bagua(model, [optimizer], "gradient_allreduce")
    step = optimizer.fuse_step if fused else optimizer.step
    spent = 0.0
    draw = torch.Generator().manual_seed(1 + bagua.get_rank())
    for _ in range(steps):
        x = torch.randn(16, 8, generator=draw)
        optimizer.zero_grad()
        (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
        begun = time.perf_counter()
        step()
        spent += time.perf_counter() - begun
    return torch.cat([param.detach().flatten() for param in model.parameters()]), spent


def main() -> None:
    """Trains with plain and with fused steps, and compares the weights and times."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=40)
    parser.add_argument("--steps", type=int, default=30)
    chosen = parser.parse_args()
    bagua.init_process_group()
    plain, plain_s = train(chosen.layers, chosen.steps, fused=False)
    fused, fused_s = train(chosen.layers, chosen.steps, fused=True)
    assert torch.equal(plain, fused), "a fused step is the optimizer's own"
    if bagua.get_rank() == 0:
        each = 1000 / chosen.steps
        print(
            f"{2 * chosen.layers + 2} parameters: {plain_s * each:.2f} ms a plain step, {fused_s * each:.2f} ms fused"
        )
        print("the weights are equal bit for bit")
    bagua.destroy_process_group()


if __name__ == "__main__":
    main()
