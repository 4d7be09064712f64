"""Options that differ between ranks: each algorithm says so on every rank, and the group goes on."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch

import bagua as neutral
import bagua.torch_api as bagua
from bagua.errors import MismatchError
from bagua.torch_api.algorithms import (
    Algorithm,
    AsyncModelAverageAlgorithm,
    ByteGradAlgorithm,
    DecentralizedAlgorithm,
    DiLoCoAlgorithm,
    GlobalAlgorithmRegistry,
    GradientAllReduceAlgorithm,
    LocalSGDAlgorithm,
    LowPrecisionDecentralizedAlgorithm,
    PowerSGDAlgorithm,
    QAdamAlgorithm,
    QAdamOptimizer,
)
from tests.distributed.torch_ranks import cases_in, each_case


class Row(NamedTuple):
    """The algorithm and its options on the last rank (`other`), and on the others."""

    kind: type[Algorithm]
    one: dict[str, Any]
    other: dict[str, Any]
    #: Where that is another algorithm.
    other_kind: type[Algorithm] | None = None

    def said(self) -> list[str]:
        """Returns the texts that the error must contain."""
        kinds = [] if self.other_kind is None else [self.kind, self.other_kind]
        names = [name for name, each in GlobalAlgorithmRegistry.items() if each["algorithm"] in kinds]
        assert len(names) == len(kinds)
        return [*(f"{name}(" for name in names), *map(shown, [*self.one.items(), *self.other.items()])]


def shown(option: tuple[str, Any]) -> str:
    name, value = option
    codec = name == "compression" and isinstance(value, str) and value != "auto"
    return f"{name}={neutral.Codec(value) if codec else value!r}"


def top_k(k: float) -> neutral.Codec:
    return neutral.Codec("top_k", k=k)


ROWS = (
    Row(GradientAllReduceAlgorithm, {}, {}, ByteGradAlgorithm),
    Row(ByteGradAlgorithm, {"average": True}, {"average": False}),
    Row(ByteGradAlgorithm, {"error_feedback": False}, {"error_feedback": True}),
    Row(ByteGradAlgorithm, {"compression": top_k(0.1)}, {"compression": top_k(0.2)}),
    Row(ByteGradAlgorithm, {"compression": "auto"}, {"compression": "minmax_u8"}),
    Row(DecentralizedAlgorithm, {"hierarchical": True}, {"hierarchical": False}),
    Row(DecentralizedAlgorithm, {"peer_selection_mode": "all"}, {"peer_selection_mode": "ring"}),
    Row(DecentralizedAlgorithm, {"communication_interval": 1}, {"communication_interval": 2}),
    Row(LowPrecisionDecentralizedAlgorithm, {"hierarchical": True}, {"hierarchical": False}),
    Row(LowPrecisionDecentralizedAlgorithm, {"communication_interval": 1}, {"communication_interval": 2}),
    Row(LowPrecisionDecentralizedAlgorithm, {"compression": "f16"}, {"compression": "bf16"}),
    Row(LowPrecisionDecentralizedAlgorithm, {"compression": top_k(0.1)}, {"compression": top_k(0.2)}),
    Row(PowerSGDAlgorithm, {"rank": 4}, {"rank": 2}),
    Row(PowerSGDAlgorithm, {"warm_start": True}, {"warm_start": False}),
    Row(PowerSGDAlgorithm, {"seed": 1}, {"seed": 0}),
    Row(PowerSGDAlgorithm, {"min_compression": 2.0}, {"min_compression": 3.0}),
    Row(QAdamAlgorithm, {"warmup_steps": 2}, {"warmup_steps": 3}),
    Row(QAdamAlgorithm, {"legacy": False}, {"legacy": True}),
    Row(QAdamAlgorithm, {"hierarchical": True}, {"hierarchical": False}),
    Row(QAdamAlgorithm, {"compression": "f16"}, {"compression": "bf16"}),
    Row(LocalSGDAlgorithm, {}, {}, DiLoCoAlgorithm),
    Row(LocalSGDAlgorithm, {"communication_interval": 8}, {"communication_interval": 9}),
    Row(DiLoCoAlgorithm, {"outer_lr": 0.7}, {"outer_lr": 0.8}),
    Row(DiLoCoAlgorithm, {"nesterov": True}, {"nesterov": False}),
    Row(AsyncModelAverageAlgorithm, {"sync_interval_ms": 500}, {"sync_interval_ms": 100}),
    Row(AsyncModelAverageAlgorithm, {"warmup_steps": 0}, {"warmup_steps": 3}),
    Row(AsyncModelAverageAlgorithm, {"compression": None}, {"compression": "bf16"}),
)


def net() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 4))


def wrap(model: torch.nn.Module, kind: Any, options: dict[str, Any]) -> torch.optim.Optimizer:
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    if kind is QAdamAlgorithm:
        own = {name: value for name, value in options.items() if name in ("warmup_steps", "legacy")}
        optimizer = QAdamOptimizer(model.parameters(), **own)
        algorithm = kind(optimizer, **{name: value for name, value in options.items() if name not in own})
    else:
        algorithm = kind(**options)
    model.with_bagua([optimizer], algorithm)
    return optimizer


def options_that_differ_are_said_on_every_rank_and_the_group_goes_on(rank: int) -> None:
    last = bagua.get_world_size() - 1
    for row in ROWS:
        model = net()
        kind, options = (row.other_kind or row.kind, row.other) if rank == last else (row.kind, row.one)
        with pytest.raises(MismatchError) as caught:
            wrap(model, kind, options)
        assert f"rank {last} has" in str(caught.value)
        for words in row.said():
            assert words in str(caught.value), row
        optimizer = wrap(model, row.kind, row.one)
        model(torch.ones(2, 5) * rank).square().mean().backward()
        optimizer.step()


CASES = cases_in(globals())

test = each_case(CASES, 2, 3, "2+2", "2+1", timeout=60)
