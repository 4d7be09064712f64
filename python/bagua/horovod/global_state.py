"""The state from ``hvd.init`` to ``hvd.shutdown``: kept with that of the torch layer, and dropped with its groups."""

from __future__ import annotations

from bagua.lifecycle import Record, record
from bagua.torch_api import communication
from bagua.torch_api.process_group import Communicator
from bagua.torch_api.process_group.state import group_state


class Job:
    """What ``hvd.init`` joined."""

    def __init__(self, joined: bool) -> None:
        #: True if init joined the default process group; shutdown then leaves it.
        self.joined = joined


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


def world() -> Communicator:
    """Returns the communicator of all ranks. Raises ValueError before ``hvd.init``."""
    if _state.job is None:
        raise ValueError("Horovod's API is not initialised: call hvd.init() first")
    assert group_state.world is not None
    return group_state.world
