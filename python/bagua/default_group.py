"""The verbs as functions on the default group: each is the method of `Group` of the same name."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

from bagua import group
from bagua.collectives import Collectives

__all__ = [
    "all_gather",
    "all_reduce",
    "all_to_all",
    "all_to_all_v",
    "barrier",
    "broadcast",
    "exchange",
    "gather",
    "recv",
    "reduce",
    "reduce_scatter",
    "scatter",
    "send",
]

P = ParamSpec("P")
R = TypeVar("R")


def _on_default(verb: Callable[Concatenate[Any, P], R]) -> Callable[P, R]:
    @functools.wraps(verb)
    def function(*args: P.args, **kwargs: P.kwargs) -> R:
        return verb(group.default(required=True), *args, **kwargs)

    signature = inspect.signature(verb)
    without_self = signature.replace(parameters=list(signature.parameters.values())[1:])
    setattr(function, "__signature__", without_self)  # noqa: B010 - type checkers know no such attribute
    return function


all_gather = _on_default(Collectives.all_gather)
all_reduce = _on_default(Collectives.all_reduce)
all_to_all = _on_default(Collectives.all_to_all)
all_to_all_v = _on_default(Collectives.all_to_all_v)
barrier = _on_default(Collectives.barrier)
broadcast = _on_default(Collectives.broadcast)
exchange = _on_default(Collectives.exchange)
gather = _on_default(Collectives.gather)
recv = _on_default(Collectives.recv)
reduce = _on_default(Collectives.reduce)
reduce_scatter = _on_default(Collectives.reduce_scatter)
scatter = _on_default(Collectives.scatter)
send = _on_default(Collectives.send)
