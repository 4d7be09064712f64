"""Events of torch's profiler: each begins and ends in one call, because torch frees what a later end is written to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from bagua.c10d import Work
from bagua.c10d.profiling import event


class OpenHandle:
    """An operation that is done when the test says so."""

    def __init__(self) -> None:
        self.done = False

    def wait(self, timeout: float | None = None) -> None:
        torch.empty(3)
        if not self.done:
            raise TimeoutError

    def then(self, callback: Callable[[Exception | None], object], /) -> None:
        raise AssertionError("nothing of the profiler may run when an operation is done")

    def is_completed(self) -> bool:
        return self.done


def ours(profile: Any) -> list[Any]:
    return [found for found in profile.function_events if found.name.startswith("bagua:")]


def is_inside(inner: Any, outer: Any) -> bool:
    return bool(outer.time_range.start <= inner.time_range.start and inner.time_range.end <= outer.time_range.end)


@pytest.mark.parametrize("done", [True, False])
def test_an_event_lasts_as_long_as_the_wait_whether_or_not_its_time_passes(done: bool) -> None:
    operation = OpenHandle()
    operation.done = done
    work = Work(operation, name="verb")
    with torch.autograd.profiler.profile() as profile:
        if done:
            work.wait()
        else:
            with pytest.raises(TimeoutError):
                work.wait()
        torch.empty(3)
    (waited,) = ours(profile)
    assert waited.name == "bagua:verb.wait"
    within, later = (found for found in profile.function_events if found.name == "aten::empty")
    assert is_inside(within, waited)
    assert waited.time_range.end <= later.time_range.start


@pytest.mark.parametrize("record_shapes", [True, False])
def test_an_event_has_the_shapes_that_the_profile_asks_for(record_shapes: bool) -> None:
    with torch.autograd.profiler.profile(record_shapes=record_shapes) as profile, event("verb", [torch.ones(3, 2)]):
        pass
    (found,) = ours(profile)
    assert found.input_shapes == ([[3, 2]] if record_shapes else [])
