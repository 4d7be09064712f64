"""One world of ranks per size for all tests of aggregation, and what their cases have in common.

The oracle is float64 and knows every rank's tensors: they are made from the rank and a number, so that each rank can
make those of the others.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

import torch

import bagua.torch_api as bagua
from bagua.aggregation.backends import BaguaPeers, Group, find
from tests.distributed import torch_ranks
from tests.distributed.torch_ranks import Case

MODULES = ["all_reduce", "power", "sparsified", "memory", "decentralized", "peers", "optim"]


def everything(rank: int) -> dict[str, str]:
    """Runs the cases of all modules on this rank."""
    cases: list[Case] = []
    for module in MODULES:
        cases += importlib.import_module(f"tests.distributed.test_aggregation_{module}").CASES
    return torch_ranks.run_cases(rank, cases)


def each_case(cases: Sequence[Case]) -> Callable[..., None]:
    """The test of a module: each case in the worlds of one to four ranks."""
    return torch_ranks.each_case(cases, 1, 2, 3, 4, run=everything)


def groups() -> list[Group]:
    """Every argument that names all ranks."""
    return [None, "torch"]


def numbers(rank: int, shape: tuple[int, ...], seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A rank's tensor, the same on whichever rank it is made."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


class Several(torch.nn.Module):
    """Parameters of the given shapes, with given dtypes in turn."""

    def __init__(self, *shapes: tuple[int, ...], dtypes: tuple[torch.dtype, ...] = (torch.float32,)) -> None:
        super().__init__()
        self.list = torch.nn.ParameterList(
            torch.nn.Parameter(torch.ones(shape, dtype=dtypes[index % len(dtypes)]))
            for index, shape in enumerate(shapes)
        )


SHAPES = ((6, 8), (5,), (), (4, 3, 2, 2), (0,), (3, 9))


def fill(model: torch.nn.Module, rank: int, seed: int = 0, *, gradients: bool = True) -> None:
    """Gives the parameters this rank's gradients, or values."""
    for index, parameter in enumerate(model.parameters()):
        value = numbers(rank, tuple(parameter.shape), 100 * seed + index, parameter.dtype)
        if gradients:
            parameter.grad = value
        else:
            parameter.detach().copy_(value)


def inputs(model: torch.nn.Module, size: int, seed: int = 0) -> list[torch.Tensor]:
    """For each parameter what all ranks were filled with, in float64: [size, *shape]."""
    return [
        torch.stack([numbers(r, tuple(p.shape), 100 * seed + index, p.dtype).to(torch.float64) for r in range(size)])
        for index, p in enumerate(model.parameters())
    ]


def gradients(model: torch.nn.Module) -> list[torch.Tensor]:
    """All gradients, which must be there."""
    found = []
    for parameter in model.parameters():
        assert parameter.grad is not None
        found.append(parameter.grad)
    return found


def assert_is_mean(result: torch.Tensor, everybody: torch.Tensor) -> None:
    """A1's bound: world size times machine epsilon times the mean magnitude, element by element."""
    size = everybody.shape[0]
    bound = size * torch.finfo(result.dtype).eps * everybody.abs().mean(0)
    assert bool(((result.to(torch.float64) - everybody.mean(0)).abs() <= bound).all())


def assert_close(result: torch.Tensor | None, expected: torch.Tensor, rtol: float = 1e-6, atol: float = 1e-5) -> None:
    """Does what ``torch.testing.assert_close`` does, whose import takes each rank seconds."""
    assert result is not None
    assert result.shape == expected.shape
    assert bool(((result - expected).abs() <= atol + rtol * expected.abs()).all()), (result, expected)


def collectives(action: Callable[[], Any]) -> dict[str, int]:
    """How many operations of each kind the engine's world did meanwhile."""
    before = _operations("calls")
    action()
    return {
        kind: count - before.get(kind, 0) for kind, count in _operations("calls").items() if count > before.get(kind, 0)
    }


def payload(action: Callable[[], Any], kind: str) -> int:
    """How many bytes of tensors operations of this kind carried meanwhile."""
    before = _operations("payload_bytes").get(kind, 0)
    action()
    return _operations("payload_bytes").get(kind, 0) - before


def _operations(counter: str) -> dict[str, int]:
    peers = find()
    assert isinstance(peers, BaguaPeers)
    operations: dict[str, dict[str, int]] = (
        bagua.communication._get_default_group().get_global_communicator().group.stats()["ops"]
    )
    return {kind: counts[counter] for kind, counts in operations.items()}


def everybodys(tensor: torch.Tensor) -> torch.Tensor:
    """All ranks' tensors of one shape: [size, *shape]."""
    peers = find()
    return peers.all_gather(tensor.detach().contiguous().reshape(-1)).view(peers.size, *tensor.shape)


def mean_of_ranks(tensor: torch.Tensor) -> torch.Tensor:
    """The float64 mean of all ranks' tensors of one shape."""
    return everybodys(tensor).double().mean(0)
