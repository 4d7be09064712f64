"""All-reduce aggregation: acceptance checks A1 to A9."""

from __future__ import annotations

import math
import types
from typing import Any

import pytest
import torch

import bagua.torch_api as bagua
from bagua.aggregation import AllReduceAggregation, AllReduceAggregationHVD
from bagua.aggregation.backends import find
from tests.distributed.aggregation_ranks import (
    SHAPES,
    Several,
    assert_close,
    assert_is_mean,
    collectives,
    each_case,
    fill,
    gradients,
    groups,
    inputs,
)
from tests.distributed.torch_ranks import cases_in, same_everywhere
from tests.world import make_world


def size_of_world() -> int:
    return bagua.get_world_size()


def a1_averages_are_exact_within_rounding_and_equal_on_all_ranks(rank: int) -> None:
    size = size_of_world()
    for group in groups():
        for by_layer in (False, True):
            for dtype in (torch.float32, torch.float64):
                model = Several(*SHAPES, dtypes=(dtype,))
                aggregation = AllReduceAggregation(size, group=group)
                fill(model, rank)
                aggregation.agg_grad(by_layer)(model, "avg_world")
                fill(model, rank, seed=1, gradients=False)
                aggregation.agg_model(by_layer)(model, "avg_world")
                results = [*gradients(model), *(p.detach() for p in model.parameters())]
                for result, everybody in zip(results, inputs(model, size) + inputs(model, size, 1), strict=True):
                    assert_is_mean(result, everybody)
                    if size == 2:
                        exact = (everybody[0].to(dtype) + everybody[1].to(dtype)) / 2
                        assert torch.equal(result, exact)
                assert same_everywhere(*results)


def a2_mixed_dtypes_keep_dtype_shape_identity_and_storage(rank: int) -> None:
    size = size_of_world()
    dtypes = (torch.float32, torch.float64, torch.bfloat16)
    layouts = []
    for by_layer in (False, True):
        model = Several(*SHAPES, dtypes=dtypes)
        model.list[0].requires_grad_(False)
        fill(model, rank)
        before = [
            (id(p), p.data_ptr(), p.dtype, p.shape, p.requires_grad, g.data_ptr(), g.dtype, g.shape)
            for p, g in zip(model.parameters(), gradients(model), strict=True)
        ]
        AllReduceAggregation(size).agg_grad(by_layer)(model, "avg_world")
        AllReduceAggregation(size).agg_model(by_layer)(model, "avg_world")
        after = [
            (id(p), p.data_ptr(), p.dtype, p.shape, p.requires_grad, g.data_ptr(), g.dtype, g.shape)
            for p, g in zip(model.parameters(), gradients(model), strict=True)
        ]
        assert before == after
        for result, everybody in zip(gradients(model), inputs(model, size), strict=True):
            assert_is_mean(result, everybody)
        layouts.append(gradients(model))
    assert all(torch.equal(one, other) for one, other in zip(*layouts, strict=True))


def a3_a_custom_denominator_divides_the_sum(rank: int) -> None:
    size = size_of_world()
    for group in groups():
        for before in (False, True):
            for op in ("avg_custom", "custom_avg"):
                for denom in (7.0, torch.tensor(7.0), torch.tensor([7]), 7):
                    model = Several(*SHAPES)
                    fill(model, rank)
                    AllReduceAggregation(size, before, group=group).agg_grad()(model, op, denom=denom)
                    for result, everybody in zip(gradients(model), inputs(model, size), strict=True):
                        assert_close(result.double(), everybody.sum(0) / 7, rtol=1e-5, atol=1e-6)


def a4_dividing_before_equals_dividing_after(rank: int) -> None:
    size = size_of_world()
    for group in groups():
        results = []
        for before in (False, True):
            model = Several(*SHAPES)
            fill(model, rank)
            AllReduceAggregation(size, before, group=group).agg_grad()(model, "avg_world")
            results.append(gradients(model))
            assert same_everywhere(*gradients(model))
        for index, everybody in enumerate(inputs(Several(*SHAPES), size)):
            for result in (results[0][index], results[1][index]):
                assert bool(((result - everybody.mean(0)).abs() <= 4 * 2**-23 * everybody.abs().sum(0)).all())


def a5_bad_denominators_and_operations_are_refused_before_communication(rank: int) -> None:
    size = size_of_world()
    model = Several((5,))
    fill(model, rank)
    kept = gradients(model)[0].clone()

    def refused() -> None:
        for by_layer in (False, True):
            for closure in (
                AllReduceAggregation(size).agg_grad(by_layer),
                AllReduceAggregation(size, True).agg_model(by_layer),
            ):
                for denom in (None, 0, torch.zeros(1), torch.ones(2), torch.ones(0), math.nan):
                    with pytest.raises(ValueError, match="denominator"):
                        closure(model, "avg_custom", denom)
                with pytest.raises(NotImplementedError, match="median"):
                    closure(model, "median")
        if size > 1:
            with pytest.raises(ValueError, match=f"world_size is {size + 1}"):
                AllReduceAggregation(size + 1).agg_grad()(model, "avg_world")

    assert collectives(refused) == {}
    assert torch.equal(gradients(model)[0], kept)


def a6_one_rank_communicates_nothing(rank: int) -> None:
    model = Several(*SHAPES)
    fill(model, rank)
    kept = [gradient.clone() for gradient in gradients(model)]
    aggregate = AllReduceAggregation(1).agg_grad()
    assert collectives(lambda: aggregate(model, "avg_world")) == {}
    assert all(torch.equal(one, other) for one, other in zip(gradients(model), kept, strict=True))
    assert collectives(lambda: aggregate(model, "avg_custom", 4.0)) == {}
    assert all(torch.equal(one, other / 4) for one, other in zip(gradients(model), kept, strict=True))


def a7_closures_return_nothing_and_touch_only_what_they_are_for(rank: int) -> None:
    size = size_of_world()
    for by_layer in (False, True):
        model = Several(*SHAPES)
        fill(model, rank, gradients=False)
        fill(model, rank)
        weights = [p.detach().clone() for p in model.parameters()]
        assert AllReduceAggregation(size).agg_grad(by_layer=by_layer)(model, op="avg_world", denom=None) is None
        assert all(torch.equal(p, kept) for p, kept in zip(model.parameters(), weights, strict=True))
        kept_gradients = [gradient.clone() for gradient in gradients(model)]
        assert AllReduceAggregation(size).agg_model(by_layer=by_layer)(model, op="avg", denom=None) is None
        assert all(torch.equal(g, kept) for g, kept in zip(gradients(model), kept_gradients, strict=True))


def a8_a_missing_gradient_is_zero_where_others_have_one_and_none_where_no_rank_has(rank: int) -> None:
    size = size_of_world()
    for group in groups():
        for by_layer in (False, True):
            for op in ("avg_world", "min", "max", "sum"):
                model = Several((4,), (3,), (2,), dtypes=(torch.float32, torch.float64))
                model.list[0].requires_grad_(False)
                if rank == size - 1:
                    model.list[1].grad = torch.full((3,), 6.0, dtype=torch.float64)
                model.list[2].grad = torch.full((2,), -6.0)
                AllReduceAggregation(size, group=group).agg_grad(by_layer)(model, op)
                assert model.list[0].grad is None
                expected = {"avg_world": 6.0 / size, "sum": 6.0, "max": 6.0, "min": 6.0 if size == 1 else 0.0}[op]
                assert model.list[1].grad is not None
                assert model.list[1].grad.tolist() == [expected] * 3


def a9_one_collective_per_dtype_or_one_per_parameter(rank: int) -> None:
    size = size_of_world()
    if size == 1:
        return
    model = Several(*SHAPES, dtypes=(torch.float32, torch.float64))
    fill(model, rank)
    if rank == 0:
        # Who has a gradient travels along.
        model.list[0].grad = None
    plain = AllReduceAggregation(size)
    assert collectives(lambda: plain.agg_grad()(model, "avg_world")) == {"all_reduce": 2}
    assert collectives(lambda: plain.agg_model()(model, "avg_world")) == {"all_reduce": 2}
    assert collectives(lambda: plain.agg_grad(True)(model, "avg_world")) == {"all_reduce": len(SHAPES)}
    assert collectives(lambda: plain.agg_model(True)(model, "avg_world")) == {"all_reduce": len(SHAPES)}


def a9_without_horovod_the_horovod_class_works_over_the_engine(rank: int) -> None:
    size = size_of_world()
    for before in (False, True):
        results = []
        for kind in (AllReduceAggregation, AllReduceAggregationHVD):
            model = Several(*SHAPES)
            fill(model, rank)
            kind(size, before).agg_grad()(model, "avg_world")
            results.append(gradients(model))
        assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


class Horovod(types.ModuleType):
    """What an aggregation uses of ``horovod.torch``, over the engine."""

    Sum, Average, Min, Max = "Sum", "Average", "Min", "Max"

    def __init__(self) -> None:
        super().__init__("horovod.torch")
        self.ops: list[str] = []

    def size(self) -> int:
        return size_of_world()

    def allreduce(self, tensor: torch.Tensor, op: str) -> torch.Tensor:
        self.ops.append(op)
        result = tensor.clone()
        find().all_reduce(result, {"Sum": "sum", "Min": "min", "Max": "max"}[op])  # type: ignore[arg-type]
        return result


def sums_minima_and_maxima_are_those_of_all_ranks(rank: int) -> None:
    size = size_of_world()
    for group in groups():
        for by_layer in (False, True):
            for op in ("sum", "min", "max"):
                model = Several(*SHAPES, dtypes=(torch.float32, torch.bfloat16))
                fill(model, rank)
                AllReduceAggregation(size, group=group).agg_grad(by_layer)(model, op)
                for result, everybody in zip(gradients(model), inputs(model, size), strict=True):
                    expected = {"sum": everybody.sum(0), "min": everybody.amin(0), "max": everybody.amax(0)}[op]
                    bound = size * torch.finfo(result.dtype).eps * everybody.abs().sum(0)
                    assert bool(((result.double() - expected).abs() <= bound).all())
                    if op != "sum":
                        assert torch.equal(result.double(), expected)


CASES = cases_in(globals())

test_all_reduce = each_case(CASES)


def without_torch_distributed(rank: int) -> tuple[bool, Any]:
    """Only the neutral group is there; the Horovod class works on it."""
    import bagua as neutral

    neutral.init()
    model = Several((3,))
    model.list[0].grad = torch.full((3,), float(rank))
    AllReduceAggregationHVD(neutral.group.default(required=True).size).agg_grad()(model, "avg_world")
    neutral.shutdown()
    return torch.distributed.is_initialized(), gradients(model)[0].tolist()


def test_a9_the_horovod_class_works_without_torch_distributed() -> None:
    assert make_world(2).run(without_torch_distributed) == [(False, [0.5] * 3)] * 2
