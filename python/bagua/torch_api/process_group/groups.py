"""Process groups of the torch layer, and the communicators behind them. No default group exists at this level.

A :class:`ProcessGroup` is a set of ranks; a :class:`Communicator` carries the collectives of its members. A rank
outside the group holds :data:`NON_COMM_MEMBER` instead, whose collectives return without effect, as in the original.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch

from bagua import engine, shared_memory
from bagua.errors import AbortedError
from bagua.handle import AnyHandle as Handle
from bagua.torch_operand import require_dtype

from .collectives import Collectives


class Communicator(Collectives):
    """The ranks of one group as this member sees them: the collectives on tensors, and by address in ``raw``."""

    def members(self, hierarchical: bool) -> list[int]:
        """The ranks that exchange with each other: all, or the first of each host."""
        return [host[0] for host in self.raw.hosts] if hierarchical else list(range(self.nranks()))

    def device_id(self) -> int:
        """-1: the tensors lie in host memory."""
        return -1

    def empty(
        self, shape: int | Sequence[int], dtype: torch.dtype | None = None, *, label: str = "bagua-arena"
    ) -> torch.Tensor:
        """A new tensor of zeros in an arena: memory that the ranks of this host can map, and reduce without a copy.

        Local: the ranks map each other's arenas in the first collective on tensors that lie in arenas on all of them.
        The memory is released with the last tensor that uses it, and may outlive the group.
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
        """Ends every blocked call of the group, on every rank, with :class:`bagua.errors.AbortedError`.

        May be called from any thread.
        """
        self.raw.abort("abort() was called")

    def check_abort(self) -> bool:
        """True if the group was aborted, False while it works; raises any other error that ended it."""
        try:
            self.raw.cause()
        except AbortedError:
            return True
        return False

    @staticmethod
    def generate_nccl_unique_id_str() -> NoReturn:
        """NotImplementedError: ranks find each other by ``init_process_group`` and ``new_group``, not by an NCCL id."""
        raise NotImplementedError(
            "there is no NCCL id to exchange: open a communicator with init_process_group() or new_group()"
        )


class NonMember:
    """Takes the place of a communicator on ranks outside the group."""

    def rank(self) -> int:
        """-1: not a rank of the group."""
        return -1

    def nranks(self) -> int:
        """-1: the size is not known outside the group."""
        return -1

    def device_id(self) -> int:
        """-1, as for a member."""
        return -1

    def abort(self) -> None:
        """There is nothing to abort."""

    def check_abort(self) -> bool:
        """Never aborted."""
        return False

    def _no_effect(self, *args: Any, async_op: bool = False, **kwargs: Any) -> Handle | None:
        """Returns without effect."""
        return engine.Handle.completed() if async_op else None

    def __getattr__(self, name: str) -> Callable[..., Handle | None]:
        """Each collective of a communicator."""
        if name.startswith("_") or not callable(getattr(Collectives, name, None)):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return self._no_effect

    def broadcast_object(self, obj: Any, src: int = 0) -> Any:
        """Returns this rank's own object."""
        return obj


#: The communicator of a rank that is not in the group.
NON_COMM_MEMBER = NonMember()

#: What a group has for its ranks and for others.
AnyCommunicator = Communicator | NonMember


class ProcessGroup:
    """A set of ranks of a parent communicator, in ascending order, whose members can communicate.

    ``parent`` is called when a communicator is opened. ``stream`` exists for the original's signature; host memory has
    no stream to order operations on.
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
        """How many members exchange with each other: ranks, or the hosts that they are on. 1 on a rank outside the
        group. Local.
        """
        parent = self._parent()
        if parent.rank() not in self.ranks:
            return 1
        if not hierarchical:
            return len(self.ranks)
        return sum(any(rank in self.ranks for rank in host) for host in parent.raw.hosts)

    def get_global_communicator(self) -> AnyCommunicator:
        """Spans every rank of the group. Collective among these at the first call, as the two below."""
        return self.communicator("global")

    def get_intra_node_communicator(self) -> AnyCommunicator:
        """Spans the ranks of the group on this rank's host."""
        return self.communicator("intra")

    def get_inter_node_communicator(self) -> AnyCommunicator:
        """Spans the first rank of the group on each host."""
        return self.communicator("inter")

    def communicator(self, scope: str) -> AnyCommunicator:
        """One of the three by name: "global", "intra" or "inter"; opened at the first call."""
        found = self._communicators.get(scope)
        if found is None:
            found = self._communicators[scope] = self._open(scope)
        return found

    def adopt(self, communicator: Communicator) -> None:
        """Takes a communicator of all ranks that is already open."""
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
