"""Operations as events of torch's profiler, "bagua:all_reduce" for instance.

An event lasts from where the operation is started until it is done, whoever waits for it. It has no shapes: what torch
gives Python to record them cannot end on another thread.

The end of an event is written into memory that the profile frees when it ends. So it is written before `wait` returns,
before `is_completed` is true and before later callbacks run; and not at all after the profile: the event of an
operation that completes later lasts as long as the profile.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import profiler
from torch.futures import Future

from .torch_c10d import BACKEND_HAS_CONSTRUCTOR
from .work import Handle

__all__ = ["Event", "Profiled", "profiled"]

_profiled: Any = torch.autograd._profiler_enabled  # type: ignore[attr-defined]


class Event:
    """One operation in a profile."""

    def __init__(self, name: str) -> None:
        record = torch.ops.profiler._record_function_enter_new(f"bagua:{name}", None)
        # Its continuation has the profiler of this thread, on whichever thread it runs.
        self._done: Future[None] = Future()
        torch.ops.profiler._call_end_callbacks_on_jit_fut._RecordFunction(record, self._done)
        self._open = True
        self._lock = threading.Lock()

    def end(self, error: Exception | None = None) -> None:
        """Ends it, from any thread; again and after the profile does nothing. What a handle calls back."""
        # Under the lock, so that a second thread returns when it has ended too.
        with self._lock:
            if self._open and profiler._is_profiler_enabled:
                self._done.set_result(None)
            self._open = False


class Profiled:
    """A handle whose event ends before it reports completion."""

    def __init__(self, handle: Handle, event: Event) -> None:
        self._handle = handle
        self._event = event
        # Before the callbacks of others.
        handle.then(event.end)

    def wait(self, *args: Any, **kwargs: Any) -> None:
        """As the handle's."""
        try:
            self._handle.wait(*args, **kwargs)
        except BaseException:
            # Not after a timeout: the operation goes on.
            if self._handle.is_completed():
                self._event.end()
            raise
        self._event.end()

    def is_completed(self) -> bool:
        """As the handle's."""
        completed = self._handle.is_completed()
        if completed:
            self._event.end()
        return completed

    def __getattr__(self, name: str) -> Any:
        return getattr(self._handle, name)


def profiled(name: str, start: Callable[[], Handle | None]) -> Handle | None:
    """What `start` returns, the handle of an asynchronous operation, which is an event where this thread is profiled.

    With an older torch there are no events.
    """
    # In 2.5 and 2.7, which lack that constructor too, an event that ends on another thread damages the memory of
    # the profile.
    if not (BACKEND_HAS_CONSTRUCTOR and _profiled()):
        return start()
    event = Event(name)
    try:
        handle = start()
    except BaseException:
        event.end()
        raise
    if handle is None:
        event.end()
        return None
    return Profiled(handle, event)
