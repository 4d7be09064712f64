"""Excludes collectives from torch.compile without importing the compiler, which takes seconds."""

from __future__ import annotations

from types import FunctionType
from typing import Any, TypeVar

import torch

__all__ = ["uncompiled"]

_C = TypeVar("_C", bound=type)


def uncompiled(owner: _C) -> _C:
    """Makes torch.compile run a class's methods, and the functions that they call, uncompiled. Returns the class."""
    evaluator: Any = torch._C._dynamo.eval_frame
    strategy = getattr(evaluator, "_FrameExecStrategy", None)
    if strategy is not None:
        action = evaluator._FrameAction.SKIP
        for member in vars(owner).values():
            if isinstance(member, FunctionType):
                evaluator.set_code_exec_strategy(member.__code__, strategy(action, action))
    return owner
