"""The group of bagua for whatever the user gave."""

from __future__ import annotations

import torch.distributed as dist

from bagua.lifecycle import process

from .. import communication
from ..process_group import ProcessGroup

__all__ = ["group_of"]


def group_of(given: ProcessGroup | dist.ProcessGroup | None) -> ProcessGroup:
    """``None``: the default group; a group of torch.distributed: its counterpart; a group of bagua: itself.

    Where torch.distributed's world has the backend "bagua", it becomes bagua's if there is none yet.
    """
    if not isinstance(given, ProcessGroup) and not communication.is_initialized() and process.torchs_world is not None:
        communication.init_process_group()
    return communication.to_bagua_process_group(given)
