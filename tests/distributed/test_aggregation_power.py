"""PowerSGD: acceptance checks A11 to A20. A21 is in test_aggregation_memory.py."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

import bagua.torch_api as bagua
from bagua.aggregation import PowerAggregation
from bagua.aggregation.backends import Peers
from tests.distributed.aggregation_ranks import (
    SHAPES,
    Several,
    assert_close,
    assert_is_mean,
    collectives,
    each_case,
    everybodys,
    fill,
    gradients,
    groups,
    inputs,
    mean_of_ranks,
    numbers,
    payload,
)
from tests.distributed.torch_ranks import cases_in, same_everywhere

MATRICES = [index for index, shape in enumerate(SHAPES) if len(shape) > 1]
EPS = 2.0**-23


def relative(result: torch.Tensor, expected: torch.Tensor) -> float:
    return float((result.double() - expected).norm() / expected.norm())


def a11_full_rank_is_the_mean(rank: int) -> None:
    for group in groups():
        for dtype, bound in ((torch.float32, 1e-5), (torch.float64, 1e-10)):
            model = Several((6, 8), (8, 6), (7, 7), (4, 3, 2, 2), (5,), dtypes=(dtype,))
            everybody = inputs(model, bagua.get_world_size())
            fill(model, rank)
            PowerAggregation(model, rank=8, group=group).agg_grad()(model, "avg")
            for result, theirs in zip(gradients(model), everybody, strict=True):
                assert relative(result, theirs.mean(0)) <= bound


def variants(model: torch.nn.Module) -> list[PowerAggregation]:
    return [
        PowerAggregation(model, reuse_query=False, rank=1),
        PowerAggregation(model, reuse_query=True, rank=1, memory="local"),
        PowerAggregation(model, reuse_query=False, rank=2, memory="local"),
        PowerAggregation(model, reuse_query=True, rank=2),
        PowerAggregation(model, reuse_query=True, rank=5),
    ]


def a12_a13_nothing_is_lost_in_a_step_or_in_twenty(rank: int) -> None:
    size = bagua.get_world_size()
    model = Several(*SHAPES)
    for aggregation in variants(model):
        given = [torch.zeros(shape, dtype=torch.float64) for shape in SHAPES]
        got = [torch.zeros(shape, dtype=torch.float64) for shape in SHAPES]
        scale = [1.0 for _ in SHAPES]
        for step in range(20):
            before = [mean_of_ranks(memory) for memory in aggregation.memories]
            theirs = inputs(model, size, step)
            fill(model, rank, step)
            aggregation.agg_grad()(model, "avg")
            for i in MATRICES:
                result = gradients(model)[i].double()
                after, whole = mean_of_ranks(aggregation.memories[i]), theirs[i].mean(0) + before[i]
                magnitude = float(everybodys(aggregation.memories[i]).abs().max()) + float(theirs[i].abs().max())
                scale[i] = max(scale[i], magnitude)
                assert float((after + result - whole).abs().max()) <= 16 * EPS * scale[i]
                given[i] += theirs[i].mean(0)
                got[i] += result
        for i in MATRICES:
            rest = mean_of_ranks(aggregation.memories[i])
            assert float((got[i] + rest - given[i]).abs().max()) <= 20 * 16 * EPS * scale[i]


class Remembering(PowerAggregation):
    """Keeps the Q of each matrix that the last step began with."""

    begun: list[torch.Tensor | None]

    def _combine_matrices(self, peers: Peers, matrices: Sequence[int], gradients: list[torch.Tensor | None]) -> None:
        self.begun = list(self.queries)
        super()._combine_matrices(peers, matrices, gradients)


def a14_rank_is_bounded_and_a_mean_of_that_rank_is_recovered_in_one_step(rank: int) -> None:
    for dtype, bound in ((torch.float32, 1e-5), (torch.float64, 1e-10)):
        for reuse in (False, True):
            for r in (1, 2, 3):
                model = Several((9, 7), (6, 4, 3), dtypes=(dtype,))
                aggregation = Remembering(model, reuse_query=reuse, rank=r)
                # The first steps leave a Q behind, of gradients that are zero, of lower rank, and of full rank.
                for step in range(4):
                    low_rank_mean(model, rank, r, step)
                    memories = aggregation.memories
                    given = [g + e for g, e in zip(gradients(model), memories, strict=True)]
                    largest = [float(everybodys(one).double().flatten(1).norm(dim=1).max()) for one in given]
                    whole = [mean_of_ranks(one) for one in given]
                    aggregation.agg_grad()(model, "avg")
                    for index, (result, expected) in enumerate(zip(gradients(model), whole, strict=True)):
                        if step == 0:
                            assert float((result - expected).abs().max()) <= bound
                            continue
                        assert torch.linalg.matrix_rank(result.view(result.shape[0], -1), rtol=bound) <= r
                        seen = smallest_seen(expected, aggregation.begun[index], 1 if step == 1 else r)
                        unavoidable = 64 * torch.finfo(dtype).eps * largest[index] / seen
                        assert relative(result, expected) <= max(bound, unavoidable)


def smallest_seen(mean: torch.Tensor, query: torch.Tensor | None, rank: int) -> float:
    """Returns how much of a rank's mean the weakest direction of P shows.

    Rounding errors of P are as large as the ranks' gradients ask for, and grow by how much smaller this is: no
    algorithm that rounds P to the gradients' type does better. For these draws that is a factor of 10 to 1000.
    """
    assert query is not None
    basis = torch.linalg.qr(query.double()).Q
    return float(torch.linalg.svdvals(mean.reshape(mean.shape[0], -1) @ basis)[rank - 1])


def low_rank_mean(model: torch.nn.Module, rank: int, r: int, step: int) -> None:
    """Gradients in which the ranks disagree in everything, while their mean has rank r; 0 in step 0, 1 in step 1."""
    size = bagua.get_world_size()
    for p in model.parameters():
        columns = p[0].numel()
        left, right = numbers(50, (p.shape[0], r), step, p.dtype), numbers(60, (r, columns), step, p.dtype)
        if step == 0:
            left = left * 0
        if step == 1:
            left = left[:, :1].expand(-1, r)
        everybody = [numbers(other, (p.shape[0], columns), step, p.dtype) for other in range(size)]
        p.grad = (left @ right + everybody[rank] - torch.stack(everybody).mean(0)).view(p.shape)


def a15_vectors_are_averaged_exactly_and_remember_nothing(rank: int) -> None:
    size = bagua.get_world_size()
    for shapes in (SHAPES, ((5,), ()), ((6, 8), (3, 4))):
        model = Several(*shapes)
        aggregation = PowerAggregation(model, rank=2)
        for step in range(2):
            fill(model, rank, step)
            aggregation.agg_grad()(model, "avg")
            for index, everybody in enumerate(inputs(model, size, step)):
                if len(shapes[index]) <= 1:
                    assert_is_mean(gradients(model)[index], everybody)
                    assert bool((aggregation.memories[index] == 0).all())


def a16_results_are_equal_on_all_ranks_and_touch_no_other_random_numbers(rank: int) -> None:
    size = bagua.get_world_size()
    found = []
    for disturbance in (0, 3):
        model = Several(*SHAPES)
        aggregation = PowerAggregation(model, rank=2)
        for step in range(3):
            torch.rand(disturbance)
            fill(model, rank, step)
            state = torch.get_rng_state()
            aggregation.agg_grad()(model, "avg")
            assert torch.equal(torch.get_rng_state(), state)
            assert same_everywhere(*gradients(model))
        found.append([*gradients(model), *aggregation.memories])
        if size > 1:
            assert not same_everywhere(aggregation.memories[0])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def a17_bases_are_orthonormal_and_poor_gradients_stay_finite(rank: int) -> None:
    model = Several((8, 6), (5, 9))
    for reuse in (False, True):
        aggregation = PowerAggregation(model, reuse_query=reuse, rank=4)
        for step in range(4):
            for p in model.parameters():
                full = numbers(rank, tuple(p.shape), step)
                p.grad = [torch.zeros_like(p), full[:, :1].expand(p.shape).clone(), full, torch.zeros_like(p)][step]
            aggregation.agg_grad()(model, "avg")
            for gradient, basis in zip(gradients(model), aggregation.bases, strict=True):
                assert basis is not None
                assert bool(gradient.isfinite().all())
                assert_close(basis.T @ basis, torch.eye(4), rtol=0, atol=1e-5)
                if step == 0:
                    assert bool((gradient == 0).all())


def a18_a_warm_start_converges_in_the_time_average(rank: int) -> None:
    size = bagua.get_world_size()
    model = Several((6, 8))
    expected = inputs(model, size)[0].mean(0)
    aggregation = PowerAggregation(model, reuse_query=True, rank=2)
    total = torch.zeros(6, 8, dtype=torch.float64)
    for _ in range(100):
        fill(model, rank)
        aggregation.agg_grad()(model, "avg")
        total += gradients(model)[0]
    assert relative(total / 100, expected) <= 0.05


def a18_without_error_feedback_it_finds_the_best_approximation(rank: int) -> None:
    size = bagua.get_world_size()
    model = Several((6, 8))
    aggregation = PowerAggregation(model, reuse_query=True, rank=2, error_feedback=False)
    for _ in range(100):
        fill(model, rank)
        aggregation.agg_grad()(model, "avg")
    u, s, vh = torch.linalg.svd(inputs(model, size)[0].mean(0))
    best = u[:, :2] @ torch.diag(s[:2]) @ vh[:2]
    assert relative(gradients(model)[0], best) <= 1e-3
    assert bool((aggregation.memories[0] == 0).all())


def a19_both_names_of_the_average_are_known_and_weights_are_refused(rank: int) -> None:
    results = []
    for op in ("avg", "avg_world"):
        model = Several(*SHAPES)
        aggregation = PowerAggregation(model, rank=2)
        for step in range(2):
            fill(model, rank, step)
            assert aggregation.agg_grad()(model, op) is None
        results.append([*gradients(model), *aggregation.memories])
    assert all(torch.equal(one, two) for one, two in zip(*results, strict=True))

    def refused() -> None:
        for op in ("sum", "avg_custom", "median"):
            with pytest.raises(NotImplementedError, match=op):
                aggregation.agg_grad()(model, op)
        for by_layer in (False, True):
            with pytest.raises(NotImplementedError, match="weights"):
                aggregation.agg_model(by_layer)
        with pytest.raises(ValueError, match="world_size is 9"):
            PowerAggregation(model, world_size=9).agg_grad()(model, "avg")
        with pytest.raises(ValueError, match="shapes"):
            aggregation.agg_grad()(Several((2, 2)), "avg")

    assert collectives(refused) == {}


def a20_every_float_type_and_memory_format_works(rank: int) -> None:
    size = bagua.get_world_size()
    for dtype, bound in ((torch.float64, 1e-10), (torch.bfloat16, 2e-2), (torch.float16, 2e-3)):
        model = Several((6, 8), (4, 3, 2, 5), (5,), dtypes=(dtype,))
        fill(model, rank)
        strided = gradients(model)[1].to(memory_format=torch.channels_last)
        model.list[1].grad = strided
        PowerAggregation(model, rank=30).agg_grad()(model, "avg")
        for result, everybody in zip(gradients(model), inputs(model, size), strict=True):
            assert result.dtype is dtype
            assert relative(result, everybody.mean(0)) <= bound
        assert gradients(model)[1] is strided
    mixed = Several((6, 8), (5, 4), (3,), dtypes=(torch.float32, torch.float64))
    fill(mixed, rank)
    PowerAggregation(mixed, rank=8).agg_grad()(mixed, "avg")
    for result, everybody in zip(gradients(mixed), inputs(mixed, size), strict=True):
        assert relative(result, everybody.mean(0)) <= 1e-5


def a20_half_precision_loses_nothing_to_rounding(rank: int) -> None:
    size = bagua.get_world_size()
    for memory in ("aggregated", "local"):
        model = Several((6, 8), dtypes=(torch.bfloat16,))
        aggregation = PowerAggregation(model, rank=2, memory=memory)  # type: ignore[arg-type]
        for step in range(5):
            before = mean_of_ranks(aggregation.memories[0])
            fill(model, rank, step)
            aggregation.agg_grad()(model, "avg")
            whole = inputs(model, size, step)[0].mean(0) + before
            after = mean_of_ranks(aggregation.memories[0])
            assert float((after + gradients(model)[0].double() - whole).abs().max()) <= 16 * EPS * 16


def a20_what_travels_is_small_and_counted(rank: int) -> None:
    if bagua.get_world_size() == 1:
        return
    model = Several((60, 80), (40,), (16, 3, 5, 5), ())
    fill(model, rank)
    aggregation = PowerAggregation(model, rank=2)
    step = aggregation.agg_grad()
    marks = 4
    elements = 2 * (60 + 80) + 2 * (16 + 75) + 40 + 1 + marks
    assert payload(lambda: step(model, "avg"), "all_reduce") == 4 * elements
    assert collectives(lambda: step(model, "avg")) == {"all_reduce": 3}


def absent_gradients_are_zero_or_stay_absent(rank: int) -> None:
    size = bagua.get_world_size()
    for by_layer in (False, True):
        model = Several((6, 8), (5, 4), (3,), (4,))
        aggregation = PowerAggregation(model, reuse_query=True, rank=8)
        fill(model, rank)
        aggregation.agg_grad(by_layer)(model, "avg")
        kept = [memory.clone() for memory in aggregation.memories]
        model.zero_grad()
        if rank == 0:
            model.list[0].grad = torch.ones(6, 8)
            model.list[2].grad = torch.ones(3)
        aggregation.agg_grad(by_layer)(model, "avg")
        assert model.list[1].grad is None
        assert model.list[3].grad is None
        assert torch.equal(aggregation.memories[1], kept[1])
        expected = mean_of_ranks(kept[0]) + 1 / size
        assert relative(model.list[0].grad, expected) <= 1e-5  # type: ignore[arg-type]
        assert_close(model.list[2].grad, torch.full((3,), 1 / size))


CASES = cases_in(globals())

test_power = each_case(CASES)
