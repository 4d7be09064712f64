"""Decides which calls of a process group go through torch's dispatcher.

Operators such as ``c10d::allreduce_`` call torch's own backends. For them, the dispatcher unwraps tensor subclasses
(the result of a functional collective, for example, waits for its values there) and tensors of transforms such as
``torch.func.grad``, skips meta tensors, and shows each call to dispatch modes such as ``CommDebugMode``. If all tensors
are plain, the process group runs a collective without the dispatcher, in a third of the time.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor

from .torch_bindings import BACKEND_HAS_CONSTRUCTOR, c10d

__all__ = [
    "HAS_SINGLE",
    "PLAIN",
    "dispatched",
    "from_dispatcher",
    "is_observed",
]

_Method = TypeVar("_Method", bound=Callable[..., Any])

#: Tensor classes that the core reads directly.
PLAIN = (torch.Tensor, torch.nn.Parameter)

#: True if torch's ProcessGroup has the names ``all_gather_single`` and so on.
HAS_SINGLE = hasattr(c10d.ProcessGroup, "all_to_all_single")

#: Number of dispatch modes that observe the operators of this thread.
is_observed: Callable[[], int] = torch._C._len_torch_dispatch_stack


class _Calls(threading.local):
    #: True while the dispatcher calls a process group.
    calling = False
    #: Works that the dispatcher's calls returned to the current method of the process group.
    works: list[c10d.Work] | None = None


_calls = _Calls()


def _are_plain(arguments: Any) -> bool:
    """Returns True if no tensor in the arguments, or in lists of them, needs the dispatcher."""
    for each in arguments:
        kind = type(each)
        if kind in PLAIN:
            try:
                if each.data_ptr() and not each.is_nested:
                    continue
            except RuntimeError:  # a sparse tensor, or one inside of a transform
                pass
            if each.layout is torch.strided and (each.numel() > 0 or each.is_meta):
                return False
        elif kind is list or kind is tuple:
            if not _are_plain(each):
                return False
        elif each is not None and isinstance(each, torch.Tensor):
            return False
    return True


def dispatched(method: _Method) -> _Method:
    """Decorates a method of the process group, to go through torch's dispatcher if a tensor or mode needs it.

    The wrapper calls torch's method of the same name (without a leading underscore), which dispatches and calls the
    decorated method again.
    """
    name = method.__name__.removeprefix("_")
    of_torch = getattr(c10d.ProcessGroup, name, None)
    if of_torch is None or not BACKEND_HAS_CONSTRUCTOR:
        return method

    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        # A call from the dispatcher does not go there again, even if the dispatcher left a tensor as it was.
        if _calls.calling or (not is_observed() and _are_plain(args) and (not kwargs or _are_plain(kwargs.values()))):
            return method(self, *args, **kwargs)
        # torch's methods do not accept None.
        while args[-1:] == (None,):
            args = args[:-1]
        given = {option: value for option, value in kwargs.items() if value is not None}
        before, _calls.works = _calls.works, []
        try:
            work = of_torch(self, *args, **given)
            # The object that torch returns lacks some methods of Bagua's Work.
            return self.together(_calls.works) if _calls.works else work
        finally:
            _calls.works = before

    # pybind11 would call this override again, and recurse, unless the calling function has the override's name.
    named: Any = call
    named.__code__ = named.__code__.replace(co_name=name)
    return cast(_Method, call)


def from_dispatcher(method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Calls a method of the process group for the dispatcher, with the tensors that the dispatcher has unwrapped."""
    before, _calls.calling = _calls.calling, True
    try:
        found = method(*_waited_for(args), **kwargs)
    finally:
        _calls.calling = before
    if _calls.works is not None and isinstance(found, c10d.Work):
        _calls.works.append(found)
    return found


def _waited_for(arguments: Any) -> list[Any]:
    """Replaces results of functional collectives by their values. The dispatcher does not do so in lists of lists."""
    found = []
    for each in arguments:
        if type(each) in PLAIN:
            found.append(each)
        elif isinstance(each, (list, tuple)):
            found.append(_waited_for(each))
        else:
            found.append(each.wait() if isinstance(each, AsyncCollectiveTensor) else each)
    return found
