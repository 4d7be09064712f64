"""Operations as events of torch's profiler, "bagua:all_reduce" for instance.

An event lasts from where the operation is started until it is done, whoever waits for it. It has no shapes: what torch
gives Python to record them cannot end on another thread.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.futures import Future

from .torch_c10d import BACKEND_HAS_CONSTRUCTOR

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
    """Begins an event; None where this thread is not profiled, and with an older torch."""
    # In 2.5 and 2.7, which lack that constructor too, an event that ends on another thread damages the memory of
    # the profile.
    return Event(name) if BACKEND_HAS_CONSTRUCTOR and _profiled() else None
