"""The default group of this process, and state of its groups."""

from __future__ import annotations

import weakref
from collections.abc import MutableMapping

import torch.distributed as dist

from bagua.process_state import Record, record

from .groups import Communicator, ProcessGroup

__all__ = ["GroupState", "group_state"]


class GroupState(Record):
    """State between init_process_group and destroy_process_group."""

    def __init__(self) -> None:
        #: The default group and its communicator.
        self.default_group: ProcessGroup | None = None
        self.world: Communicator | None = None
        #: Process group -> {world rank: rank in the group}. Weak, so that a group leaves with its last other reference.
        self.group_ranks: MutableMapping[ProcessGroup, dict[int, int]] = weakref.WeakKeyDictionary()
        #: torch.distributed's process group -> its counterpart.
        self.torch_groups: MutableMapping[dist.ProcessGroup, ProcessGroup] = weakref.WeakKeyDictionary()
        #: True if init_process_group initialised torch.distributed, which is then destroyed with the default group.
        self.initialised_torch_distributed = False

    def forget_groups(self) -> None:
        """Forgets the default group and all other groups."""
        self.default_group = self.world = None
        self.group_ranks.clear()
        self.torch_groups.clear()

    def after_fork_in_child(self) -> None:
        """Forgets the groups and torch.distributed, which belong to the parent."""
        super().after_fork_in_child()
        self.initialised_torch_distributed = False


group_state = record(GroupState)
