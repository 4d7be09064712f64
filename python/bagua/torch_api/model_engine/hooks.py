"""The functions of an engine that torch calls: for a gradient, when a backward ends, before weights are loaded."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
from torch.utils.hooks import RemovableHandle

from .checks import refuse_torchs_wrapper, refuse_training


class Hooked(Protocol):
    """The engine of a model."""

    bagua_module_name: str

    def on_gradient(self, name: str, param: torch.nn.Parameter, is_final: bool = True) -> None:
        """A parameter's gradient has its final local value; otherwise it has when the backward ends."""

    def after_any_backward(self) -> None:
        """A backward is over, however it ended."""

    def before_load(self) -> None:
        """Before ``load_state_dict`` of the model, or of a module in it."""

    def before_forward(self, module: torch.nn.Module, inputs: Any) -> None:
        """Before each forward of the model."""

    def after_forward(self, output: Any) -> None:
        """After each forward; ``output`` is None when it raised."""


# Not compiled: communication has no graph. The first call imports the compiler, as making an optimizer does.
@torch._disable_dynamo  # type: ignore[attr-defined]
def call_before_forward(ddp: Callable[[], Hooked | None], module: torch.nn.Module, inputs: Any) -> None:
    """:meth:`Hooked.before_forward` of an engine that may have ended. BaguaError if it did with its group."""
    refuse_training(module)
    if (present := ddp()) is not None:
        # torch sets it during the forward of its wrapper.
        inside = torch.nn.parallel.DistributedDataParallel._active_ddp_module
        if inside is not None and torch.is_grad_enabled():
            refuse_torchs_wrapper(module, present.bagua_module_name, inside)
        present.before_forward(module, inputs)


@torch._disable_dynamo  # type: ignore[attr-defined]
def call_after_forward(ddp: Callable[[], Hooked | None], output: Any) -> None:
    """:meth:`Hooked.after_forward` of an engine that may have ended."""
    if (present := ddp()) is not None:
        present.after_forward(output)


class EndOfBackward:
    """Calls it when a backward is over, also when it raised: the engine of autograd then lets go of this object."""

    def __init__(self, ddp: Hooked) -> None:
        self._ddp = weakref.ref(ddp)

    def __call__(self) -> None:
        """The backward came to its end; what is to do follows at once."""

    def __del__(self) -> None:
        if (ddp := self._ddp()) is not None:
            ddp.after_any_backward()


def at_end_of_backward(callback: Any) -> None:
    """Calls it when the backward that runs has come to its end."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def _unwrapped(*_: Any) -> None:
    """The hook of a copy of a wrapped model: without effect, as the copy trains alone."""


def _unwrapped_hook() -> Any:
    """The hook of a model that was pickled."""
    return _unwrapped


class _LoadHook:
    """Calls it before a module of the model gets weights from ``load_state_dict``."""

    def __init__(self, ddp: Hooked) -> None:
        self._ddp = weakref.ref(ddp)

    def __call__(self, *_: Any) -> None:
        if (ddp := self._ddp()) is not None:
            ddp.before_load()

    def __deepcopy__(self, memo: Any) -> Any:
        return _unwrapped

    def __reduce__(self) -> tuple[Any, ...]:
        return _unwrapped_hook, ()


def follow_loads(ddp: Hooked, modules: Iterable[torch.nn.Module]) -> RemovableHandle:
    """Calls it before ``load_state_dict`` of the model, of a module in it, and of one that it is in. ``modules``: the
    model and all in it.
    """
    hook = _LoadHook(ddp)
    # A scripted module takes no hook; the model's own is called first.
    children = (child for child in modules if not isinstance(child, torch.jit.ScriptModule))
    hooks = [child._load_state_dict_pre_hooks for child in children]
    # One handle for all modules: torch's method makes four objects for each.
    handle = RemovableHandle(OrderedDict(), extra_dict=hooks)
    for each in hooks:
        each[handle.id] = hook
    return handle
