"""The hook that tells an engine that a gradient is complete, and that leads from a parameter to its engine."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch.utils.hooks import RemovableHandle

__all__ = ["GradHook", "owner_of"]


class Owner(Protocol):
    """The engine of a model."""

    def on_gradient(self, name: str, param: torch.nn.Parameter, is_final: bool = True) -> None:
        """Reports a gradient. Its local value is final now, or at the end of the backward if not ``is_final``."""


class GradHook:
    """Tells an engine that the local value of a gradient is final.

    One object is the hook of all parameters of a model, under the same key. This needs neither a closure nor a handle
    per parameter.
    """

    def __init__(self, engine: Owner, parameters: Sequence[tuple[str, torch.nn.Parameter]]) -> None:
        self.engine = weakref.ref(engine)
        # Parameter's id -> name. A parameter with this hook is alive when the hook is called.
        self._names = {id(param): name for name, param in parameters}
        # torch numbers the hooks of a process by their handles.
        self._key: int = RemovableHandle(OrderedDict()).id
        for _, param in parameters:
            hooks: dict[int, Any] | None = param._post_accumulate_grad_hooks
            if hooks is None:
                param._post_accumulate_grad_hooks = OrderedDict({self._key: self})
            else:
                hooks[self._key] = self

    def __call__(self, param: torch.Tensor) -> None:
        name = self._names.get(id(param))
        if (engine := self.engine()) is None or name is None or not isinstance(param, torch.nn.Parameter):
            return
        hooks: Any = param._post_accumulate_grad_hooks
        if len(hooks) == 1 or next(reversed(hooks.values())) is self:
            engine.on_gradient(name, param)
            return
        # The user added a hook after this one. It runs later in this backward, and earlier in the next ones.
        hooks[self._key] = hooks.pop(self._key)
        engine.on_gradient(name, param, is_final=False)

    def remove(self, param: torch.Tensor) -> None:
        """Removes the hook from a parameter."""
        _hooks_of(param).pop(self._key, None)


def owner_of(param: torch.Tensor) -> Any:
    """Returns the engine that communicates the gradient of a parameter, or None."""
    engines = (hook.engine() for hook in _hooks_of(param).values() if isinstance(hook, GradHook))
    return next((engine for engine in engines if engine is not None), None)


def _hooks_of(param: torch.Tensor) -> dict[int, Any]:
    hooks: dict[int, Any] | None = param._post_accumulate_grad_hooks
    return {} if hooks is None else hooks
