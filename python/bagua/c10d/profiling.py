"""Operations as events of torch's profiler: "bagua:all_reduce" for the call, "bagua:all_reduce.wait" for a wait.

torch writes the end of an event into memory that the profile owns, and looks only whether some profile runs. An event
that outlives its profile therefore writes into freed memory. So an event begins and ends in one call, on one thread;
none lasts as long as an asynchronous operation. The flight recorder has when each operation began and ended.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch

__all__ = ["event", "profiled"]

#: Whether this thread is profiled.
profiled: Any = torch.autograd._profiler_enabled  # type: ignore[attr-defined]
_Event: Any = torch._C._profiler._RecordFunctionFast
_NO_EVENT = contextlib.nullcontext()


def event(name: str, tensors: Sequence[torch.Tensor] = ()) -> contextlib.AbstractContextManager[Any]:
    """An event that lasts as long as the `with` block, where this thread is profiled.

    The shapes of `tensors` are in it when the profile has `record_shapes`.
    """
    return _Event(f"bagua:{name}", list(tensors)) if profiled() else _NO_EVENT
