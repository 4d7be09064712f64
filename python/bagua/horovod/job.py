"""The job that ``hvd.init`` joined: kept with the state of the torch layer, and forgotten with its groups."""

from __future__ import annotations

from typing import Any

from bagua.lifecycle import torch_state
from bagua.torch_api import communication
from bagua.torch_api.process_group import Communicator

_state = torch_state()


class Job:
    """What ``hvd.init`` made."""

    def __init__(self, joined: bool) -> None:
        #: Whether init joined the default process group, so that shutdown leaves it.
        self.joined = joined
        #: Id -> ProcessSet that add_process_set has registered.
        self.process_sets: dict[int, Any] = {}
        #: The id that the next process set gets. Ids count up in the order of the calls, which is equal on all ranks.
        self.next_id = 1


def begin(joined: bool) -> None:
    """Remembers a new job."""
    _state.horovod = Job(joined)


def end() -> None:
    """Forgets the job, and leaves the default process group if ``hvd.init`` joined it."""
    found: Job | None = _state.horovod
    _state.horovod = None
    if found is not None and found.joined:
        communication.destroy_process_group()


def is_begun() -> bool:
    """Whether there is a job."""
    return _state.horovod is not None


def current() -> Job:
    """The job. ValueError before ``hvd.init``."""
    found: Job | None = _state.horovod
    if found is None:
        raise ValueError("Horovod's API is not initialised: call hvd.init() first")
    return found


def world() -> Communicator:
    """The communicator of all ranks. ValueError before ``hvd.init``."""
    current()
    found: Communicator = _state.world
    return found
