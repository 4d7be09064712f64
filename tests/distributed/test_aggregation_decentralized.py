"""Averages with neighbours: acceptance checks A23 and A24."""

from __future__ import annotations

import pytest
import torch

import bagua.torch_api as bagua
from bagua.aggregation import DecentralizedAggregation
from tests.distributed.aggregation_ranks import (
    SHAPES,
    Several,
    assert_close,
    collectives,
    each_case,
    everybodys,
    fill,
    gradients,
    groups,
    inputs,
)
from tests.distributed.torch_ranks import cases_in, same_everywhere


def complete(rank: int, size: int) -> list[int]:
    return [other for other in range(size) if other != rank]


def ring(rank: int, size: int) -> list[int]:
    return sorted({(rank - 1) % size, (rank + 1) % size} - {rank})


def path(rank: int, size: int) -> list[int]:
    return [other for other in (rank - 1, rank + 1) if 0 <= other < size]


def a23_the_result_is_the_mean_of_the_neighbourhood(rank: int) -> None:
    size = bagua.get_world_size()
    for group in groups():
        for shape in (complete, ring, path):
            for by_layer in (False, True):
                neighbors = shape(rank, size)
                aggregation = DecentralizedAggregation(rank, neighbors, group=group)
                model = Several(*SHAPES, dtypes=(torch.float32, torch.float64, torch.float16))
                fill(model, rank)
                fill(model, rank, 1, gradients=False)
                assert aggregation.agg_grad(by_layer)(model, "avg_world") is None
                assert aggregation.agg_model(by_layer)(model, "avg") is None
                results = [*gradients(model), *(p.detach() for p in model.parameters())]
                for result, everybody in zip(results, inputs(model, size) + inputs(model, size, 1), strict=True):
                    mine = everybody[[rank, *neighbors]]
                    bound = len(mine) * torch.finfo(result.dtype).eps * mine.abs().mean(0)
                    assert bool(((result.double() - mine.mean(0)).abs() <= bound).all())
                if shape is complete:
                    assert same_everywhere(*results)


def a23_a_ring_contracts_by_its_second_eigenvalue_and_keeps_the_mean(rank: int) -> None:
    size = bagua.get_world_size()
    if size != 4:
        return
    model = Several((50,), dtypes=(torch.float64,))
    fill(model, rank, gradients=False)
    start = everybodys(model.list[0])
    mean = start.mean(0)
    distance = float((start - mean).norm())
    aggregate = DecentralizedAggregation(rank, ring(rank, size)).agg_model()
    for _ in range(10):
        aggregate(model, "avg_world")
        now = everybodys(model.list[0])
        smaller = float((now - mean).norm())
        assert smaller <= distance / 3 + 1e-14
        assert float((now.mean(0) - mean).abs().max()) <= 10 * 2**-52
        distance = smaller


def a23_an_absent_gradient_is_zero_in_its_neighbourhood(rank: int) -> None:
    size = bagua.get_world_size()
    model = Several((3,), (2,))
    if rank == 0:
        model.list[0].grad = torch.full((3,), 6.0)
    neighbors = path(rank, size)
    DecentralizedAggregation(rank, neighbors).agg_grad()(model, "avg_world")
    assert model.list[1].grad is None
    if rank <= 1:
        assert_close(model.list[0].grad, torch.full((3,), 6.0 / (len(neighbors) + 1)))
    else:
        assert model.list[0].grad is None


def a24_neighbours_that_are_not_mutual_are_found_at_the_first_call_on_every_rank(rank: int) -> None:
    size = bagua.get_world_size()
    if size == 1:
        return
    for group in groups():
        model = Several((3,))
        fill(model, rank)
        kept = gradients(model)[0].clone()
        unilateral = DecentralizedAggregation(rank, [1] if rank == 0 else [], group=group)
        for _ in range(2):
            with pytest.raises(ValueError, match="rank 0 has rank 1 as a neighbour, but not vice versa"):
                unilateral.agg_grad()(model, "avg_world")
        with pytest.raises(ValueError, match=f"rank 0 has a neighbour {size} in a group of {size}"):
            DecentralizedAggregation(rank, [size] if rank == 0 else [], group=group).agg_grad()(model, "avg_world")
        with pytest.raises(ValueError, match="rank 0 was given rank=1"):
            DecentralizedAggregation(max(rank, 1), [], group=group).agg_grad()(model, "avg_world")
        assert torch.equal(gradients(model)[0], kept)


def a24_no_rank_is_its_own_neighbour(rank: int) -> None:
    with pytest.raises(ValueError, match="among its own neighbours"):
        DecentralizedAggregation(rank, [rank])
    with pytest.raises(ValueError, match="twice"):
        DecentralizedAggregation(rank, [rank + 1, rank + 1])


def unknown_operations_are_refused_before_the_exchange(rank: int) -> None:
    model = Several((3,))
    fill(model, rank)

    def refused() -> None:
        with pytest.raises(NotImplementedError, match="sum"):
            DecentralizedAggregation(rank, []).agg_grad()(model, "sum")

    assert collectives(refused) == {}


def after_the_first_call_only_neighbours_talk(rank: int) -> None:
    size = bagua.get_world_size()
    if size == 1:
        return
    model = Several(*SHAPES)
    fill(model, rank)
    aggregate = DecentralizedAggregation(rank, ring(rank, size)).agg_grad()
    assert collectives(lambda: aggregate(model, "avg_world")) == {"all_gather": 1, "exchange": 1}
    assert collectives(lambda: aggregate(model, "avg_world")) == {"exchange": 1}


CASES = cases_in(globals())

test_decentralized = each_case(CASES)
