"""The groups of torch.distributed's backend "bagua" in this process."""

from __future__ import annotations

from typing import Any

from bagua.process_state import Record, process, record

from .process_group import BaguaProcessGroup

__all__ = ["C10dState", "c10d_state"]


class C10dState(Record):
    """State that lasts until torch destroys the groups."""

    def __init__(self) -> None:
        self.groups: list[BaguaProcessGroup] = []
        #: The group of torch's world.
        self.world: BaguaProcessGroup | None = None
        #: The first group with its sub-groups: see ``group_creation``.
        self.tree: Any = None

    def after_fork_in_child(self) -> None:
        """Forgets the groups, which belong to the parent."""
        # Kept alive, because collecting the groups would close the parent's connections.
        process.inherited.extend(self.groups)
        self.groups, self.world, self.tree = [], None, None


c10d_state = record(C10dState)
