"""One training by torch's DistributedDataParallel on gloo and by ours, from the same beginning, compared bit by bit."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as Torchs

from bagua.torch_api.data_parallel import DistributedDataParallel

STEPS = 4


class Net(nn.Module):
    """Layers of several sizes, a normalisation with buffers, and a branch that only some samples take."""

    def __init__(self, branches: bool = False) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 8))
        self.one, self.other, self.never = nn.Linear(8, 4), nn.Linear(8, 4), nn.Linear(2, 2)
        self.branches = branches

    def forward(self, x: torch.Tensor, step: int = 0) -> torch.Tensor:
        x = self.body(x)
        if not self.branches:
            return self.one(x) + self.other(x) + self.never.weight.sum() + self.never.bias.sum()
        return self.one(x) if step % 2 else self.other(x)


#: By name.
Found = dict[str, torch.Tensor | None]
#: (model, optimizer, loss of a forward, number) of one iteration.
Step = Callable[[Any, torch.optim.Optimizer, Callable[[], torch.Tensor], int], None]


def plain(model: Any, optimizer: torch.optim.Optimizer, loss: Callable[[], torch.Tensor], number: int) -> None:
    optimizer.zero_grad()
    loss().backward()
    optimizer.step()


def trained(
    wrapper: Any,
    rank: int,
    *,
    make: Callable[[], nn.Module] = Net,
    step: Step = plain,
    prepare: Callable[[Any], None] | None = None,
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.Adam,
    uneven: dict[str, Any] | None = None,
    samples: Callable[[], torch.Tensor] = lambda: torch.randn(6, 8),
    steps: int = STEPS,
    with_grads: bool = True,
    **options: Any,
) -> Found:
    """Weights, buffers and gradients of this rank after some steps."""
    torch.manual_seed(5 + rank)
    module = make()
    if wrapper is Torchs:
        options = {"gradient_as_bucket_view": True, **options}
    model = wrapper(module, **options)
    if prepare is not None:
        prepare(model)
    chosen = optimizer([param for param in model.parameters() if param.requires_grad], lr=0.01)
    with contextlib.nullcontext() if uneven is None else model.join(**uneven):
        for number in range(steps + (rank if uneven is not None else 0)):
            x = samples()
            shift = number + rank
            takes_step = "branches" in vars(module)

            def loss(x: torch.Tensor = x, shift: int = shift, takes_step: bool = takes_step) -> torch.Tensor:
                made: torch.Tensor = model(x, shift) if takes_step else model(x)
                return made.square().mean()

            step(model, chosen, loss, number)
    found: Found = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    grads = {f"grad of {name}": param.grad for name, param in model.named_parameters() if with_grads}
    return {**found, **{name: None if grad is None else grad.clone() for name, grad in grads.items()}}


def same(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    """Bitwise, None equal to None."""
    if one is None or other is None:
        return one is other
    if one.is_sparse and other.is_sparse:
        one, other = one.to_dense(), other.to_dense()
    return one.dtype == other.dtype and torch.equal(one, other)


def as_torch(rank: int, **options: Any) -> None:
    """The same training by both ends with the same bits."""
    expected = trained(Torchs, rank, **options)
    found = trained(DistributedDataParallel, rank, **options)
    agree(found, expected)


def agree(found: Found, expected: Found) -> None:
    """Both are equal, bit for bit, on every rank."""
    assert list(found) == list(expected)
    differ = [name for name in found if not same(found[name], expected[name])]
    # All ranks fail together: one that waited for the next case would time out.
    everybody: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, differ)
    assert not any(everybody), everybody
