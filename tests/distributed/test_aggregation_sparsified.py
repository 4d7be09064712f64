"""Sparsified aggregation: acceptance check A22. A21 is in test_aggregation_memory.py."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch

import bagua.torch_api as bagua
from bagua.aggregation import SparsifiedAggregation
from tests.distributed.aggregation_ranks import (
    SHAPES,
    Several,
    assert_is_mean,
    collectives,
    each_case,
    fill,
    gradients,
    groups,
    inputs,
    mean_of_ranks,
    payload,
)
from tests.distributed.torch_ranks import cases_in, same_everywhere

METHODS: list[Any] = ["top_k", "random_k", "block"]


def a22_nothing_is_lost_and_little_is_sent(rank: int) -> None:
    size = bagua.get_world_size()
    for group, method, k in itertools.product(groups(), METHODS, (0.1, 3)):
        model = Several(*SHAPES, dtypes=(torch.float32, torch.float64))
        aggregation = SparsifiedAggregation(model, k=k, method=method, group=group)
        for step in range(4):
            before = [mean_of_ranks(memory) for memory in aggregation.memories]
            theirs = inputs(model, size, step)
            fill(model, rank, step)
            aggregation.agg_grad()(model, "avg_world")
            assert same_everywhere(*gradients(model))
            for index, result in enumerate(gradients(model)):
                whole = theirs[index].mean(0) + before[index]
                after = mean_of_ranks(aggregation.memories[index])
                assert bool(((after + result - whole).abs() <= 1e-6).all())
                count = min(result.numel(), max(1, math.ceil(0.1 * result.numel())) if k == 0.1 else 3)
                assert int(result.count_nonzero()) <= size * count


def a22_sending_everything_is_the_mean_and_leaves_no_memory(rank: int) -> None:
    size = bagua.get_world_size()
    for method, k in itertools.product(METHODS, (1.0, 1000)):
        model = Several(*SHAPES)
        aggregation = SparsifiedAggregation(model, k=k, method=method)
        fill(model, rank)
        aggregation.agg_grad()(model, "avg_world")
        for result, everybody in zip(gradients(model), inputs(model, size), strict=True):
            assert_is_mean(result, everybody)
        assert all(bool((memory == 0).all()) for memory in aggregation.memories)


def a22_the_largest_are_sent_first(rank: int) -> None:
    size = bagua.get_world_size()
    model = Several((10,))
    model.list[0].grad = torch.tensor([0.0, -9, 1, 2, 3, 4, 8, 5, 6, 7])
    aggregation = SparsifiedAggregation(model, k=2)
    aggregation.agg_grad()(model, "sum")
    assert gradients(model)[0].tolist() == [0, -9 * size, 0, 0, 0, 0, 8 * size, 0, 0, 0]
    assert aggregation.memories[0].tolist() == [0, 0, 1, 2, 3, 4, 0, 5, 6, 7]


def a22_every_element_has_its_turn(rank: int) -> None:
    for method in ("random_k", "block"):
        # 3 does not divide 10: the tail must go as well.
        model = Several((10,))
        aggregation = SparsifiedAggregation(model, k=3, method=method)  # type: ignore[arg-type]
        seen = torch.zeros(10)
        for _ in range(60):
            model.list[0].grad = torch.ones(10)
            aggregation.agg_grad()(model, "avg_world")
            seen += gradients(model)[0]
        assert bool((seen > 0).all())


def a22_positions_travel_as_int64(rank: int) -> None:
    if bagua.get_world_size() == 1:
        return
    model = Several((1000,), (30, 10))
    fill(model, rank)
    top = SparsifiedAggregation(model, k=0.01)
    marks, values, positions = 2, 4 * (10 + 3), 8 * (10 + 3)
    per_rank = marks + values + positions
    assert payload(lambda: top.agg_grad()(model, "avg_world"), "all_gather") in (
        per_rank,
        per_rank * bagua.get_world_size(),
    )
    assert collectives(lambda: top.agg_grad()(model, "avg_world")) == {"all_gather": 1}
    assert collectives(lambda: top.agg_grad(by_layer=True)(model, "avg_world")) == {"all_gather": 2}


@pytest.mark.slow
def a22_positions_beyond_what_float32_can_count_are_exact(rank: int) -> None:
    if bagua.get_world_size() != 2:
        return
    position = 2**24 + 1 + 2 * rank
    model = Several((2**24 + 8,))
    model.list[0].grad = torch.zeros(2**24 + 8)
    gradients(model)[0][position] = 6.0
    SparsifiedAggregation(model, k=1).agg_grad()(model, "avg_world")
    assert gradients(model)[0].nonzero().flatten().tolist() == [2**24 + 1, 2**24 + 3]


def half_precision_keeps_what_it_rounds_away(rank: int) -> None:
    size = bagua.get_world_size()
    model = Several((20,), dtypes=(torch.bfloat16,))
    aggregation = SparsifiedAggregation(model, k=5)
    for step in range(3):
        before = mean_of_ranks(aggregation.memories[0])
        fill(model, rank, step)
        aggregation.agg_grad()(model, "avg_world")
        whole = inputs(model, size, step)[0].mean(0) + before
        lost = (mean_of_ranks(aggregation.memories[0]) + gradients(model)[0].double() - whole).abs()
        # Only the mean itself is rounded to the gradient's type.
        assert bool((lost <= 2**-8 * gradients(model)[0].double().abs() + 1e-6).all())


def without_error_feedback_the_rest_is_forgotten(rank: int) -> None:
    model = Several((10,))
    aggregation = SparsifiedAggregation(model, k=2, error_feedback=False)
    fill(model, rank)
    aggregation.agg_grad()(model, "avg_world")
    assert bool((aggregation.memories[0] == 0).all())


def absent_gradients_are_zero_or_stay_absent_when_sparsified(rank: int) -> None:
    size = bagua.get_world_size()
    model = Several((6,), (4,))
    aggregation = SparsifiedAggregation(model, k=2)
    fill(model, rank)
    aggregation.agg_grad()(model, "avg_world")
    kept = [memory.clone() for memory in aggregation.memories]
    model.zero_grad()
    if rank == 0:
        model.list[0].grad = torch.full((6,), 100.0)
    aggregation.agg_grad()(model, "avg_world")
    assert model.list[1].grad is None
    assert torch.equal(aggregation.memories[1], kept[1])
    result = gradients(Several((1,)) if model.list[0].grad is None else torch.nn.ParameterList([model.list[0]]))[0]
    assert int((result > 50 / size).count_nonzero()) == 2


def bad_arguments_are_refused_before_communication(rank: int) -> None:
    model = Several((10,))
    fill(model, rank)

    def refused() -> None:
        for k in (0, -1, 0.0, 1.5, math.nan, math.inf):
            with pytest.raises(ValueError, match="k="):
                SparsifiedAggregation(model, k=k)
        with pytest.raises(ValueError, match="method"):
            SparsifiedAggregation(model, method="bottom_k")  # type: ignore[arg-type]
        aggregation = SparsifiedAggregation(model)
        with pytest.raises(NotImplementedError, match="max"):
            aggregation.agg_grad()(model, "max")
        with pytest.raises(NotImplementedError, match="weights"):
            aggregation.agg_model()
        with pytest.raises(ValueError, match="denominator"):
            aggregation.agg_grad()(model, "avg_custom")

    assert collectives(refused) == {}


CASES = cases_in(globals())

test_sparsified = each_case(CASES)
