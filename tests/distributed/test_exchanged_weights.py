"""Behaviour of the algorithms that exchange weights in every step. Each algorithm is a row with its simulation."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch

import bagua as neutral
import bagua.torch_api as bagua
from bagua.torch_api.algorithms import (
    Algorithm,
    DecentralizedAlgorithm,
    LowPrecisionDecentralizedAlgorithm,
)
from bagua.torch_api.algorithms.decentralized import PEER_SELECTION_MODES
from tests.distributed.torch_ranks import HOSTED, cases_in, each_case, hosts
from tests.distributed.weights_oracle import (
    Decentralized,
    LowPrecision,
    Net,
    Ranks,
    assert_equals,
    batch,
    loss,
    made_on_rank_0,
    sgd,
    train,
    wrapped,
)


class Row(NamedTuple):
    """An algorithm, and what simulates it on so many ranks."""

    name: str
    algorithm: Callable[[], Algorithm]
    simulate: Callable[[Net, int], Ranks]
    net: Callable[[], Net]
    #: Otherwise the exchange is during forward and backward.
    after_optimizers: bool = False


def low_precision(model: Net, size: int) -> Ranks:
    names = [name for name, param in model.named_parameters() if param.requires_grad]
    return LowPrecision(model, size, neutral.Codec("minmax_u8"), [names[::-1]])


ROWS = [
    Row(
        "decentralized",
        lambda: DecentralizedAlgorithm(False),
        # An all_reduce adds up inside hosts first.
        lambda model, size: Decentralized(model, size, "all", hosts() if size == bagua.get_world_size() else None),
        Net,
    ),
    Row(
        "decentralized ring",
        lambda: DecentralizedAlgorithm(False, "ring"),
        lambda model, size: Decentralized(model, size, "ring"),
        Net,
    ),
    Row(
        "low_precision_decentralized",
        lambda: LowPrecisionDecentralizedAlgorithm(False),
        low_precision,
        functools.partial(Net, other=torch.float32),
        after_optimizers=True,
    ),
]


def begun(rank: int, row: Row, **options: Any) -> tuple[Net, torch.optim.Optimizer, Ranks]:
    model, optimizer = wrapped(rank, row.algorithm(), row.net, **options)
    return model, optimizer, row.simulate(made_on_rank_0(row.net), bagua.get_world_size())


def exchanges(model: Any) -> list[int]:
    return [bucket.backend_bucket.step for bucket in model.bagua_buckets]


def gradients_accumulate_under_no_sync(rank: int) -> None:
    for row in ROWS:
        model, optimizer, ranks = begun(rank, row)
        for step in range(3):
            before = exchanges(model)
            with bagua.no_sync(model):
                loss(model, batch(rank, 10 * step)).backward()
            assert exchanges(model) == before, row.name
            # All gradients of the step are at the same weights.
            train(model, optimizer, rank, 10 * step + 1)
            ranks.train(step, passes=[10 * step, 10 * step + 1])
            assert_equals(model, ranks, rank, f"{row.name}, step {step}")


def a_loss_without_parameters_on_one_rank_ends_the_step_with_the_optimizer(rank: int) -> None:
    for row in ROWS:
        model, optimizer, ranks = begun(rank, row)
        for step in range(4):
            if step in (1, 2) and rank == 0:
                model(batch(rank, step))
                if step == 1:
                    torch.ones(1, requires_grad=True).sum().backward()
                optimizer.step()
            else:
                train(model, optimizer, rank, step)
            ranks.train(step, without=[0] if step in (1, 2) else [])
            assert_equals(model, ranks, rank, f"{row.name}, step {step}")


def a_model_trains_on_a_sub_group(rank: int) -> None:
    size = bagua.get_world_size()
    members = list(range(max(0, size - 2), size))
    group = bagua.new_group(members)
    if rank not in members:
        return
    place = members.index(rank)
    for row in [*ROWS, *map(of_mode, PEER_SELECTION_MODES)]:
        model, optimizer = wrapped(place, row.algorithm(), row.net, process_group=group)
        ranks = row.simulate(made_on_rank_0(row.net), len(members))
        for step in range(2):
            train(model, optimizer, place, step)
            ranks.train(step)
            assert_equals(model, ranks, place, f"{row.name}, step {step}")


def of_mode(mode: str) -> Row:
    return Row(
        mode, lambda: DecentralizedAlgorithm(False, mode), lambda model, size: Decentralized(model, size, mode), Net
    )


def complex_parameters_are_refused(rank: int) -> None:
    for row in ROWS:
        model = torch.nn.Linear(3, 2)
        model.phase = torch.nn.Parameter(torch.zeros(2, dtype=torch.complex64))
        with pytest.raises(TypeError, match=r"'phase' is torch\.complex64"):
            model.with_bagua([sgd(model)], row.algorithm())


CASES = cases_in(globals())

test = each_case(CASES, 1, *HOSTED, timeout=60)
