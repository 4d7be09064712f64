"""The half of a process group that torch's C++ code calls. It hands every collective to the half in Python."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from .compiler_disable import uncompiled
from .dispatch import from_dispatcher
from .torch_bindings import BACKEND_HAS_CONSTRUCTOR, c10d, device_types

__all__ = ["register", "without_support"]

_C = TypeVar("_C", bound=type)

#: Names of the methods that C++ calls.
_FORWARDED = (
    "allreduce",
    "allreduce_sparse",
    "allreduce_coalesced",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_single_coalesced",
    "_reduce_scatter_base",
    "reduce_scatter_tensor_coalesced",
    "broadcast",
    "allgather",
    "all_gather_single",
    "_allgather_base",
    "allgather_coalesced",
    "all_gather_single_coalesced",
    "allgather_into_tensor_coalesced",
    "gather",
    "gather_single",
    "scatter",
    "alltoall",
    "all_to_all_single",
    "alltoall_base",
    "barrier",
    "monitored_barrier",
    "send",
    "recv",
    "recv_anysource",
    "start_coalescing",
    "end_coalescing",
    "_start_coalescing",
    "_end_coalescing",
    "set_timeout",
    "shutdown",
    "abort",
    "_get_sequence_number_for_group",
    "_set_sequence_number_for_group",
    "_wait_for_pending_works",
)

#: Name before torch 2.12 -> new name.
_NEWER = {
    "_allgather_base": "all_gather_single",
    "_reduce_scatter_base": "reduce_scatter_single",
    "allgather_into_tensor_coalesced": "all_gather_single_coalesced",
    "alltoall_base": "all_to_all_single",
    "reduce_scatter_tensor_coalesced": "reduce_scatter_single_coalesced",
}

#: Properties that newer versions of torch read from a group and its backend. torch's own properties would ask the
#: Python half again, without end.
_NOT_SUPPORTED = ("supports_reconfigure", "supports_shrinking", "supports_window", "_supports_time_estimate")


def without_support(half: _C) -> _C:
    """Adds the properties in ``_NOT_SUPPORTED``, all False, to a class. Returns the class."""
    for name in _NOT_SUPPORTED:
        setattr(half, name, property(lambda self: False))
    return half


@without_support
class _Backend(c10d.Backend):  # type: ignore[misc]
    """Hands every collective to the process group, a ``BaguaProcessGroup``."""

    def __init__(self, group: Any) -> None:
        super().__init__(group.rank(), group.size())
        # Weak, because the group owns this object through C++, where the garbage collector sees no cycle.
        self._group = weakref.ref(group)

    def getBackendName(self) -> str:
        return "bagua"

    name = getBackendName

    @property
    def options(self) -> Any:
        return c10d.Backend.Options("bagua", self._require_group()._timeout)

    @property
    def supports_splitting(self) -> bool:
        """True: :meth:`BaguaProcessGroup.split_group` splits groups."""
        return True

    @property
    def supports_coalescing(self) -> bool:
        """False: batch_isend_irecv starts each message separately, and returns a Work for each."""
        return False

    def comm_split_count(self) -> int:
        """Returns the number of operations, with which torch names a split group without a description."""
        return int(self._require_group()._get_sequence_number_for_group())

    def _require_group(self) -> Any:
        group = self._group()
        if group is None:
            raise RuntimeError("the process group of this backend has been destroyed")
        return group


def _forward(verb: str) -> Callable[..., Any]:
    name = _NEWER.get(verb, verb)

    def call(self: _Backend, *args: Any, **kwargs: Any) -> Any:
        return from_dispatcher(getattr(self._require_group(), name), *args, **kwargs)

    call.__name__ = verb
    return call


for _verb in _FORWARDED:
    setattr(_Backend, _verb, _forward(_verb))
uncompiled(_Backend)


def register(group: Any) -> _Backend | None:
    """Registers the half for C++, if torch's Backend can be subclassed in Python. Returns the half, or None."""
    if not BACKEND_HAS_CONSTRUCTOR:
        return None
    backend = _Backend(group)
    kind = c10d.ProcessGroup.BackendType.CUSTOM
    for device in device_types():
        group._register_backend(torch.device(device), kind, backend)
    group._set_default_backend(kind)
    return backend
