"""Which calls of a process group take the way through torch's dispatcher.

Operators such as `c10d::allreduce_` call torch's own backends. The dispatcher unwraps tensor subclasses for them (the
result of a functional collective, for instance, waits for its values there), and shows each call to dispatch modes such
as `CommDebugMode`. If all tensors are plain, our process group runs a verb without the dispatcher, in a third of the
time.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor

from .torch_bindings import BACKEND_HAS_CONSTRUCTOR, c10d

__all__ = [
    "HAS_SINGLE",
    "PLAIN",
    "dispatched",
    "is_observed",
    "keywords",
    "needs_dispatcher",
    "positional",
    "waited_for",
]

_Method = TypeVar("_Method", bound=Callable[..., Any])

#: Classes of tensors that the core reads by itself.
PLAIN: tuple[type, ...] = (torch.Tensor, torch.nn.Parameter)

#: True if torch's ProcessGroup has the names `all_gather_single` and so on.
HAS_SINGLE = hasattr(c10d.ProcessGroup, "all_to_all_single")

#: True while a dispatch mode observes the operators of this thread.
is_observed: Callable[[], int] = torch._C._len_torch_dispatch_stack


def needs_dispatcher(*arguments: Any) -> bool:
    """True if torch has to dispatch a call with these arguments, of which some may be lists of tensors."""
    return BACKEND_HAS_CONSTRUCTOR and (is_observed() > 0 or not _are_plain(arguments))


def _are_plain(arguments: Any) -> bool:
    for each in arguments:
        if type(each) in PLAIN:
            continue
        if isinstance(each, torch.Tensor) or (isinstance(each, (list, tuple)) and not _are_plain(each)):
            return False
    return True


def positional(opts: Any) -> list[Any]:
    """Returns the options of a call to pass on."""
    return [] if opts is None else [opts]


def keywords(**options: Any) -> dict[str, Any]:
    """Returns those of torch's short forms of options that were given."""
    return {name: value for name, value in options.items() if value is not None}


def waited_for(arguments: Any) -> list[Any]:
    """Replaces the results of functional collectives by their values. In lists of lists the dispatcher leaves them."""
    found = []
    for each in arguments:
        if type(each) in PLAIN:
            found.append(each)
        elif isinstance(each, (list, tuple)):
            found.append(waited_for(each))
        else:
            found.append(each.wait() if isinstance(each, AsyncCollectiveTensor) else each)
    return found


def dispatched(method: _Method) -> _Method:
    """Returns a method of the process group that calls torch's own method of that name, which dispatches, if needed.
    The dispatcher then calls ours, with plain tensors. Verbs with a fast path ask `needs_dispatcher` behind it.
    """
    name = method.__name__
    of_torch = getattr(c10d.ProcessGroup, name, None)
    if of_torch is None or not BACKEND_HAS_CONSTRUCTOR:
        return method

    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if needs_dispatcher(*args):
            return of_torch(self, *args, **kwargs)
        return method(self, *args, **kwargs)

    # pybind11 calls the overriding Python method again, unless that is the caller by its name.
    named: Any = call
    named.__code__ = named.__code__.replace(co_name=name)
    return cast(_Method, call)
