"""The bytes that algorithms send from host to host, against those of gradient_allreduce."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch

import bagua
import bagua.torch_api as bagua_torch
from bagua.torch_api.algorithms import (
    Algorithm,
    ByteGradAlgorithm,
    GradientAllReduceAlgorithm,
    LocalSGDAlgorithm,
    PowerSGDAlgorithm,
    QAdamAlgorithm,
    QAdamOptimizer,
)
from tests.distributed.torch_ranks import ENVIRONMENT
from tests.world import make_world


def sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01)


def large() -> torch.nn.Module:
    """10 MiB of float32."""
    return torch.nn.Linear(2560, 1024, bias=False)


def layers(few: int, many: int) -> Callable[[], torch.nn.Module]:
    return lambda: torch.nn.Sequential(torch.nn.Linear(few, many), torch.nn.ReLU(), torch.nn.Linear(many, few))


class Row(NamedTuple):
    """An algorithm, and the least and the largest part of gradient_allreduce's bytes that it sends."""

    model: Callable[[], torch.nn.Module]
    algorithm: Callable[[Any], Algorithm]
    least: float
    largest: float
    steps: int = 1
    #: Steps that come before.
    before: int = 0
    optimizer: Callable[[torch.nn.Module], torch.optim.Optimizer] = sgd


ROWS = {
    "minmax_u8": Row(large, lambda _: ByteGradAlgorithm(), 0.24, 0.26),
    "top_k": Row(large, lambda _: ByteGradAlgorithm(compression=bagua.Codec("top_k", k=0.01)), 0.019, 0.021),
    "onebit": Row(large, lambda _: ByteGradAlgorithm(compression="onebit", error_feedback=True), 0.03, 0.04),
    "powersgd of rank 4": Row(layers(256, 512), lambda _: PowerSGDAlgorithm(4), 0.0, 0.05, steps=5),
    "qadam after its warm-up": Row(
        layers(64, 256),
        lambda optimizer: QAdamAlgorithm(optimizer),
        0.0,
        0.3,
        steps=5,
        before=3,
        optimizer=lambda model: QAdamOptimizer(model.parameters(), warmup_steps=2, eps=1e-3),
    ),
}


def sent() -> int:
    """Bytes that this rank has sent to other hosts, headers included."""
    groups = bagua.stats()["groups"].values()
    return sum(counts["wire_bytes_sent"] for group in groups for counts in group["ops"].values())


def sent_in_each_step(row: Row, algorithm: Callable[[Any], Algorithm]) -> list[int]:
    torch.manual_seed(1)
    model = row.model()
    optimizer = row.optimizer(model)
    model.with_bagua([optimizer], algorithm(optimizer), bucket_size=10 << 20)
    features = next(model.parameters()).shape[1]
    found = []
    for _ in range(row.before + row.steps):
        before = sent()
        optimizer.zero_grad()
        model(torch.randn(8, features)).square().mean().backward()
        optimizer.step()
        found.append(sent() - before)
    return found


def of_every_row(rank: int) -> dict[str, tuple[int, int, int]]:
    """By row the bytes of the gradients in its steps, and what is sent: by gradient_allreduce, and by the algorithm."""
    torch.set_num_threads(1)
    bagua_torch.init_process_group()
    found = {}
    for name, row in ROWS.items():
        plain, compressed = (
            sum(sent_in_each_step(row, algorithm)[row.before :])
            for algorithm in (lambda _: GradientAllReduceAlgorithm(), row.algorithm)
        )
        size = sum(param.nbytes for param in row.model().parameters() if param.dim() == 2)
        found[name] = size * row.steps, plain, compressed
    bagua_torch.destroy_process_group()
    return found


@pytest.fixture(scope="module")
def both() -> list[dict[str, tuple[int, int, int]]]:
    """Returns the results of two ranks on two hosts, which run all rows in one world."""
    found: list[dict[str, tuple[int, int, int]]] = make_world(2, hosts=[[0], [1]], env=ENVIRONMENT, timeout=120.0).run(
        of_every_row
    )
    return found


@pytest.mark.parametrize("name", ROWS)
def test_an_algorithm_sends_fewer_bytes_between_hosts(both: list[dict[str, tuple[int, int, int]]], name: str) -> None:
    for found in both:
        size, plain, compressed = found[name]
        assert plain >= size
        assert max(1, ROWS[name].least * plain) < compressed <= ROWS[name].largest * plain


def of_local_sgd(rank: int) -> list[int]:
    torch.set_num_threads(1)
    bagua_torch.init_process_group()
    with_buffers = Row(
        lambda: torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 3)),
        lambda _: LocalSGDAlgorithm(4), 0.0, 0.0, steps=8,
    )  # fmt: skip
    found = sent_in_each_step(with_buffers, with_buffers.algorithm)
    bagua_torch.destroy_process_group()
    return found


def test_nothing_is_sent_between_rounds() -> None:
    for found in make_world(2, hosts=[[0], [1]]).run(of_local_sgd):
        assert [count > 0 for count in found] == [False, False, False, True] * 2
