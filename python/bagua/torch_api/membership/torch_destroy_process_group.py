"""Destroys groups of torch.distributed in every supported version of torch, without a deadlock.

Before 2.6, torch joins the threads of a gloo group while holding the GIL. A thread that has just completed an operation
may need the GIL to release a tensor, and both would then wait for ever. In these versions, ``destroy`` therefore keeps
references to the groups for a moment after it has released the GIL.
"""

from __future__ import annotations

import time

import torch
from torch.distributed import ProcessGroup, destroy_process_group
from torch.distributed.distributed_c10d import _world
from torch.torch_version import TorchVersion

__all__ = ["destroy"]

#: First version of torch that joins the threads without the GIL.
_JOINS_WITHOUT_LOCK = "2.6"

#: Seconds for a thread to release its tensors after an operation.
_MOMENT = 0.2


def destroy(group: ProcessGroup | None = None) -> None:
    """Like ``torch.distributed.destroy_process_group``, without its deadlock."""
    threads_need_lock = TorchVersion(torch.__version__) < _JOINS_WITHOUT_LOCK
    held = list(_world.pg_map) if threads_need_lock else []
    destroy_process_group(group)
    if held:
        time.sleep(_MOMENT)
