"""Joining and leaving the job, this process's place in it, and handles of asynchronous operations."""

from __future__ import annotations

from typing import Any

from bagua.errors import BaguaError
from bagua.handle import Handle
from bagua.process_state import Record, record
from bagua.torch_api import communication
from bagua.torch_api.process_group import Communicator
from bagua.torch_api.process_group.state import group_state

#: The base of every error of communication.
HorovodInternalError = BaguaError


class _HorovodState(Record):
    """State between ``hvd.init`` and ``hvd.shutdown``. Dropped with the groups of the torch layer."""

    def __init__(self) -> None:
        #: True if init joined the default process group, so that shutdown leaves it. None outside of a job.
        self.joined: bool | None = None

    def forget_groups(self) -> None:
        self.joined = None


_state = record(_HorovodState)


def init(comm: Any = None, process_sets: Any = None) -> None:
    """Joins the job, as ``bagua.torch_api.init_process_group`` does, or adopts an existing default process group.

    Has no effect if called again. Raises NotImplementedError for ``comm`` and for ``process_sets``.
    """
    if comm is not None or process_sets is not None:
        raise NotImplementedError(
            "hvd.init takes neither comm nor process_sets: for a part of the ranks use bagua.torch_api.new_group(ranks)"
        )
    if _state.joined is None:
        joined = not communication.is_initialized()
        if joined:
            communication.init_process_group()
        _state.joined = joined


def shutdown() -> None:
    """Leaves the job if :func:`init` joined it. May be called twice."""
    joined, _state.joined = _state.joined, None
    if joined:
        communication.destroy_process_group()


def is_initialized() -> bool:
    """True between :func:`init` and :func:`shutdown`."""
    return _state.joined is not None


def world() -> Communicator:
    """Returns the communicator of all ranks. Raises ValueError before :func:`init`."""
    if _state.joined is None:
        raise ValueError("Horovod's API is not initialised: call hvd.init() first")
    assert group_state.world is not None
    return group_state.world


def rank() -> int:
    """Returns this process's rank in the job. Raises ValueError before :func:`init`, as all functions below do."""
    return world().rank()


def size() -> int:
    """Returns the number of ranks in the job."""
    return world().nranks()


def local_rank() -> int:
    """Returns this process's rank on its host."""
    return world().group.local_rank


def local_size() -> int:
    """Returns the number of ranks on this host."""
    return world().group.local_world_size


def _hosts_with_my_local_rank() -> list[list[int]]:
    return [list(host) for host in world().raw.hosts if len(host) > local_rank()]


def cross_rank() -> int:
    """Returns this host's place among the hosts that have a rank of the same local rank."""
    return next(number for number, host in enumerate(_hosts_with_my_local_rank()) if rank() in host)


def cross_size() -> int:
    """Returns the number of hosts that have a rank of the same local rank."""
    return len(_hosts_with_my_local_rank())


def poll(handle: Handle[Any]) -> bool:
    """Returns True if :func:`synchronize` would not wait."""
    return handle.is_completed()


def synchronize(handle: Handle[Any]) -> Any:
    """Waits for an asynchronous operation. Returns what its synchronous form returns, or raises its error."""
    return handle.wait()
