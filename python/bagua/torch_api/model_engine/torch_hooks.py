"""Functions through which torch calls an engine: around forwards, after a backward, and before loading weights."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
from torch.utils.hooks import RemovableHandle

from .model_checks import refuse_torchs_wrapper, refuse_training


class Hooked(Protocol):
    """The engine of a model."""

    bagua_module_name: str

    def on_gradient(self, name: str, param: torch.nn.Parameter, is_final: bool = True) -> None:
        """Reports a gradient. Its local value may still change until the end of the backward unless ``is_final``."""

    def after_any_backward(self) -> None:
        """Called after each backward, also if it raised."""

    def before_load(self) -> None:
        """Called before ``load_state_dict`` of the model or of a module in it."""

    def before_forward(self, module: torch.nn.Module, inputs: Any) -> None:
        """Called before each forward of the model."""

    def after_forward(self, output: Any) -> None:
        """Called after each forward. ``output`` is None if it raised."""


# Not compiled, because communication has no graph. The first call imports the compiler, as making an optimizer does.
@torch._disable_dynamo  # type: ignore[attr-defined]
def call_before_forward(ddp: Callable[[], Hooked | None], module: torch.nn.Module, inputs: Any) -> None:
    """Calls :meth:`Hooked.before_forward` if the engine still exists. Raises BaguaError if it ended with its group."""
    refuse_training(module)
    if (present := ddp()) is not None:
        # torch sets this during the forward of its own wrapper.
        inside = torch.nn.parallel.DistributedDataParallel._active_ddp_module
        if inside is not None and torch.is_grad_enabled():
            refuse_torchs_wrapper(module, present.bagua_module_name, inside)
        present.before_forward(module, inputs)


@torch._disable_dynamo  # type: ignore[attr-defined]
def call_after_forward(ddp: Callable[[], Hooked | None], output: Any) -> None:
    """Calls :meth:`Hooked.after_forward` if the engine still exists."""
    if (present := ddp()) is not None:
        present.after_forward(output)


class EndOfBackward:
    """Calls an engine when a backward ends or raises, because autograd then drops its reference to this object."""

    def __init__(self, ddp: Hooked) -> None:
        self._ddp = weakref.ref(ddp)

    def __call__(self) -> None:
        """Does nothing. The work is done in ``__del__``, which follows at once."""

    def __del__(self) -> None:
        if (ddp := self._ddp()) is not None:
            ddp.after_any_backward()


def at_end_of_backward(callback: Any) -> None:
    """Calls ``callback`` when the running backward has completed."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def unwrapped(*_: Any) -> None:
    """The hook of a copy of a wrapped model. Does nothing, because the copy trains alone."""


def _unwrapped_hook() -> Any:
    """Returns the hook of a model that was pickled."""
    return unwrapped


class ModelHook:
    """Base of the hooks of a wrapped model, which copies and pickles of the model do not have."""

    def __deepcopy__(self, memo: Any) -> Any:
        return unwrapped

    def __reduce__(self) -> tuple[Any, ...]:
        return _unwrapped_hook, ()


class _LoadHook(ModelHook):
    """Calls an engine before a module of its model gets weights from ``load_state_dict``."""

    def __init__(self, ddp: Hooked) -> None:
        self._ddp = weakref.ref(ddp)

    def __call__(self, *_: Any) -> None:
        if (ddp := self._ddp()) is not None:
            ddp.before_load()


def follow_loads(ddp: Hooked, modules: Iterable[torch.nn.Module]) -> RemovableHandle:
    """Calls an engine before ``load_state_dict`` of the model, of a module in it, or of a module that contains it.

    ``modules`` are the model and all modules in it.
    """
    hook = _LoadHook(ddp)
    # A scripted module takes no hook. The model's own hook is called first.
    children = (child for child in modules if not isinstance(child, torch.jit.ScriptModule))
    hooks = [child._load_state_dict_pre_hooks for child in children]
    # One handle serves all modules; torch's method would make four objects for each.
    handle = RemovableHandle(OrderedDict(), extra_dict=hooks)
    for each in hooks:
        each[handle.id] = hook
    return handle
