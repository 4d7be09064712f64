"""Keeps torch.compile out of the verbs without importing the compiler, which takes seconds."""

from __future__ import annotations

from types import FunctionType
from typing import Any, TypeVar

import torch

__all__ = ["uncompiled"]

_C = TypeVar("_C", bound=type)


def uncompiled(owner: _C) -> _C:
    """A class whose methods, and what they call, torch.compile runs as they are."""
    evaluator: Any = torch._C._dynamo.eval_frame
    strategy = getattr(evaluator, "_FrameExecStrategy", None)
    if strategy is not None:
        action = evaluator._FrameAction.SKIP
        for member in vars(owner).values():
            if isinstance(member, FunctionType):
                evaluator.set_code_exec_strategy(member.__code__, strategy(action, action))
    return owner
