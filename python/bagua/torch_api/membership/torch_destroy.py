"""Destroying groups of torch.distributed on every torch that is supported.

Before 2.6 torch joins the threads of a gloo group with Python's lock held. A thread that has just completed an
operation may still need that lock, to release a tensor that only it holds: then both wait for ever. So the groups
are kept a little longer there, and in that time this thread does not hold the lock.
"""

from __future__ import annotations

import time

import torch
from torch.distributed import ProcessGroup, destroy_process_group
from torch.distributed.distributed_c10d import _world
from torch.torch_version import TorchVersion

__all__ = ["destroy"]

#: The first torch that joins them without Python's lock.
_JOINS_WITHOUT_LOCK = "2.6"

#: Seconds for a thread that was interrupted between the end of an operation and the release of its tensors.
_MOMENT = 0.2


def destroy(group: ProcessGroup | None = None) -> None:
    """As ``torch.distributed.destroy_process_group``, without its deadlock."""
    threads_need_lock = TorchVersion(torch.__version__) < _JOINS_WITHOUT_LOCK
    held = list(_world.pg_map) if threads_need_lock else []
    destroy_process_group(group)
    if held:
        time.sleep(_MOMENT)
