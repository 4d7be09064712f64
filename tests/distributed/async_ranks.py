"""Helpers for tests of asynchronous averaging: models whose gradients do not depend on the weights, and waits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import bagua.torch_api as bagua
from bagua.torch_api.algorithms.async_model_average import AsyncModelAverageAlgorithm
from tests import waits
from tests.distributed.torch_ranks import Layout

#: Milliseconds: many rounds in a short test; and none without a request.
SHORT, NEVER = 2.0, 3.6e6

#: The last one has a rank on each of three hosts, so that rounds go over TCP.
LAYOUTS: tuple[Layout, ...] = (2, 3, 4, "2+1", "1+1+1")


class Slopes(torch.nn.Module):
    """A model that is linear in its weights, so that every step has the same direction for any weights."""

    def __init__(self, *dtypes: torch.dtype, count: int = 37) -> None:
        super().__init__()
        for number, dtype in enumerate(dtypes or (torch.float32,)):
            values = torch.arange(count, dtype=torch.float64).sub(count // 2).div(16)
            self.register_parameter(f"weight{number}", torch.nn.Parameter(values.to(dtype)))

    def forward(self, slope: float) -> torch.Tensor:
        total = torch.zeros((), dtype=torch.float64)
        for param in self.parameters():
            total = total + (param * slope).sum().to(torch.float64)
        return total


def wrapped(
    *dtypes: torch.dtype, interval: float = SHORT, lr: float = 2**-6, momentum: float = 0.0, **options: Any
) -> tuple[torch.nn.Module, torch.optim.Optimizer, Any]:
    """A model that is averaged, its optimizer and its algorithm."""
    model = Slopes(*dtypes)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum)
    model.with_bagua([optimizer], AsyncModelAverageAlgorithm(sync_interval_ms=interval, **options))
    return model, optimizer, model.bagua_algorithm


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, slope: float) -> None:
    """One step of training."""
    optimizer.zero_grad()
    model(slope).backward()
    optimizer.step()


def values(model: torch.nn.Module) -> list[torch.Tensor]:
    """Copies of the weights between two rounds."""
    with model.bagua_algorithm.lock(model):
        return [param.detach().clone() for param in model.parameters()]


def fill(model: torch.nn.Module, value: float) -> None:
    """Sets all weights between two rounds."""
    with model.bagua_algorithm.lock(model), torch.no_grad():
        for param in model.parameters():
            param.fill_(value)


def fill_together(model: torch.nn.Module, value: float) -> None:
    """Sets all weights on all ranks while no round is running: one with snapshots from before and after would mix in
    old weights.
    """
    impl = model.bagua_algorithm
    takes_part = impl.stats()["state"] == "running"
    impl.abort(model)
    bagua.barrier()
    fill(model, value)
    bagua.barrier()
    if takes_part:
        impl.resume(model)


def all_are(model: torch.nn.Module, value: float) -> bool:
    """True if every weight has this value."""
    return all(bool((part == value).all()) for part in values(model))


def until(what: str, done: Callable[[], bool], seconds: float = 30.0) -> None:
    """Returns when it is so; AssertionError after the deadline."""
    waits.until(done, what, seconds)


def rounds(model: torch.nn.Module) -> int:
    found: int = model.bagua_algorithm.stats()["rounds"]
    return found


def rounds_pass(model: torch.nn.Module, count: int = 2, seconds: float = 30.0) -> None:
    """Returns after as many more rounds; of two, one began later than this call."""
    last = rounds(model) + count
    until(f"round {last}", lambda: rounds(model) >= last, seconds)


def rest(model: torch.nn.Module) -> list[torch.Tensor]:
    """The weights when all ranks have rested for some rounds: the mean of equal floats is not always their value, but
    that of such a mean is.
    """
    bagua.barrier()
    rounds_pass(model, 5)
    bagua.barrier()
    return values(model)


def gathered(*numbers: float) -> list[list[float]]:
    """Each rank's numbers."""
    mine = torch.tensor(numbers, dtype=torch.float64)
    everybody = torch.empty(bagua.get_world_size() * len(numbers), dtype=torch.float64)
    bagua.allgather(mine, everybody)
    return everybody.view(-1, len(numbers)).tolist()


def same_bits(*tensors: torch.Tensor) -> bool:
    """True on every rank if the tensors are equal to the bit on all, signs of zeros included."""
    mine = [tensor.detach().reshape(-1).view(torch.uint8).tolist() for tensor in tensors]
    differs = torch.tensor([int(mine != bagua.broadcast_object(mine))], dtype=torch.int32)
    bagua.allreduce_inplace(differs, bagua.ReduceOp.MAX)
    return differs.item() == 0
