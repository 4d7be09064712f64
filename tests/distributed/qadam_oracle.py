"""qadam's training of all ranks in one process: plain torch, and the codecs' oracle for what is compressed."""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

import bagua.torch_api as bagua_torch
from bagua.torch_api.algorithms.q_adam import QAdamAlgorithm, QAdamOptimizer
from tests.distributed.compressed_oracle import CompressedAllReduce, Values
from tests.distributed.torch_ranks import hosts, same_everywhere

W = 3
LR, BETAS, EPS, DECAY = 0.01, (0.9, 0.99), 1e-8, 0.1


def net() -> torch.nn.Module:
    torch.manual_seed(5)
    return torch.nn.Sequential(torch.nn.Linear(4, 7), torch.nn.Tanh(), torch.nn.Linear(7, 3))


def param_groups(model: torch.nn.Module) -> list[dict[str, Any]]:
    """Weights with, biases without weight decay, and with another beta1."""
    params = list(model.parameters())
    return [
        {"params": [param for param in params if param.dim() > 1], "weight_decay": DECAY},
        {"params": [param for param in params if param.dim() == 1], "betas": (0.7, BETAS[1])},
    ]


def q_adam(model: torch.nn.Module, **options: Any) -> QAdamOptimizer:
    options = {"lr": LR, "betas": BETAS, "eps": EPS, "warmup_steps": W} | options
    return QAdamOptimizer(param_groups(model), **options)


def wrapped(
    model: torch.nn.Module,
    optimizer: QAdamOptimizer | None = None,
    *,
    compression: Any = None,
    hierarchical: bool = True,
    **options: Any,
) -> QAdamOptimizer:
    optimizer = optimizer or q_adam(model)
    algorithm = QAdamAlgorithm(optimizer, hierarchical, compression=compression)
    model.with_bagua([optimizer], algorithm, **options)
    return optimizer


def batch(rank: int, step: int) -> torch.Tensor:
    return torch.randn(6, 4, generator=torch.Generator().manual_seed(1000 * step + rank))


def loss_of(model: torch.nn.Module, rank: int, step: int) -> torch.Tensor:
    return model(batch(rank, step)).square().mean()


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, bagua_torch.get_rank(), step).backward()
        optimizer.step()


class AllRanks:
    """The training of all ranks, on this one. ``codec`` is None or a name; by host where ``hierarchical``."""

    def __init__(self, model: torch.nn.Module, codec: str | None = None, hierarchical: bool = True) -> None:
        self.model = copy.deepcopy(model)
        self.size = bagua_torch.get_world_size()
        self.hosts = hosts()
        self.adam = torch.optim.Adam(param_groups(self.model), lr=LR, betas=BETAS, eps=EPS, foreach=False)
        self.members = self.hosts if hierarchical else [[rank] for rank in range(self.size)]
        self.oracle = None
        if codec is not None and len(self.members) > 1:
            self.oracle = CompressedAllReduce(codec, {}, len(self.members), self.size, average=True)
        self.t = 0

    def gradients(self, rank: int, steps: Sequence[int]) -> list[torch.Tensor]:
        """Returns the gradients of one rank, accumulated over the batches of ``steps``."""
        self.adam.zero_grad()
        for step in steps:
            loss_of(self.model, rank, step).backward()
        return [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in self.model.parameters()]

    def sum(self, of_rank: Sequence[Values]) -> Values:
        """Inside hosts first, as where several hosts have several ranks."""
        return _added([_added([of_rank[rank] for rank in host]) for host in self.hosts])

    def step(self, *steps: int) -> None:
        """One step with the gradients of one or several batches."""
        self.advance([self.gradients(rank, steps) for rank in range(self.size)])

    def advance(self, of_rank: list[list[torch.Tensor]]) -> None:
        self.t += 1
        params = list(self.model.parameters())
        if self.t <= W:
            for number, param in enumerate(params):
                total = self.sum([grads[number].numpy() for grads in of_rank])
                param.grad = torch.from_numpy(total / np.float32(self.size))
            self.adam.step()
            return
        candidates = []
        for grads in of_rank:
            parts = []
            for param, grad in zip(params, grads, strict=True):
                group = self.group(param)
                decayed = grad + group["weight_decay"] * param.detach() if group["weight_decay"] else grad
                parts.append(torch.lerp(self.adam.state[param]["exp_avg"], decayed, 1 - group["betas"][0]).flatten())
            candidates.append(torch.cat(parts[::-1]).numpy())
        average = torch.from_numpy(self.mean(candidates))
        for param in params[::-1]:
            group, state = self.group(param), self.adam.state[param]
            m, average = average[: param.numel()].reshape(param.shape), average[param.numel() :]
            state["exp_avg"].copy_(m)
            v = state["exp_avg_sq"] / (1 - BETAS[1] ** W)
            size = LR / (1 - group["betas"][0] ** self.t)
            with torch.no_grad():
                param -= size * m / (v.sqrt() + EPS)

    def mean(self, candidates: list[Values]) -> Values:
        """Through the codec between the members."""
        if self.oracle is None:
            return self.sum(candidates) / np.float32(self.size)
        sums = [_added([candidates[rank] for rank in member]) for member in self.members]
        return self.oracle.step(sums, padding=-len(sums[0]) % self.size)

    def group(self, param: torch.Tensor) -> dict[str, Any]:
        return next(g for g in self.adam.param_groups if any(param is p for p in g["params"]))

    def moment(self, name: str) -> torch.Tensor:
        moment: torch.Tensor = self.adam.state[dict(self.model.named_parameters())[name]]["exp_avg"]
        return moment


def _added(values: Sequence[Values]) -> Values:
    return functools.reduce(np.add, values)


def assert_equal_models(model: torch.nn.Module, expected: AllRanks, what: str, tolerance: float = 1e-6) -> None:
    for (name, mine), theirs in zip(model.named_parameters(), expected.model.parameters(), strict=True):
        torch.testing.assert_close(
            mine.detach(), theirs.detach(), rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{what} {n}: {m}"
        )
    assert same_everywhere(*model.parameters()), what
