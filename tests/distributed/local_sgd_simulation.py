"""All ranks of local_sgd and diloco in one process: plain torch, and the formulas of the papers."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch

import bagua.torch_api as bagua
from tests.distributed.torch_ranks import hosts

#: Bytes: several buckets in the models of this file.
SMALL = 64


def net(dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.Tanh(), torch.nn.Linear(4, 3)).to(dtype)


def sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def data(rank: int, step: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * rank + step)
    return torch.randn(6, 5, generator=generator).to(dtype)


def local_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()


def rounds(model: Any) -> int:
    """How many rounds there were."""
    counts = {bucket.backend_bucket.step for bucket in model.bagua_buckets}
    assert len(counts) == 1
    return int(counts.pop())


def mean_of(values: Sequence[torch.Tensor]) -> torch.Tensor:
    """Returns the mean as the core computes it: inside hosts first, in rank order, in float32, divided once."""
    added = []
    for host in hosts():
        total = values[host[0]].float()
        for rank in host[1:]:
            total = total + values[rank].float()
        added.append(total)
    total = added[0]
    for other in added[1:]:
        total = total + other
    return (total / len(values)).to(values[0].dtype)


class Simulation:
    """The models, optimizers, anchors and outer momenta of all ranks."""

    def __init__(
        self, model: torch.nn.Module, make_optimizer: Callable[[torch.nn.Module], torch.optim.Optimizer] = sgd
    ) -> None:
        self.models = [copy.deepcopy(model) for _ in range(bagua.get_world_size())]
        self.optimizers = [make_optimizer(each) for each in self.models]
        self.anchors = {name: param.detach().clone() for name, param in model.named_parameters()}
        self.momenta = {name: torch.zeros_like(param, dtype=torch.float32) for name, param in self.anchors.items()}

    def train(self, step: int, idle: Sequence[int] = (), dtype: torch.dtype = torch.float32) -> None:
        """A local step of every rank that is not idle."""
        for rank, (model, optimizer) in enumerate(zip(self.models, self.optimizers, strict=True)):
            if rank not in idle:
                local_step(model, optimizer, data(rank, step, dtype))

    def average(self) -> None:
        """Every rank gets the mean of all weights, as one would write it down."""
        for params in zip(*(model.parameters() for model in self.models), strict=True):
            mean = torch.stack([param.detach() for param in params]).mean(dim=0)
            for param in params:
                param.data.copy_(mean)

    def differences(self) -> dict[str, list[torch.Tensor]]:
        return {
            name: [anchor - model.get_parameter(name).detach() for model in self.models]
            for name, anchor in self.anchors.items()
        }

    def move(self, means: dict[str, torch.Tensor], lr: float, momentum: float, nesterov: bool) -> None:
        for name, mean in means.items():
            wide = mean.float()
            b = self.momenta[name] = momentum * self.momenta[name] + wide
            moved = self.anchors[name].float() - lr * (wide + momentum * b if nesterov else b)
            self.anchors[name] = moved.to(mean.dtype)
            for model in self.models:
                with torch.no_grad():
                    model.get_parameter(name).copy_(self.anchors[name])

    def round(self, lr: float = 1.0, momentum: float = 0.0, nesterov: bool = False) -> None:
        self.move({name: mean_of(each) for name, each in self.differences().items()}, lr, momentum, nesterov)


def equal(model: torch.nn.Module, expected: torch.nn.Module) -> bool:
    pairs = zip(model.parameters(), expected.parameters(), strict=True)
    return all(torch.equal(mine, theirs) for mine, theirs in pairs)


def close(model: torch.nn.Module, expected: torch.nn.Module) -> None:
    for mine, theirs in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-6)
