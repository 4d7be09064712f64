"""Events of torch's profiler end before their profile does, or not at all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from bagua.c10d.profiling import Profiled, profiled
from bagua.c10d.torch_c10d import BACKEND_HAS_CONSTRUCTOR

pytestmark = pytest.mark.skipif(not BACKEND_HAS_CONSTRUCTOR, reason="with this torch there are no events")


class LateHandle:
    """An operation that is done, and whose callbacks run when the test says so."""

    def __init__(self) -> None:
        self.callbacks: list[Callable[[Exception | None], object]] = []
        self.done = True

    def wait(self, timeout: float | None = None) -> None:
        if not self.done:
            raise TimeoutError

    def then(self, callback: Callable[[Exception | None], object], /) -> None:
        self.callbacks.append(callback)

    def is_completed(self) -> bool:
        return self.done

    def call_back(self) -> None:
        for callback in self.callbacks:
            callback(None)


def ended(handle: Any) -> bool:
    assert isinstance(handle, Profiled)
    return bool(handle._event._done.done())


@pytest.mark.parametrize("asked", [LateHandle.wait, LateHandle.is_completed])
def test_an_event_has_ended_when_its_handle_reports_completion(asked: Any) -> None:
    operation = LateHandle()
    with torch.autograd.profiler.profile() as profile:
        handle = profiled("verb", lambda: operation)
        assert not ended(handle)
        getattr(handle, asked.__name__)()
        assert ended(handle)
        operation.call_back()
    assert [event.name for event in profile.function_events if event.name.startswith("bagua:")] == ["bagua:verb"]


def test_a_wait_whose_time_passes_leaves_the_event_open() -> None:
    operation = LateHandle()
    with torch.autograd.profiler.profile():
        handle = profiled("verb", lambda: operation)
        operation.done = False
        with pytest.raises(TimeoutError):
            handle.wait(0.1)  # type: ignore[union-attr]
        assert not ended(handle)
        operation.done = True
        operation.call_back()
        assert ended(handle)


def test_an_operation_that_is_done_after_the_profile_writes_no_end() -> None:
    operation = LateHandle()
    with torch.autograd.profiler.profile():
        handle = profiled("verb", lambda: operation)
    operation.call_back()
    assert not ended(handle)


def test_what_cannot_be_started_is_an_event_that_has_ended() -> None:
    def start() -> None:
        raise ValueError("no")

    with torch.autograd.profiler.profile() as profile:
        with pytest.raises(ValueError, match="no"):
            profiled("verb", start)
        assert profiled("nothing", lambda: None) is None
    names = [event.name for event in profile.function_events if event.name.startswith("bagua:")]
    assert sorted(names) == ["bagua:nothing", "bagua:verb"]


def test_without_a_profile_the_handle_is_handed_on() -> None:
    operation = LateHandle()
    assert profiled("verb", lambda: operation) is operation
