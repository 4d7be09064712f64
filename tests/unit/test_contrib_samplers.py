"""Load-balancing samplers: an exact partition, equally many steps on every rank, similar costs at every step."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch", reason="torch is not installed: make setup")

from bagua.torch_api.contrib import (  # noqa: E402
    LoadBalancingDistributedBatchSampler,
    LoadBalancingDistributedSampler,
)

costs_of = st.lists(st.integers(0, 1000), max_size=60)
replicas_of = st.integers(1, 7)
levels = st.floats(0, 1)


def samplers(costs: list[int], replicas: int, **options: Any) -> list[Any]:
    """The sampler of every rank, over a data set whose samples are their own costs."""
    return [
        LoadBalancingDistributedSampler(costs, lambda cost: cost, replicas, rank, **options) for rank in range(replicas)
    ]


@given(costs_of, replicas_of, st.booleans(), st.booleans(), levels, st.integers(0, 5))
def test_ranks_partition_the_data_exactly_and_yield_equally_many(
    costs: list[int], replicas: int, shuffle: bool, drop_last: bool, level: float, epoch: int
) -> None:
    ranks = samplers(costs, replicas, shuffle=shuffle, drop_last=drop_last, random_level=level)
    for sampler in ranks:
        sampler.set_epoch(epoch)
    given_out = [list(sampler) for sampler in ranks]
    expected = len(costs) // replicas if drop_last else math.ceil(len(costs) / replicas)
    assert [len(indices) for indices in given_out] == [expected] * replicas == [len(sampler) for sampler in ranks]
    counts = Counter(index for indices in given_out for index in indices)
    if drop_last:
        assert set(counts.values()) <= {1}
        assert len(counts) == len(costs) - len(costs) % replicas
    else:
        assert set(counts) == set(range(len(costs)))
        assert sum(counts.values()) - len(costs) == -len(costs) % replicas


@given(costs_of, replicas_of, levels, st.integers(0, 3), st.integers(0, 3))
def test_seed_and_epoch_decide_the_order(costs: list[int], replicas: int, level: float, seed: int, epoch: int) -> None:
    def order(seed: int, epoch: int) -> list[list[int]]:
        ranks = samplers(costs, replicas, seed=seed, random_level=level)
        for sampler in ranks:
            sampler.set_epoch(epoch)
        return [list(sampler) for sampler in ranks]

    assert order(seed, epoch) == order(seed, epoch)
    before = torch.get_rng_state()
    order(seed, epoch)
    assert torch.equal(torch.get_rng_state(), before)


def test_without_shuffling_one_replica_yields_the_sorted_order() -> None:
    costs = [5, 3, 9, 3, 1]
    assert list(samplers(costs, 1, shuffle=False)[0]) == [4, 1, 3, 0, 2]


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=60), replicas_of)
def test_random_level_0_puts_neighbours_in_complexity_at_the_same_step(costs: list[int], replicas: int) -> None:
    ranks = samplers(costs, replicas, drop_last=True)
    steps = [[costs[index] for index in step] for step in zip(*ranks, strict=True)]
    # Steps do not overlap: sorted by their least, each begins where the one before ends.
    steps.sort(key=lambda step: (min(step), max(step)))
    assert [cost for step in steps for cost in sorted(step)] == sorted(costs)[: len(costs) - len(costs) % replicas]


def test_with_drop_last_the_most_complex_are_left_out() -> None:
    ranks = samplers([10, 50, 20, 40, 30], 2, drop_last=True, shuffle=True)
    assert sorted(index for sampler in ranks for index in sampler) == [0, 2, 3, 4]


def test_complexities_are_computed_once_and_can_be_handed_on() -> None:
    asked: list[int] = []

    def complexity(cost: int) -> int:
        asked.append(cost)
        return cost

    first = LoadBalancingDistributedSampler([3, 1, 2], complexity, 1, 0)
    for epoch in range(3):
        first.set_epoch(epoch)
        list(first)
    second = LoadBalancingDistributedSampler([3, 1, 2], None, 1, 0, complexities=first.complexities)
    assert asked == [3, 1, 2]
    assert list(first.chunks()) == list(LoadBalancingDistributedSampler([3, 1, 2], complexity, 1, 0, seed=2).chunks())
    assert second.complexities.tolist() == [3, 1, 2]


def test_a_complexity_that_is_no_integer_is_refused_and_not_cut_off() -> None:
    assert LoadBalancingDistributedSampler([3.0, 1.0], lambda cost: cost, 1, 0).complexities.tolist() == [3, 1]
    with pytest.raises(TypeError, match=r"returned 0\.3 for sample 2 instead of an integer"):
        LoadBalancingDistributedSampler([1, 2, 0.3], lambda cost: cost, 1, 0)


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ("num_replicas is 0", {"num_replicas": 0, "rank": 0}),
        ("rank 2 is not one of 2", {"num_replicas": 2, "rank": 2}),
        ("random_level is 1.5", {"random_level": 1.5}),
        ("random_level is -0.1", {"random_level": -0.1}),
        ("complexity_fn is None", {"complexity_fn": None}),
        ("one integer per sample", {"complexities": [1, 2]}),
    ],
)
def test_bad_arguments_are_refused(text: str, arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=text):
        LoadBalancingDistributedSampler([1, 2, 3], **{"complexity_fn": int, **arguments})


# --- batches ---------------------------------------------------------------------------------------------------------


def growing(indices: list[int]) -> list[list[int]]:
    """Batches of 1, 2, 3, ... indices."""
    batches, start, size = [], 0, 1
    while start < len(indices):
        batches.append(indices[start : start + size])
        start, size = start + size, size + 1
    return batches


def by_cost(limit: int, costs: list[int]) -> Any:
    """Batches of at most this cost in all, so that ranks have different numbers of them."""

    def cut(indices: list[int]) -> list[list[int]]:
        batches: list[list[int]] = []
        cost = limit + 1
        for index in indices:
            cost += costs[index]
            if cost > limit:
                batches.append([])
                cost = costs[index]
            batches[-1].append(index)
        return batches

    return cut


def batch_samplers(costs: list[int], replicas: int, cut: Any, drop_last: bool, **options: Any) -> list[Any]:
    return [
        LoadBalancingDistributedBatchSampler(sampler, cut, drop_last)
        for sampler in samplers(costs, replicas, **options)
    ]


def test_batches_of_one_replica_are_what_the_function_made() -> None:
    (sampler,) = batch_samplers([5, 3, 9, 3, 1, 8, 7], 1, growing, False, shuffle=False)
    assert list(sampler) == [[4], [1, 3], [0, 6, 5], [2]]
    assert len(sampler) == 4


@given(costs_of, replicas_of, st.integers(1, 3000), st.booleans(), st.booleans(), levels, st.integers(0, 3))
def test_every_rank_yields_equally_many_batches_for_any_batch_function(
    costs: list[int], replicas: int, limit: int, drop_last: bool, shuffle: bool, level: float, epoch: int
) -> None:
    cut = by_cost(limit, costs)
    ranks = batch_samplers(costs, replicas, cut, drop_last, shuffle=shuffle, random_level=level)
    for sampler in ranks:
        sampler.set_epoch(epoch)
    steps = ranks[0].sampler.chunks()
    own = [cut([step[rank] for step in steps]) for rank in range(replicas)]
    total = (min if drop_last else max)(map(len, own))
    for rank, sampler in enumerate(ranks):
        batches = list(sampler)
        assert len(batches) == len(sampler) == total
        # Own batches in order, from the beginning again where they do not suffice.
        assert batches == [own[rank][number % len(own[rank])] for number in range(total)]


def test_batch_samplers_refuse_what_cannot_work() -> None:
    with pytest.raises(ValueError, match="drop_last=True"):
        LoadBalancingDistributedBatchSampler(samplers([1, 2], 1, drop_last=True)[0], growing)
    with pytest.raises(TypeError, match="SequentialSampler"):
        LoadBalancingDistributedBatchSampler(torch.utils.data.SequentialSampler([1]), growing)
    with pytest.raises(ValueError, match="for rank 1"):
        len(
            batch_samplers([1, 2, 3, 4], 2, lambda indices: [[i] for i in indices if i % 2 == 0], False, shuffle=False)[
                0
            ]
        )
