"""Process groups of the torch layer and their communicators. No default group exists at this level.

A :class:`ProcessGroup` is a set of ranks; a :class:`Communicator` has the collectives of its members. A rank outside
the group has :data:`NON_COMM_MEMBER` instead, whose collectives return without effect, as in the original Bagua.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch

from bagua import extension, shared_memory
from bagua.errors import AbortedError
from bagua.handle import AnyHandle as Handle
from bagua.torch_operand import require_dtype

from .collectives import Collectives


class Communicator(Collectives):
    """A member's access to one group: collectives on tensors, and on addresses through ``raw``."""

    def members(self, hierarchical: bool) -> list[int]:
        """Returns the ranks that exchange: all ranks, or the first rank of each host if ``hierarchical``."""
        return [host[0] for host in self.raw.hosts] if hierarchical else list(range(self.nranks()))

    def device_id(self) -> int:
        """Returns -1, because communicators are not bound to a device."""
        return -1

    def empty(
        self, shape: int | Sequence[int], dtype: torch.dtype | None = None, *, label: str = "bagua-arena"
    ) -> torch.Tensor:
        """Returns a new tensor of zeros in memory that the ranks of this host can map and reduce without a copy.

        Local: ranks map each other's memory in the first collective whose tensors all lie in such memory. The memory is
        released with the last tensor that uses it, and may outlive the group.
        """
        dtype = torch.get_default_dtype() if dtype is None else dtype
        require_dtype(dtype, "the tensor")
        sizes = (shape,) if isinstance(shape, int) else tuple(shape)
        count = math.prod(sizes)
        if any(size < 0 for size in sizes) or count * dtype.itemsize > sys.maxsize:
            raise ValueError(f"a tensor of shape {list(sizes)} cannot exist")
        if self.nranks() == 1 or count == 0:
            return torch.zeros(sizes, dtype=dtype)
        memory = shared_memory.memory(self.raw, count * dtype.itemsize, label)
        return torch.frombuffer(memory, dtype=dtype).view(sizes)

    def abort(self) -> None:
        """Ends every blocked call of the group on every rank with :class:`bagua.errors.AbortedError`.

        May be called from any thread.
        """
        self.raw.abort("abort() was called")

    def check_abort(self) -> bool:
        """Returns True if the group was aborted and False if it works. Raises any other error that ended the group."""
        try:
            self.raw.cause()
        except AbortedError:
            return True
        return False

    @staticmethod
    def generate_nccl_unique_id_str() -> NoReturn:
        """Raises NotImplementedError: ranks find each other through ``init_process_group``, without an NCCL id."""
        raise NotImplementedError(
            "there is no NCCL id to exchange: open a communicator with init_process_group() or new_group()"
        )


class NonMember:
    """Stands in for a communicator on ranks outside the group."""

    def rank(self) -> int:
        """Returns -1: this process is not a rank of the group."""
        return -1

    def nranks(self) -> int:
        """Returns -1: the size is not known outside the group."""
        return -1

    def device_id(self) -> int:
        """Returns -1, because communicators are not bound to a device."""
        return -1

    def abort(self) -> None:
        """Does nothing."""

    def check_abort(self) -> bool:
        """Returns False."""
        return False

    def _no_effect(self, *args: Any, async_op: bool = False, **kwargs: Any) -> Handle | None:
        return extension.Handle.completed() if async_op else None

    def __getattr__(self, name: str) -> Callable[..., Handle | None]:
        """Returns a function without effect for each collective of a communicator."""
        if name.startswith("_") or not callable(getattr(Collectives, name, None)):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return self._no_effect

    def broadcast_object(self, obj: Any, src: int = 0) -> Any:
        """Returns this rank's own object."""
        return obj


#: The communicator of a rank that is not in the group.
NON_COMM_MEMBER = NonMember()

#: Type of a group's communicator on any rank.
AnyCommunicator = Communicator | NonMember


class ProcessGroup:
    """A set of ranks of a parent communicator, in ascending order, whose members can communicate.

    ``parent`` is called to open a communicator. ``stream`` is accepted for compatibility with the original Bagua and
    has no effect.
    """

    def __init__(
        self, ranks: Sequence[int], parent: Callable[[], Communicator], *, stream: Any = None, group_name: str = ""
    ) -> None:
        self.ranks = sorted(ranks)
        self.stream = stream
        self.group_name = group_name
        self._parent = parent
        self._communicators: dict[str, AnyCommunicator] = {}

    def __repr__(self) -> str:
        return f"{type(self).__name__}(ranks={self.ranks}, group_name={self.group_name!r})"

    def members(self, hierarchical: bool) -> int:
        """Returns the number of members that exchange with each other: ranks, or hosts if ``hierarchical``.

        Returns 1 on a rank outside the group. Local.
        """
        parent = self._parent()
        if parent.rank() not in self.ranks:
            return 1
        if not hierarchical:
            return len(self.ranks)
        return sum(any(rank in self.ranks for rank in host) for host in parent.raw.hosts)

    def get_global_communicator(self) -> AnyCommunicator:
        """Returns the communicator of all ranks of the group. The first call is collective among these ranks."""
        return self.communicator("global")

    def get_intra_node_communicator(self) -> AnyCommunicator:
        """Returns the communicator of the group's ranks on this host. The first call is collective."""
        return self.communicator("intra")

    def get_inter_node_communicator(self) -> AnyCommunicator:
        """Returns the communicator of the first rank on each host. The first call is collective among all ranks."""
        return self.communicator("inter")

    def communicator(self, scope: str) -> AnyCommunicator:
        """Returns one of the three communicators: "global", "intra" or "inter". The first call opens it."""
        found = self._communicators.get(scope)
        if found is None:
            found = self._communicators[scope] = self._open(scope)
        return found

    def adopt(self, communicator: Communicator) -> None:
        """Uses an open communicator as that of all ranks."""
        self._communicators["global"] = communicator

    def _open(self, scope: str) -> AnyCommunicator:
        parent = self._parent()
        if parent.rank() not in self.ranks:
            return NON_COMM_MEMBER
        if scope == "global":
            return _subgroup(parent, self.ranks)
        whole = self.get_global_communicator()
        assert isinstance(whole, Communicator)
        hosts = whole.raw.hosts
        if scope == "inter":
            members = [host[0] for host in hosts]
        else:
            members = next(host for host in hosts if whole.rank() in host)
        return _subgroup(whole, members)


def _subgroup(parent: Communicator, ranks: list[int]) -> AnyCommunicator:
    group = parent.group.new_group(ranks)
    return NON_COMM_MEMBER if group is None else Communicator(group)
