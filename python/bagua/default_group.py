"""The verbs as functions on the default group. Each is the method of `Group` of the same name, with its docstring."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar, cast

from bagua import group

__all__ = [
    "all_gather",
    "all_gather_object",
    "all_reduce",
    "all_to_all",
    "all_to_all_v",
    "barrier",
    "broadcast",
    "broadcast_object",
    "exchange",
    "gather",
    "gather_object",
    "recv",
    "reduce",
    "reduce_scatter",
    "scatter",
    "scatter_object",
    "send",
]

_Verb = TypeVar("_Verb", bound=Callable[..., Any])

# Type checkers take the class for an instance, whose methods have no `self`, like the functions below.
_GROUP = cast("group.Group", group.Group)


def _on_default_group(method: _Verb) -> _Verb:
    """Returns a function that calls a method of the default group, with the same signature and docstring."""
    name = method.__name__

    @functools.wraps(method)
    def function(*args: Any, **kwargs: Any) -> Any:
        return getattr(group.default(required=True), name)(*args, **kwargs)

    _, *parameters = inspect.signature(method).parameters.values()
    function.__signature__ = inspect.signature(method).replace(parameters=parameters)  # type: ignore[attr-defined]
    function.__module__, function.__qualname__ = __name__, name
    return cast(_Verb, function)


all_gather = _on_default_group(_GROUP.all_gather)
all_gather_object = _on_default_group(_GROUP.all_gather_object)
all_reduce = _on_default_group(_GROUP.all_reduce)
all_to_all = _on_default_group(_GROUP.all_to_all)
all_to_all_v = _on_default_group(_GROUP.all_to_all_v)
barrier = _on_default_group(_GROUP.barrier)
broadcast = _on_default_group(_GROUP.broadcast)
broadcast_object = _on_default_group(_GROUP.broadcast_object)
exchange = _on_default_group(_GROUP.exchange)
gather = _on_default_group(_GROUP.gather)
gather_object = _on_default_group(_GROUP.gather_object)
recv = _on_default_group(_GROUP.recv)
reduce = _on_default_group(_GROUP.reduce)
reduce_scatter = _on_default_group(_GROUP.reduce_scatter)
scatter = _on_default_group(_GROUP.scatter)
scatter_object = _on_default_group(_GROUP.scatter_object)
send = _on_default_group(_GROUP.send)
