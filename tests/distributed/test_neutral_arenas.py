"""Arrays in memory that ranks share: the results of any other array, in place."""

from __future__ import annotations

import gc

import numpy as np
import pytest

import bagua
from tests.groups import on_ranks


def mappings() -> int:
    with open("/proc/self/maps") as maps:
        return sum("bagua-arena" in line for line in maps)


@pytest.mark.parametrize("size", [2, 3])
@on_ranks()
def test_verbs_on_shared_arrays_work_in_place(rank: int, group: bagua.Group, size: int) -> None:
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


@on_ranks(2)
def test_shared_memory_goes_with_the_last_view_even_after_the_group(group: bagua.Group) -> None:
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


@on_ranks(2)
def test_shapes_that_cannot_be_are_refused_without_harm(group: bagua.Group) -> None:
    with pytest.raises(ValueError, match="cannot exist"):
        group.empty(-1)
    with pytest.raises(ValueError, match="cannot exist"):
        group.empty(2**62, "float64")
    assert group.empty((0, 4)).shape == (0, 4)
