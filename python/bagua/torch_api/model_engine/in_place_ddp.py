"""A model that ``with_bagua`` changed in place: hooks on the model call its engine around each forward."""

from __future__ import annotations

import weakref
from collections.abc import Callable, MutableMapping
from typing import Any

import torch

from .engine import ModelEngine
from .model_checks import is_recorded
from .state import model_state
from .torch_hooks import ModelHook, call_after_forward, call_before_forward

_wrapped: MutableMapping[torch.nn.Module, ModelEngine] = model_state.wrapped
_ended = model_state.ended


def _no_engine() -> None:
    """Stands in for the weak reference to an engine that has ended."""


class _ForwardHook(ModelHook):
    """Calls a model's engine before each forward. Refuses training after the model's group has ended."""

    def __init__(self, ddp: ModelEngine | None) -> None:
        self._ddp: Callable[[], ModelEngine | None] = _no_engine if ddp is None else weakref.ref(ddp)

    def __call__(self, module: torch.nn.Module, inputs: Any) -> None:
        if not is_recorded():
            call_before_forward(self._ddp, module, inputs)


class _AfterForwardHook(ModelHook):
    """Calls a model's engine after each forward, even if the forward raised."""

    def __init__(self, ddp: ModelEngine) -> None:
        self._ddp = weakref.ref(ddp)

    def __call__(self, module: torch.nn.Module, inputs: Any, output: Any) -> None:
        if not is_recorded():
            call_after_forward(self._ddp, output)


class InPlaceEngine(ModelEngine):
    """The engine that ``with_bagua`` sets as ``model.bagua_ddp``.

    It ends with the model, with the group, or when ``with_bagua`` is called again for the model.
    """

    def _hook_forward(self, module: torch.nn.Module) -> None:
        self._handles.append(module.register_forward_pre_hook(_ForwardHook(self)))
        if self.policy.callbacks is not None:
            self._handles.append(module.register_forward_hook(_AfterForwardHook(self), always_call=True))


def end_with_group(wrapped: torch.nn.Module) -> None:
    """Ends the engine of a model whose group has ended, without communication.

    If there is another group, the model's next training forward raises BaguaError, because no other rank would take
    part.
    """
    ddp = _wrapped.pop(wrapped)
    ddp.close(at_exit=True)
    # DistributedDataParallel checks by itself.
    by_hook = isinstance(ddp, InPlaceEngine)
    handle = wrapped.register_forward_pre_hook(_ForwardHook(None)) if by_hook else None
    _ended[wrapped] = ddp.bagua_module_name, handle
