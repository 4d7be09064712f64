"""Operations as events of torch's profiler, "bagua:all_reduce" for instance.

An event lasts from where the operation is started until it is done, whoever waits for it. It has no shapes: what torch
gives Python to record them cannot end on another thread.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.futures import Future

__all__ = ["Event", "begin"]

_profiled: Any = torch.autograd._profiler_enabled  # type: ignore[attr-defined]


class Event:
    """One operation in a profile."""

    def __init__(self, name: str) -> None:
        record = torch.ops.profiler._record_function_enter_new(f"bagua:{name}", None)
        # Its continuation has the profiler of this thread, on whichever thread it runs.
        self._done: Future[None] = Future()
        torch.ops.profiler._call_end_callbacks_on_jit_fut._RecordFunction(record, self._done)

    def end(self, error: Exception | None = None) -> None:
        """Ends it, from any thread, once. What a handle calls back."""
        self._done.set_result(None)


def begin(name: str) -> Event | None:
    """Begins an event; None where this thread is not profiled."""
    return Event(name) if _profiled() else None
