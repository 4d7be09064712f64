"""Operations as events of torch's profiler: "bagua:all_reduce" for the call, "bagua:all_reduce.wait" for a wait.

torch writes the end of an event into memory that the profile owns, and only checks that some profile is running. An
event that outlives its profile would write into freed memory. Each event therefore begins and ends in one call on one
thread, and does not last as long as an asynchronous operation. The flight recorder knows when each operation began and
ended.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch

__all__ = ["event", "profiled"]

#: Returns True if this thread is profiled.
profiled: Any = torch.autograd._profiler_enabled  # type: ignore[attr-defined]
_Event: Any = torch._C._profiler._RecordFunctionFast
_NO_EVENT = contextlib.nullcontext()


def event(name: str, tensors: Sequence[torch.Tensor] = ()) -> contextlib.AbstractContextManager[Any]:
    """Returns an event that lasts for the ``with`` block, if this thread is profiled.

    It includes the shapes of ``tensors`` if the profile has ``record_shapes``.
    """
    return _Event(f"bagua:{name}", list(tensors)) if profiled() else _NO_EVENT
