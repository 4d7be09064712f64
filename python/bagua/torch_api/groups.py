"""Process groups of the torch layer: the default group, sub-groups, and the communicators behind them.

A :class:`BaguaProcessGroup` is a set of ranks; a :class:`Communicator` is what its members talk through. A rank that is
not a member holds :data:`NON_COMM_MEMBER` in its place, on which every collective returns without effect, as in the
original.
"""

from __future__ import annotations

import operator
import os
import weakref
from collections.abc import MutableMapping, Sequence
from typing import Any, Literal

import torch.distributed as dist

from bagua import engine
from bagua import group as neutral
from bagua.errors import AbortedError, BaguaError


class Communicator:
    """The ranks of one group as this member sees them, and the verbs by address in ``raw``."""

    def __init__(self, group: neutral.Group) -> None:
        self.group = group
        self.raw: engine.Communicator = group.communicator

    def rank(self) -> int:
        """This process's rank in the group."""
        return self.raw.rank

    def nranks(self) -> int:
        """How many ranks the group has."""
        return self.raw.size

    def abort(self) -> None:
        """Ends every wait of the group, on every rank, with :class:`bagua.errors.AbortedError`."""
        self.raw.abort("abort() was called")

    def check_abort(self) -> bool:
        """True when the group was aborted; raises what else ended it."""
        try:
            self.raw.cause()
        except AbortedError:
            return True
        return False


class NonMember:
    """Stands where a communicator would, on ranks that are not in the group."""

    def rank(self) -> int:
        """-1: not a rank of the group."""
        return -1

    def nranks(self) -> int:
        """-1: the group's size is nothing that this rank may rely on."""
        return -1

    def abort(self) -> None:
        """Nothing to abort."""

    def check_abort(self) -> bool:
        """Never aborted."""
        return False


NON_COMM_MEMBER = NonMember()

AnyCommunicator = Communicator | NonMember


class BaguaProcessGroup:
    """A set of ranks of the world, in ascending order, whose members can communicate.

    ``stream`` is kept for users of the original's signature; on CPU there is nothing to order on it.
    """

    def __init__(self, ranks: Sequence[int], stream: Any = None, group_name: str = "") -> None:
        self.ranks = sorted(ranks)
        self.stream = stream
        self.group_name = group_name
        self._communicators: dict[str, AnyCommunicator] = {}

    def __repr__(self) -> str:
        return f"BaguaProcessGroup(ranks={self.ranks}, group_name={self.group_name!r})"

    def get_global_communicator(self) -> AnyCommunicator:
        """Spans every rank of the group."""
        return self._communicator("global")

    def get_intra_node_communicator(self) -> AnyCommunicator:
        """Spans the ranks of the group on this rank's host."""
        return self._communicator("intra")

    def get_inter_node_communicator(self) -> AnyCommunicator:
        """Spans the first rank of the group on each host."""
        return self._communicator("inter")

    def _communicator(self, part: str) -> AnyCommunicator:
        found = self._communicators.get(part)
        if found is None:
            found = self._communicators[part] = self._open(part)
        return found

    def _open(self, part: str) -> AnyCommunicator:
        world = _world()
        if world.raw.rank not in self.ranks:
            return NON_COMM_MEMBER
        if part == "global":
            return _subgroup(world, self.ranks)
        whole = self.get_global_communicator()
        assert isinstance(whole, Communicator)
        hosts = whole.raw.hosts
        if part == "inter":
            members = [host[0] for host in hosts]
        else:
            members = next(host for host in hosts if whole.rank() in host)
        return _subgroup(whole, members)


def _subgroup(parent: Communicator, ranks: list[int]) -> AnyCommunicator:
    group = parent.group.new_group(ranks)
    return NON_COMM_MEMBER if group is None else Communicator(group)


_patched: weakref.WeakKeyDictionary[dist.ProcessGroup, BaguaProcessGroup] = weakref.WeakKeyDictionary()


class _State:
    """What exists between init_process_group and destroy_process_group."""

    def __init__(self) -> None:
        self.default: BaguaProcessGroup | None = None
        # The default group's communicator, for verbs that are given none.
        self.world: Communicator | None = None
        # World rank -> rank in the group, of every group. Weakly: a group that its owner forgets is left.
        self.ranks_of: MutableMapping[BaguaProcessGroup, dict[int, int]] = weakref.WeakKeyDictionary()

    def clear(self) -> None:
        self.default = self.world = None
        self.ranks_of.clear()
        _patched.clear()


state = _State()

# A forked child (a DataLoader's worker) is not a rank. What it forgets here, the core does not close: it is the
# parent's.
os.register_at_fork(after_in_child=state.clear)

# The original's name for it.
_pg_group_ranks = state.ranks_of


def is_initialized() -> bool:
    """True between init_process_group and destroy_process_group."""
    return state.default is not None


def _get_default_group() -> BaguaProcessGroup:
    if state.default is None:
        raise BaguaError("there is no process group yet: call bagua.torch_api.init_process_group() first")
    return state.default


def _world() -> Communicator:
    world = _get_default_group().get_global_communicator()
    assert isinstance(world, Communicator)
    return world


def adopt_world(world: neutral.Group) -> BaguaProcessGroup:
    """Makes a group that was just joined the default process group."""
    group = BaguaProcessGroup(range(world.size), None, world.name)
    state.world = group._communicators["global"] = Communicator(world)
    state.default = group
    _remember(group)
    return group


def _remember(group: BaguaProcessGroup) -> None:
    state.ranks_of[group] = {world: rank for rank, world in enumerate(group.ranks)}


def _rank_not_in_group(group: BaguaProcessGroup | None = None) -> bool:
    """True when this process is not a member of ``group`` (``None``: the default group, of which everybody is)."""
    return group is not None and _world().rank() not in group.ranks


def new_group(ranks: Sequence[int] | None = None, stream: Any = None) -> BaguaProcessGroup:
    """A group of some ranks of the world (``None``: all).

    Its members must call this in the same order for the same ranks.
    """
    size = _world().nranks()
    chosen = list(range(size)) if ranks is None else sorted(map(operator.index, ranks))
    if not chosen:
        raise ValueError("new_group: ranks is empty")
    if len(set(chosen)) != len(chosen):
        raise ValueError(f"new_group: a rank appears twice in {chosen}")
    outside = [rank for rank in chosen if not 0 <= rank < size]
    if outside:
        raise ValueError(f"new_group: ranks {outside} are not in a world of {size}")
    group = BaguaProcessGroup(chosen, stream)
    _remember(group)
    # Opened now and not at first use, so that a peer that is missing shows here.
    communicator = group.get_global_communicator()
    if isinstance(communicator, Communicator):
        group.group_name = communicator.group.name
    return group


def get_communicator(group_name: str, comm_name: Literal["global", "inter", "intra"]) -> AnyCommunicator:
    """A communicator of the group of this name: of all its ranks, of its hosts' first ranks, or of those on this host.

    ``NON_COMM_MEMBER`` on a rank that is not among them. Opening one that is new is up to all its members. ValueError
    for a name that no group, or no communicator, has.
    """
    if comm_name not in ("global", "inter", "intra"):
        raise ValueError(f"get_communicator: {comm_name!r} is none of 'global', 'inter' and 'intra'")
    _get_default_group()
    for group in state.ranks_of:
        if group.group_name == group_name:
            return group._communicator(comm_name)
    known = sorted(group.group_name for group in state.ranks_of if group.group_name)
    raise ValueError(f"get_communicator: no group is called {group_name!r}, only {', '.join(map(repr, known))}")


def from_torch_group(group: dist.ProcessGroup, stream: Any = None) -> BaguaProcessGroup:
    """A group of the same ranks as a group of torch.distributed. Its members must call this."""
    return new_group(dist.get_process_group_ranks(group), stream)


def to_bagua_process_group(group: BaguaProcessGroup | dist.ProcessGroup | None) -> BaguaProcessGroup:
    """``None``: the default group; a group of torch: the one patched to it; one of ours: itself."""
    if group is None:
        return _get_default_group()
    if isinstance(group, BaguaProcessGroup):
        return group
    if isinstance(group, dist.ProcessGroup):
        bagua_patch(group)
        return _patched[group]
    raise TypeError(f"a process group of bagua or torch.distributed is needed, not {type(group).__name__}")


def bagua_patch(self: dist.ProcessGroup, stream: Any = None) -> dist.ProcessGroup:
    """Gives a group of torch.distributed its counterpart, reachable as ``group.bagua_pg``."""
    if self not in _patched:
        _patched[self] = from_torch_group(self, stream)
    return self


def _bagua_pg(self: dist.ProcessGroup) -> BaguaProcessGroup:
    return to_bagua_process_group(self)


def _patch_torch() -> None:
    group = dist.ProcessGroup
    group.bagua_patch = bagua_patch  # type: ignore[attr-defined]
    group.bagua_pg = property(_bagua_pg)  # type: ignore[attr-defined]
    for part in ("global", "inter_node", "intra_node"):
        name = f"get_{part}_communicator"
        setattr(group, f"bagua_{name}", _forward(name))


def _forward(name: str) -> Any:
    def forward(self: dist.ProcessGroup) -> AnyCommunicator:
        found: AnyCommunicator = getattr(to_bagua_process_group(self), name)()
        return found

    return forward


_patch_torch()
