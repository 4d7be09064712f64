"""Arrays in memory that ranks share: the results of any other array, in place."""

from __future__ import annotations

import gc
from collections.abc import Callable

import numpy as np
import pytest

import bagua
from tests.world import World


def mappings() -> int:
    with open("/proc/self/maps") as maps:
        return sum("bagua-arena" in line for line in maps)


def verbs_in_place(rank: int) -> None:
    group = bagua.init()
    size = group.size
    for dtype in ("float32", "float64", "int32"):
        shared = group.empty((3, 30_001), dtype)
        assert shared.shape == (3, 30_001)
        assert not shared.any()
        ordinary = np.empty((3, 30_001), dtype)
        for array in (shared, ordinary):
            array[:] = np.arange(90_003).reshape(3, -1) + rank
            group.all_reduce(array)
        assert np.array_equal(shared, ordinary)
        part = shared[1]
        part[:] = rank
        group.broadcast(part, size - 1)
        assert (part == size - 1).all()
        assert np.array_equal(shared[0], ordinary[0])
    zero_copy = {kind: counts["zero_copy"] for kind, counts in group.stats()["ops"].items()}
    assert zero_copy == {"all_reduce": 3, "broadcast": 3}


def given_back(rank: int) -> None:
    group = bagua.init()
    array = group.empty(100_000)
    assert mappings() == 1
    view = array[5:50_000].reshape(5, -1)
    del array
    gc.collect()
    bagua.shutdown()
    view += 1
    assert mappings() == 1
    del view
    gc.collect()
    assert mappings() == 0


def refused(rank: int) -> None:
    group = bagua.init()
    with pytest.raises(ValueError, match="cannot exist"):
        group.empty(-1)
    with pytest.raises(ValueError, match="cannot exist"):
        group.empty(2**62, "float64")
    assert group.empty((0, 4)).shape == (0, 4)


@pytest.mark.parametrize("ranks", [2, 3])
def test_verbs_on_shared_arrays_work_in_place(world: Callable[..., World], ranks: int) -> None:
    world(ranks).run(verbs_in_place)


def test_shared_memory_goes_with_the_last_view_even_after_the_group(world: Callable[..., World]) -> None:
    world(2).run(given_back)


def test_shapes_that_cannot_be_are_refused_without_harm(world: Callable[..., World]) -> None:
    world(2).run(refused)
