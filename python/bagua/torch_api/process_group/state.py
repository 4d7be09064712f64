"""The default group of this process, and what belongs to groups."""

from __future__ import annotations

import weakref
from collections.abc import MutableMapping

import torch.distributed as dist

from bagua.lifecycle import Record, record

from .groups import Communicator, ProcessGroup

__all__ = ["GroupState", "group_state"]


class GroupState(Record):
    """Between init_process_group and destroy_process_group."""

    def __init__(self) -> None:
        #: The default group, and its communicator.
        self.default_group: ProcessGroup | None = None
        self.world: Communicator | None = None
        #: Process group -> {world rank: rank in the group}. Weak: a group without another reference leaves.
        self.group_ranks: MutableMapping[ProcessGroup, dict[int, int]] = weakref.WeakKeyDictionary()
        #: torch.distributed's process group -> its counterpart.
        self.torch_groups: MutableMapping[dist.ProcessGroup, ProcessGroup] = weakref.WeakKeyDictionary()
        #: Whether init_process_group also initialised torch.distributed, so that its end destroys that too.
        self.initialised_torch_distributed = False

    def forget_groups(self) -> None:
        """There is no default group, and no group belongs to one."""
        self.default_group = self.world = None
        self.group_ranks.clear()
        self.torch_groups.clear()

    def after_fork_in_child(self) -> None:
        """The groups, and torch.distributed, belong to the parent."""
        super().after_fork_in_child()
        self.initialised_torch_distributed = False


group_state = record(GroupState)
