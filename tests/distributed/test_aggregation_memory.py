"""Aggregations that remember what they have not sent: acceptance check A21, and what else holds for each of them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

import bagua.torch_api as bagua
from bagua.aggregation import PowerAggregation, SparsifiedAggregation
from tests.distributed.aggregation_ranks import SHAPES, Several, each_case, fill, gradients
from tests.distributed.torch_ranks import cases_in

AGGREGATIONS: dict[str, Callable[[torch.nn.Module], Any]] = {
    "power": functools.partial(PowerAggregation, reuse_query=False, rank=2),
    "power, warm": functools.partial(PowerAggregation, reuse_query=True, rank=2),
    "top_k": functools.partial(SparsifiedAggregation, k=0.2, method="top_k"),
    "random_k": functools.partial(SparsifiedAggregation, k=0.2, method="random_k"),
    "block": functools.partial(SparsifiedAggregation, k=0.2, method="block"),
}


def a21_a_resumed_run_equals_one_that_was_not_interrupted(rank: int) -> None:
    for name, make in AGGREGATIONS.items():
        model = Several(*SHAPES)
        whole, resumed = make(model), None
        for step in range(6):
            if step == 3:
                resumed = make(model)
                resumed.load_state_dict(whole.state_dict())
            fill(model, rank, step)
            whole.agg_grad()(model, "avg_world")
            expected = [gradient.clone() for gradient in gradients(model)]
            if resumed is not None:
                fill(model, rank, step)
                resumed.agg_grad()(model, "avg_world")
                assert all(map(torch.equal, gradients(model), expected)), name
        with pytest.raises(ValueError, match="shapes"):
            make(Several((2, 2))).load_state_dict(whole.state_dict())


def a_state_of_another_rank_or_of_another_number_of_ranks_is_refused(rank: int) -> None:
    size = bagua.get_world_size()
    for name, make in AGGREGATIONS.items():
        model = Several((6, 8))
        state = make(model).state_dict()
        assert (state["rank"], state["world_size"]) == (rank, size), name
        for whose in ({"rank": rank + 1}, {"world_size": size + 1}):
            other = state | whose
            text = f"the state of rank {other['rank']} of {other['world_size']}, and this is rank {rank} of {size}"
            with pytest.raises(ValueError, match=f"{text}: its 'memories' fit no other"):
                make(model).load_state_dict(other)
        # One of an older version does not say whose it is.
        make(model).load_state_dict({key: value for key, value in state.items() if key not in ("rank", "world_size")})


def an_overflow_is_everybodys_and_leaves_the_memory_alone(rank: int) -> None:
    for name, make in AGGREGATIONS.items():
        model = Several((6, 8))
        aggregation = make(model)
        fill(model, rank)
        aggregation.agg_grad()(model, "avg_world")
        kept = aggregation.memories[0].clone()
        fill(model, rank, 1)
        if rank == bagua.get_world_size() - 1:
            gradients(model)[0][2, 3] = torch.inf
        aggregation.agg_grad()(model, "avg_world")
        assert not bool(gradients(model)[0].isfinite().all()), name
        assert torch.equal(aggregation.memories[0], kept), name
        fill(model, rank, 2)
        aggregation.agg_grad()(model, "avg_world")
        assert bool(gradients(model)[0].isfinite().all()), name


def by_layer_gives_the_same_numbers(rank: int) -> None:
    for name, make in AGGREGATIONS.items():
        results = []
        for by_layer in (False, True):
            model = Several(*SHAPES)
            aggregation = make(model)
            for step in range(2):
                fill(model, rank, step)
                aggregation.agg_grad(by_layer)(model, "avg_world")
            results.append([*gradients(model), *aggregation.memories])
        assert all(map(torch.equal, *results)), name


CASES = cases_in(globals())

test_memory = each_case(CASES)
