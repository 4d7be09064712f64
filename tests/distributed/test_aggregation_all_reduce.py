"""All-reduce aggregation: acceptance checks A1 to A10."""

from __future__ import annotations

import math
import sys
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
    numbers,
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


def a2_channels_last_gradients_keep_their_strides(rank: int) -> None:
    size = size_of_world()
    model = Several((4, 3, 2, 5))
    fill(model, rank)
    gradient = gradients(model)[0].to(memory_format=torch.channels_last)
    model.list[0].grad = gradient
    AllReduceAggregation(size).agg_grad()(model, "avg_world")
    assert gradients(model)[0].is_contiguous(memory_format=torch.channels_last)
    assert_is_mean(gradients(model)[0], inputs(model, size)[0])


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


def a3_different_denominators_divide_before_the_sum_or_each_rank_its_own(rank: int) -> None:
    size = size_of_world()
    model = Several((6, 8))
    everybody = inputs(model, size)[0]
    fill(model, rank)
    AllReduceAggregation(size, divide_before=True).agg_grad()(model, "avg_custom", rank + 2.0)
    parts = everybody / torch.arange(2.0, size + 2, dtype=torch.float64).view(-1, 1, 1)
    assert_close(gradients(model)[0].double(), parts.sum(0), rtol=1e-5, atol=1e-6)
    assert same_everywhere(*gradients(model))
    fill(model, rank)
    AllReduceAggregation(size).agg_grad()(model, "avg_custom", rank + 2.0)
    assert_close(gradients(model)[0].double(), everybody.sum(0) / (rank + 2), rtol=1e-5, atol=1e-6)


def a3_a_large_denominator_does_not_lose_who_has_a_gradient(rank: int) -> None:
    size = size_of_world()
    for before in (False, True):
        model = Several((3,), dtypes=(torch.float16,))
        if rank == 0:
            model.list[0].grad = torch.full((3,), 30000.0, dtype=torch.float16)
        AllReduceAggregation(size, before).agg_grad()(model, "avg_custom", 1e9)
        assert_close(gradients(model)[0].float(), torch.full((3,), 3e-5), rtol=0.01, atol=0)


def a4_half_precision_averages_do_not_overflow_in_between(rank: int) -> None:
    size = size_of_world()
    for group in groups():
        for before in (False, True):
            for op, denom in (("avg_world", None), ("avg_custom", float(size))):
                model = Several((5,), dtypes=(torch.float16,))
                model.list[0].grad = torch.full((5,), 40000.0, dtype=torch.float16)
                AllReduceAggregation(size, before, group=group).agg_grad()(model, op, denom)
                assert gradients(model)[0].tolist() == [40000.0] * 5


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


def a8_tied_parameters_are_reduced_once(rank: int) -> None:
    size = size_of_world()
    model = torch.nn.Sequential(torch.nn.Linear(3, 3, bias=False), torch.nn.Linear(3, 3, bias=False))
    model[1].weight = model[0].weight
    model[0].weight.grad = numbers(rank, (3, 3))
    AllReduceAggregation(size).agg_grad()(model, "avg_world")
    assert_is_mean(model[0].weight.grad, torch.stack([numbers(r, (3, 3)).double() for r in range(size)]))


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


class Horovod(types.ModuleType):
    """The part of ``horovod.torch`` that an aggregation uses, over the engine."""

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


def a10_with_horovod_the_operation_is_sum_again_and_again(rank: int) -> None:
    size = size_of_world()
    if size == 1:
        return
    horovod = Horovod()
    sys.modules["horovod"] = types.ModuleType("horovod")
    sys.modules["horovod.torch"] = horovod
    try:
        aggregation = AllReduceAggregationHVD(size)
    finally:
        del sys.modules["horovod"], sys.modules["horovod.torch"]
    for _ in range(3):
        model = Several(*SHAPES)
        fill(model, rank)
        aggregation.agg_grad()(model, "avg_world")
        for result, everybody in zip(gradients(model), inputs(model, size), strict=True):
            assert_is_mean(result, everybody)
        assert same_everywhere(*gradients(model))
    assert horovod.ops == ["Sum"] * 3
    half = Several((4,), dtypes=(torch.float16,))
    half.list[0].grad = torch.full((4,), 40000.0, dtype=torch.float16)
    aggregation.agg_grad()(half, "avg_world")
    assert gradients(half)[0].tolist() == [40000.0] * 4
    wrong = AllReduceAggregationHVD(size + 1)
    wrong._horovod = horovod
    with pytest.raises(ValueError, match="Horovod has"):
        wrong.agg_grad()(half, "avg_world")


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
