"""Groups of ranks: joining a group, sub-groups, and the default group."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal, overload

from bagua import config, extension, log, process_state, shared_memory
from bagua.errors import BaguaError
from bagua.handle import Handle
from bagua.object_collectives import ObjectCollectives
from bagua.process_state import process

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import DTypeLike

__all__ = ["Group", "Handle", "default", "join", "rank", "set_default", "shutdown", "stats", "world_size"]


class Group(ObjectCollectives):
    """A group of ranks that communicate with each other. Ranks in its methods are ranks of the group.

    A `with` block leaves the group at its end. `with bagua.init() as group:` does what `shutdown` does, even after a
    `shrink` inside the block. If the block raises, the other ranks raise PeerRaisedError with the exception's text.
    """

    def __init__(
        self,
        communicator: extension.Communicator,
        *,
        local_rank: int | None = None,
        local_world_size: int | None = None,
    ) -> None:
        super().__init__(communicator)
        self._local_rank = local_rank
        self._local_world_size = local_world_size
        self._former_ranks: list[int] | None = None
        self.used_by_torch = False
        """True if a process group of torch.distributed uses this group. Destroying that leaves this group; `shutdown()`
        does not.
        """
        # True if this was the default group when its `with` block was entered.
        self._ends_job = False
        self.is_world_of_torch_api = False
        """True if this is the group of `bagua.torch_api`, which replaces it in `rebuild()`."""
        # Ranks in order -> number of sub-groups of them so far, from which all members derive the same name.
        self._subgroups: dict[tuple[int, ...], int] = {}
        # The second group with the same name (two worlds in one process) gets a number in `stats()`.
        self._key = next(key for key in _keys(self.name) if key not in process.groups)
        process.groups[self._key] = self

    def __repr__(self) -> str:
        return f"<bagua.Group {self.name!r}: rank {self.rank} of {self.size}>"

    def __enter__(self) -> Group:
        self._ends_job = process.default_group is self
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if self._ends_job:
            end_job(error)
            return
        if error is not None and not isinstance(error, SystemExit):
            self._communicator.raise_(type(error).__name__, str(error))
        self.leave()

    @property
    def name(self) -> str:
        """Name of the group in reports and errors, and its key in `stats()`."""
        return self._communicator.name

    @property
    def ranks(self) -> list[int]:
        """World ranks of the members, by group rank."""
        return self._communicator.ranks

    @property
    def hosts(self) -> list[list[int]]:
        """Group ranks on each host. Hosts are in the order of their first rank."""
        return self._communicator.hosts

    @property
    def local_rank(self) -> int:
        """Rank of this process among the ranks on its host."""
        return self._host().index(self.rank) if self._local_rank is None else self._local_rank

    @property
    def local_world_size(self) -> int:
        """Number of ranks of the group on this host."""
        return len(self._host()) if self._local_world_size is None else self._local_world_size

    def _host(self) -> list[int]:
        return next(host for host in self.hosts if self.rank in host)

    @property
    def timeout(self) -> float:
        """Default timeout of an operation, in seconds."""
        return self._communicator.timeout

    @property
    def collective(self) -> str:
        """How the ranks communicate: "solo" (one rank), "shm" (shared memory), "net" (sockets) or "hier" (both)."""
        return self._communicator.collective

    @property
    def transports(self) -> list[str]:
        """Name of the transport to each rank, "self" for this one."""
        return self._communicator.transports

    def stats(self) -> dict[str, Any]:
        """Returns counters since the group was built. Times are in seconds."""
        return self._communicator.stats()

    def new_group(self, ranks: Sequence[int], ordered: bool = False) -> Group | None:
        """Makes a group of some of this group's ranks. Returns None if this rank is not one of them.

        Collective among the members, which call it in the same order with the same ranks; other ranks need not call it.
        The new group numbers its members in ascending order of `ranks`, or in the order given if `ordered`. Raises
        ValueError for no ranks, duplicates, or ranks outside this group.
        """
        chosen = [self._rank(rank, "ranks") for rank in ranks]
        if not ordered:
            chosen.sort()
        if not chosen or len(set(chosen)) != len(chosen):
            raise ValueError(f"a group needs at least one rank, and each rank only once; got {list(ranks)}")
        if self.rank not in chosen:
            return None
        number = self._subgroups[tuple(chosen)] = self._subgroups.get(tuple(chosen), 0) + 1
        name = f"{self.name}/{','.join(map(str, chosen))}" + (f"#{number}" if number > 1 else "")
        communicator = self._communicator.subgroup(chosen, name)
        if communicator is None:
            return None
        log.log.debug("rank %d of %d made group %r of ranks %s", self.rank, self.size, name, chosen)
        return Group(communicator)

    subgroup = new_group
    """Alias of `new_group`."""

    def shrink(self, timeout: float | None = None, quorum: Literal["majority", "any"] = "majority") -> Group:
        """Makes a group of the remaining ranks, in the order of their ranks here. Leaves this group and its sub-groups.

        Every remaining rank calls it after PeerLostError or PeerRaisedError. (After an exception of one rank, all ranks
        may remain.) It waits up to `timeout` seconds (None: the group's) for ranks that are running and have not called
        it yet. If this was the default group, the new group becomes the default. Its `former_ranks` has each rank's
        number here.

        `quorum`, equal on all ranks: "majority" does not count ranks whose process has verifiably ended or that have
        left. Of the others, more than half must take part, or exactly half including the lowest rank. "any" has no such
        condition: if the network splits the job, both parts may continue.

        Raises BaguaTimeoutError naming the ranks that have not called it, after which the call can be repeated;
        BaguaError that says "quorum" and which ranks may still be running; PeerLostError naming this rank if the other
        ranks continued without it; ValueError for a sub-group.
        """
        if self.is_world_of_torch_api:
            raise BaguaError("this is the group of init_process_group: call bagua.torch_api.rebuild() instead")
        return self._shrink(timeout, quorum)

    def _shrink(self, timeout: float | None, quorum: str) -> Group:
        if timeout is not None and not timeout > 0:
            raise ValueError(f"timeout is {timeout} s; it must be positive")
        if self.used_by_torch:
            raise BaguaError(
                "this group belongs to torch.distributed: call its destroy_process_group and init_process_group instead"
            )
        communicator, former = self._communicator.shrink(timeout, quorum=quorum)
        was_default = process.default_group is self
        self.leave()
        machine = next(ranks for ranks in communicator.machines if communicator.rank in ranks)
        shrunk = Group(communicator, local_rank=machine.index(communicator.rank), local_world_size=len(machine))
        shrunk._former_ranks = former
        log.joined(communicator)
        if was_default:
            process.default_group = shrunk
        return shrunk

    @property
    def former_ranks(self) -> list[int] | None:
        """For a group made by `shrink`: each member's rank in the previous group. None for other groups."""
        return None if self._former_ranks is None else list(self._former_ranks)

    @property
    def view(self) -> int:
        """Number of the membership: 1 for a newly joined group, higher after each `shrink`."""
        return self._communicator.view

    def empty(self, shape: int | tuple[int, ...], dtype: DTypeLike = "float32") -> np.ndarray[Any, Any]:
        """Returns a new array of zeros in memory that the other ranks on this host can map.

        If all ranks pass such arrays to a verb, the ranks read each other's memory directly, which is several times
        faster than with other arrays. This call is local; the ranks map each other's memory in the first verb. The
        memory is freed with the array and its views, and may outlive the group.
        """
        return shared_memory.empty(self._communicator, shape, dtype)

    def abort(self, reason: str = "aborted by the user") -> None:
        """Ends every wait in this group, on every rank, with AbortedError."""
        self._communicator.abort(reason)

    def leave(self) -> None:
        """Leaves the group and its sub-groups, and closes this rank's connections. Idempotent."""
        # Write the flight record of a failure that no call of this rank has raised yet.
        with contextlib.suppress(BaguaError):
            self._communicator.cause()
        self._communicator.leave()
        if process.groups.get(self._key) is self:
            del process.groups[self._key]
        if process.default_group is self:
            process.default_group = None


def _keys(name: str) -> Iterator[str]:
    yield name
    yield from (f"{name}#{number}" for number in itertools.count(2))


@overload
def default(*, required: Literal[True]) -> Group: ...
@overload
def default(*, required: bool = False) -> Group | None: ...
def default(*, required: bool = False) -> Group | None:
    """Returns the default group. Before `init()`, returns None, or raises BaguaError if `required`."""
    found: Group | None = process.default_group
    if found is None and required:
        raise BaguaError("there is no default group: call bagua.init() first")
    return found


def rank() -> int:
    """Returns this process's rank in the default group. Raises BaguaError before `init()`."""
    return default(required=True).rank


def world_size() -> int:
    """Returns the number of ranks in the default group. Raises BaguaError before `init()`."""
    return default(required=True).size


def set_default(group: Group | None) -> None:
    """Makes a group the default group, which the functions of `bagua` use."""
    process.default_group = group


def join(
    rank: int,
    world_size: int,
    spread: Callable[[bytes], Sequence[bytes]],
    *,
    name: str = "world",
    towards: tuple[str, int] | None = None,
    local_rank: int | None = None,
    local_world_size: int | None = None,
    secret: str | bytes | None = None,
    timeout: float | None = None,
    waiting: log.Waiting | None = None,
) -> Group:
    """Joins a group, with the caller's own way to exchange addresses. Returns the group.

    `spread` takes this rank's opaque address (a few hundred bytes) and returns every rank's address, by rank.

    `towards` is a host and port in the direction of the peers: this rank listens on the interface that routes there.
    None listens on the loopback interface if `local_world_size` says that all ranks are on this host, and on the
    interface of the default route otherwise.

    `timeout` is in seconds. It limits joining, and is the default of operations. `secret` proves to the other ranks
    that this rank belongs to the job. `waiting` warns of ranks that do not come, and measures the time since it was
    made.
    """
    log.configure()
    waiting = waiting or log.Waiting(rank, world_size)
    chosen = config.settings(timeout=timeout, secret=secret)
    process_state.install(_leave_all)
    if not process.settings_checked and not local_rank:
        # One warning per host is enough.
        process.settings_checked = True
        config.warn_of_misspelt()
    host = listen_host(towards, world_size, local_world_size)
    listening = extension.Bootstrap(parameters(chosen, rank, world_size, name=name, listen_host=host))
    with contextlib.closing(listening) as bootstrap:
        addresses = [bytes(address) for address in spread(bootstrap.address())]
        process_state.note_job(b"".join(addresses))
        communicator = bootstrap.connect(addresses, waiting)
    log.joined(communicator)
    return Group(communicator, local_rank=local_rank, local_world_size=local_world_size)


def parameters(
    chosen: config.Settings,
    rank: int,
    world_size: int,
    *,
    name: str,
    listen_host: str,
    secret: bytes | None = None,
) -> extension.GroupConfig:
    """Returns the parameters of a group that listens on a free port. `secret` None takes the secret of `chosen`."""
    return extension.GroupConfig(
        rank,
        world_size,
        chosen,
        name=name,
        secret=chosen.secret if secret is None else secret,
        listen_host=listen_host,
    )


# Addresses that are reserved for documentation: the routes to them are the default routes, and nothing is sent.
_ELSEWHERE = (("192.0.2.1", 9), ("2001:db8::1", 9))

# Try the IPv4 and the IPv6 loopback address, because a host may lack IPv4.
_LOOPBACK = (("127.0.0.1", 9), ("::1", 9))


def listen_host(towards: tuple[str, int] | None, world_size: int, local_world_size: int | None) -> str:
    """Returns the address that this rank listens on. The arguments are as in `join`."""
    if towards is not None:
        return extension.local_address_towards(*towards)
    on_one_host = world_size == 1 or local_world_size == world_size
    for place in _LOOPBACK if on_one_host else (*_ELSEWHERE, *_LOOPBACK):
        with contextlib.suppress(BaguaError):
            return extension.local_address_towards(*place)
    return "127.0.0.1"


def stats() -> dict[str, Any]:
    """Returns counters of every group of this process: `stats()["groups"][name]["ops"][kind]` counts one kind of
    operation.

    `stats()["groups"][name]["connections"]` has the numbers of open connections: "control", which all groups of a rank
    share, and "data", for the group's channels and messages, with the numbers of those "opened" and "closed" so far.
    "join_s" is the time in seconds from when this rank listened until all ranks were connected. "agreement" has the
    "messages" and "bytes" that this rank sent to agree on the group, if `shrink` made it.

    `stats()["elastic"]` describes an elastic job: "view", "ranks", "door" ("host:port") and "connections_refused". It
    is None in other jobs.
    """
    groups = {group._key: group.stats() for group in sorted(process.live_groups(), key=lambda group: group._key)}
    return {"groups": groups, "elastic": None if process.elastic_stats is None else process.elastic_stats()}


def shutdown() -> None:
    """Leaves every group, even after a failure. Running operations end with AbortedError. Idempotent.

    Groups of torch.distributed's backend "bagua" stay until torch destroys them.
    """
    _leave_all(torchs=False)


def end_job(error: BaseException | None) -> None:
    """Ends the job as `shutdown` does, at the end of a `with` block. `error` is the exception that ended the block, or
    None.

    If the block raised, the other ranks first receive the error, as they do for an uncaught exception, and so do not
    wait for this rank.
    """
    if error is None or isinstance(error, SystemExit):
        shutdown()
        return
    process_state.report(type(error), error)
    # The group has failed, so leaving it may raise too. The caller gets the error of the block.
    with contextlib.suppress(Exception):
        shutdown()


def _leave_all(torchs: bool = True) -> None:
    first: BaseException | None = None
    for hook in list(process.shutdown_hooks):
        try:
            hook()
        except Exception as error:
            first = first or error
    # Leave the world last, because leaving it leaves its sub-groups.
    for group in sorted(process.live_groups(), key=lambda group: group.size):
        if torchs or not group.used_by_torch:
            group.leave()
    process.default_group = None
    if first is not None:
        raise first
