"""The models of the table of trainings: each has something that is easy to communicate wrongly."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


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


def branching() -> nn.Module:
    return Net(branches=True)


class Buffered(nn.Module):
    """A model with buffers that differ between ranks at first. One buffer is a new tensor in each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)
        self.mean: torch.Tensor
        self.register_buffer("mean", torch.randn(8))
        self.register_buffer("seen", torch.randint(0, 100, (3,)))
        self.register_buffer("flag", torch.rand(2) > 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.layer(x))
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        self.seen += len(x)
        found: torch.Tensor = x + self.mean
        return found


class ChosenLayers(nn.Module):
    """Three layers, of which a forward uses those that its arguments name."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.left, self.right, self.never = (nn.Linear(inputs, outputs) for _ in range(3))

    def forward(self, x: torch.Tensor, *names: str) -> torch.Tensor:
        zeros = x.new_zeros(len(x), self.left.out_features)
        return sum((getattr(self, name)(x) for name in names), zeros)


class Branches(nn.Module):
    """Two layers, of which each rank takes one by its own number, and one that no rank takes."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = True
        self.left, self.right, self.never = nn.Linear(8, 2), nn.Linear(8, 2), nn.Linear(8, 2)

    def forward(self, x: torch.Tensor, step: int) -> torch.Tensor:
        return self.left(x) if step % 2 else self.right(x)


class Structured(nn.Module):
    """Returns tensors of which the loss takes some."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other, self.third = nn.Linear(8, 4), nn.Linear(8, 4), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        return {"used": self.one(x), "rest": (self.other(x), self.third(x))}


class Checkpointed(nn.Module):
    """One layer in two re-entrant checkpoints, and one that is used elsewhere."""

    def __init__(self, reentrant: bool, twice: bool) -> None:
        super().__init__()
        self.first, self.layer, self.unused = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(3, 3)
        self.reentrant, self.twice = reentrant, twice

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = checkpoint(self.layer, self.first(x), use_reentrant=self.reentrant)
        if self.twice:
            x = checkpoint(self.layer, x, use_reentrant=self.reentrant)
        return x


class Mixed(nn.Module):
    """Parameters of several dtypes, of no dimension and of no element."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(8, 8).double()
        self.narrow = nn.Linear(8, 8).bfloat16()
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.none = nn.Parameter(torch.ones(0, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        narrow = self.narrow(x.bfloat16()).float()
        return self.scale * (self.wide(x.double()).float() + narrow) + self.none.sum()


class Odd(nn.Module):
    """Parameters of no dimension and of no element."""

    def __init__(self) -> None:
        super().__init__()
        self.scalar, self.nothing = nn.Parameter(torch.tensor(2.0)), nn.Parameter(torch.empty(0, 3))
        self.no_more = nn.Parameter(torch.empty(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scalar * x.sum() + self.nothing.sum() + self.no_more.sum()


class Complex(nn.Module):
    """Complex layers, and a factor that is used as its conjugate too, so that its gradient may be lazy."""

    def __init__(self, dtype: torch.dtype = torch.complex64) -> None:
        super().__init__()
        self.first = nn.Linear(8, 4, dtype=dtype)
        self.factor = nn.Parameter(torch.randn(4, dtype=dtype))
        self.last = nn.Linear(4, 3, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.last(self.first(x.to(self.factor.dtype)) * self.factor.conj())
        return y.abs()


def in_channels_last() -> nn.Module:
    return nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 3)).to(memory_format=torch.channels_last)


def table() -> nn.Module:
    return nn.Sequential(nn.Embedding(20, 4, sparse=True), nn.Linear(4, 2))


def partly_ignored() -> nn.Module:
    net = Net()
    net._ddp_params_and_buffers_to_ignore = ["one.weight", "body.1.running_mean"]
    net.other.requires_grad_(False)
    return net


class Tied(nn.Module):
    """Two layers with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(8, 8), nn.Linear(8, 8)
        self.other.weight = self.one.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.other(torch.relu(self.one(x)))


class Breaks(torch.autograd.Function):
    """A function whose backward raises."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        raise ArithmeticError("broken off")
