"""The groups of torch.distributed's backend "bagua" in this process."""

from __future__ import annotations

from typing import Any

from bagua.lifecycle import Record, process, record

from .process_group import BaguaProcessGroup

__all__ = ["C10dState", "c10d_state"]


class C10dState(Record):
    """Until torch destroys them."""

    def __init__(self) -> None:
        self.groups: list[BaguaProcessGroup] = []
        #: That of torch's world.
        self.world: BaguaProcessGroup | None = None
        #: The first of the groups with its sub-groups: see `membership`.
        self.tree: Any = None

    def after_fork_in_child(self) -> None:
        """They belong to the parent."""
        # Collecting them would close the parent's connections.
        process.inherited.extend(self.groups)
        self.groups, self.world, self.tree = [], None, None


c10d_state = record(C10dState)
