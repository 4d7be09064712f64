"""Process sets: ranks of the job that communicate among themselves."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence

from bagua.torch_api import communication
from bagua.torch_api.process_group import Communicator, ProcessGroup

from . import global_state

__all__ = ["ProcessSet", "add_process_set", "global_process_set", "remove_process_set"]


class ProcessSet:
    """Some ranks of the job. Usable after :func:`add_process_set`, or as one of ``hvd.init(process_sets=[...])``.

    TypeError for anything but whole numbers, ValueError for no ranks or one twice.
    """

    #: Number of the set, the same on every rank; None while it is not registered.
    process_set_id: int | None = None

    def __init__(self, ranks: Iterable[int]) -> None:
        if not isinstance(ranks, Iterable):
            raise TypeError(f"ProcessSet takes a list of ranks, not {type(ranks).__name__}")
        self._ranks = sorted(map(operator.index, ranks))
        if not self._ranks:
            raise ValueError("ProcessSet: ranks is empty")
        if len(set(self._ranks)) != len(self._ranks):
            raise ValueError(f"ProcessSet: a rank appears twice in {self._ranks}")
        self._group: ProcessGroup | None = None

    @property
    def ranks(self) -> list[int]:
        """Its ranks in the job, in ascending order."""
        return list(self._ranks)

    def _registered(self) -> ProcessGroup:
        number = self.process_set_id
        if number is None or self._group is None or global_state.current().process_sets.get(number) is not self:
            raise ValueError(f"{self} is not registered: call hvd.add_process_set, on all ranks")
        return self._group

    def group(self) -> ProcessGroup:
        """The process group of ``bagua.torch_api`` behind it. ValueError while it is not registered."""
        return self._registered()

    def included(self) -> bool:
        """Whether this process is one of its ranks. ValueError while it is not registered."""
        return global_state.world().rank() in self.group().ranks

    def size(self) -> int:
        """The number of its ranks. ValueError while it is not registered."""
        return len(self.group().ranks)

    def rank(self) -> int:
        """This process's rank in it. ValueError on a process outside it."""
        return self.communicator().rank()

    def communicator(self) -> Communicator:
        """The communicator of its ranks. ValueError on a process outside it."""
        found = self.group().get_global_communicator()
        if not isinstance(found, Communicator):
            raise ValueError(
                f"rank {global_state.world().rank()} is not in {self}, and cannot take part in its operations"
            )
        return found

    def root(self, rank: int) -> int:
        """The rank in it of a rank of the job. ValueError for one outside it."""
        ranks = self.ranks
        if rank not in ranks:
            raise ValueError(f"root_rank {rank} is not in {self}")
        return ranks.index(rank)

    def __repr__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self._ranks})"


class _GlobalProcessSet(ProcessSet):
    """All ranks of the job, whichever job that is."""

    process_set_id = 0

    def __init__(self) -> None:
        self._group = None

    @property
    def ranks(self) -> list[int]:
        """All ranks of the job."""
        return list(range(global_state.world().nranks()))

    def group(self) -> ProcessGroup:
        """The default process group."""
        global_state.current()
        return communication.to_bagua_process_group(None)

    def communicator(self) -> Communicator:
        """The communicator of all ranks."""
        return global_state.world()

    def __repr__(self) -> str:
        return "ProcessSet(all ranks)"


#: All ranks of the job.
global_process_set = _GlobalProcessSet()


def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Registers a process set, or a new one of these ranks, and returns it. Every rank of the job calls it.

    ValueError for a set that is registered already, also by other ranks in the same set, or ranks outside the job.
    """
    found = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    current, size = global_state.current(), global_state.world().nranks()
    if found is global_process_set or any(found.ranks == other.ranks for other in current.process_sets.values()):
        raise ValueError(f"there is a process set of the ranks {found.ranks} already")
    outside = [rank for rank in found.ranks if not 0 <= rank < size]
    if outside:
        raise ValueError(f"ranks {outside} are not in a job of {size}")
    found._group = communication.new_group(found.ranks)
    found.process_set_id = current.next_id
    current.process_sets[current.next_id] = found
    current.next_id += 1
    return found


def remove_process_set(process_set: ProcessSet) -> bool:
    """Ends a process set. False for one that is not registered, and for the global one."""
    number = process_set.process_set_id
    if number is None or global_state.current().process_sets.get(number) is not process_set:
        return False
    del global_state.current().process_sets[number]
    process_set.process_set_id = process_set._group = None
    return True
