"""The state from ``hvd.init`` to ``hvd.shutdown``: kept with that of the torch layer, and dropped with its groups."""

from __future__ import annotations

from typing import Any

from bagua.lifecycle import Record, record
from bagua.torch_api import communication
from bagua.torch_api.process_group import Communicator
from bagua.torch_api.process_group.state import group_state


class Job:
    """What ``hvd.init`` joined."""

    def __init__(self, joined: bool) -> None:
        #: Whether init joined the default process group, so that shutdown leaves it.
        self.joined = joined
        #: Id -> ProcessSet that add_process_set has registered.
        self.process_sets: dict[int, Any] = {}
        #: The id that the next process set gets. Ids count up in the order of the calls, which is equal on all ranks.
        self.next_id = 1


class _HorovodState(Record):
    """Between ``hvd.init`` and ``hvd.shutdown``."""

    def __init__(self) -> None:
        self.job: Job | None = None

    def forget_groups(self) -> None:
        self.job = None


_state = record(_HorovodState)


def begin(joined: bool) -> None:
    """Remembers a new job."""
    _state.job = Job(joined)


def end() -> None:
    """Forgets the job, and leaves the default process group if ``hvd.init`` joined it."""
    found, _state.job = _state.job, None
    if found is not None and found.joined:
        communication.destroy_process_group()


def is_begun() -> bool:
    """Whether there is a job."""
    return _state.job is not None


def current() -> Job:
    """The job. ValueError before ``hvd.init``."""
    found = _state.job
    if found is None:
        raise ValueError("Horovod's API is not initialised: call hvd.init() first")
    return found


def world() -> Communicator:
    """The communicator of all ranks. ValueError before ``hvd.init``."""
    current()
    assert group_state.world is not None
    return group_state.world
