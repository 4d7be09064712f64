"""The hook by which an engine learns that a gradient is complete, and by which the engine of a parameter is found."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, Protocol

import torch

__all__ = ["GradHook", "owner_of"]


class Owner(Protocol):
    """The engine of a model."""

    def on_gradient(self, name: str, param: torch.nn.Parameter, is_final: bool = True) -> None:
        """A parameter's gradient has its final local value; otherwise it has when the backward ends."""


class GradHook:
    """Calls an engine when a gradient has its final local value. One object is the hook of all its parameters, and it
    is found among a parameter's hooks by identity: neither a closure nor a handle is kept for each parameter.
    """

    def __init__(self, engine: Owner, parameters: Sequence[tuple[str, torch.nn.Parameter]]) -> None:
        self.engine = weakref.ref(engine)
        # By the id of a parameter, which has this hook and is alive when it is called.
        self._names = {id(param): name for name, param in parameters}
        for _, param in parameters:
            param.register_post_accumulate_grad_hook(self)  # type: ignore[no-untyped-call]

    def __call__(self, param: torch.Tensor) -> None:
        name = self._names.get(id(param))
        if (engine := self.engine()) is None or name is None or not isinstance(param, torch.nn.Parameter):
            return
        hooks: Any = param._post_accumulate_grad_hooks
        if len(hooks) == 1 or next(reversed(hooks.values())) is self:
            engine.on_gradient(name, param)
            return
        # A hook of the user's comes after this one in this backward, and before it from now on.
        key = next(key for key, hook in hooks.items() if hook is self)
        hooks[key] = hooks.pop(key)
        engine.on_gradient(name, param, is_final=False)

    def remove(self, param: torch.Tensor) -> None:
        """Removes the hook from a parameter."""
        hooks = _hooks_of(param)
        for key in [key for key, hook in hooks.items() if hook is self]:
            del hooks[key]


def owner_of(param: torch.Tensor) -> Any:
    """Which engine communicates the gradient of a parameter; None for none."""
    engines = (hook.engine() for hook in _hooks_of(param).values() if isinstance(hook, GradHook))
    return next((engine for engine in engines if engine is not None), None)


def _hooks_of(param: torch.Tensor) -> dict[int, Any]:
    hooks: dict[int, Any] | None = param._post_accumulate_grad_hooks
    return {} if hooks is None else hooks
