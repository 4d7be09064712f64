"""Groups of ranks: joining one, its verbs on arrays and objects, sub-groups, and the default group."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal, overload

from bagua import config, engine, lifecycle, log, shared_memory
from bagua.errors import BaguaError
from bagua.handle import Handle
from bagua.lifecycle import process
from bagua.objects import ObjectCollectives

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import DTypeLike

__all__ = ["Group", "Handle", "default", "join", "rank", "set_default", "shutdown", "stats", "world_size"]


class Group(ObjectCollectives):
    """Ranks that work together. Ranks in its methods are ranks of the group.

    A `with` block leaves the group at its end: `with bagua.init() as group:` ends as `shutdown` does, also after a
    `shrink` inside it. If the block raises, the other ranks get PeerRaisedError with the exception's text.
    """

    def __init__(
        self, communicator: engine.Communicator, *, local_rank: int | None = None, local_world_size: int | None = None
    ) -> None:
        super().__init__(communicator)
        self._local_rank = local_rank
        self._local_world_size = local_world_size
        self._former_ranks: list[int] | None = None
        self.used_by_torch = False
        """Whether a process group of torch.distributed uses it: destroying that leaves it, `shutdown()` does not."""
        # True in a `with` block that was entered when this was the default group.
        self._ends_job = False
        self.is_world_of_torch_api = False
        """Whether it is that of `bagua.torch_api`, which replaces it by `rebuild()`."""
        # How often ranks in an order became a sub-group, so that the members name theirs alike.
        self._subgroups: dict[tuple[int, ...], int] = {}
        # The second group of one name (two worlds in one process) gets a number in `stats()`.
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
        """For reports and errors; the key in `stats()`."""
        return self._communicator.name

    @property
    def ranks(self) -> list[int]:
        """World ranks of the members, by group rank."""
        return self._communicator.ranks

    @property
    def hosts(self) -> list[list[int]]:
        """Group ranks on each host, hosts in the order of their first rank."""
        return self._communicator.hosts

    @property
    def local_rank(self) -> int:
        """This process's place among the ranks on its host."""
        return self._host().index(self.rank) if self._local_rank is None else self._local_rank

    @property
    def local_world_size(self) -> int:
        """Ranks of the group on this host."""
        return len(self._host()) if self._local_world_size is None else self._local_world_size

    def _host(self) -> list[int]:
        return next(host for host in self.hosts if self.rank in host)

    @property
    def timeout(self) -> float:
        """Default deadline of an operation, in seconds."""
        return self._communicator.timeout

    @property
    def collective(self) -> str:
        """How the ranks are combined: "solo", "shm", "net" or "hier"."""
        return self._communicator.collective

    @property
    def transports(self) -> list[str]:
        """Name of the transport towards each rank, "self" for this one."""
        return self._communicator.transports

    def stats(self) -> dict[str, Any]:
        """Counters since the group was built, times in seconds."""
        return self._communicator.stats()

    def new_group(self, ranks: Sequence[int], ordered: bool = False) -> Group | None:
        """The group of some members; None when this rank is not among them.

        Collective among the members, who call it in the same order for the same ranks; local on other ranks. The new
        group numbers them in ascending order; with `ordered` in the order of `ranks`, whose first one is its rank 0.
        """
        chosen = [self._rank(rank, "ranks") for rank in ranks]
        if not ordered:
            chosen.sort()
        if not chosen or len(set(chosen)) != len(chosen):
            raise ValueError(f"a group needs ranks, each of them once, not {list(ranks)}")
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
    """The same as `new_group`."""

    def shrink(self, timeout: float | None = None, quorum: Literal["majority", "any"] = "majority") -> Group:
        """The group of the ranks that are left, in the order of their ranks here. This one and its sub-groups are left.

        Every rank that is left calls it, after PeerLostError or PeerRaisedError, and waits up to `timeout` seconds
        (None: the group's) for those that run and have not called. After an exception of one rank all may be left. If
        this was the default group, the new one is. `former_ranks` of the new group has each rank's rank here.

        "majority": ranks whose process is known to have ended, or that have left, do not count; of the others more than
        half must be here, or half with the lowest. "any" goes on without that: two partitions of the job may then both
        go on. All ranks pass the same.

        Raises BaguaTimeoutError naming the ranks that have not called, after which the call can be repeated;
        BaguaError that says "quorum" and which ranks may still run; PeerLostError naming this rank when the others went
        on without it; ValueError for a sub-group.
        """
        if self.is_world_of_torch_api:
            raise BaguaError("this is the group of init_process_group: call bagua.torch_api.rebuild() instead")
        return self._shrink(timeout, quorum)

    def _shrink(self, timeout: float | None, quorum: str) -> Group:
        if timeout is not None and not timeout > 0:
            raise ValueError(f"timeout is {timeout} s; it must be positive")
        if self.used_by_torch:
            raise BaguaError(
                "this group is that of torch.distributed: call its destroy_process_group and init_process_group instead"
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
        """Of a group made by `shrink`: the rank of each of its ranks in the group before. None for any other group."""
        return None if self._former_ranks is None else list(self._former_ranks)

    @property
    def view(self) -> int:
        """Number of the membership: 1 for a group that was joined, and grows with every `shrink`."""
        return self._communicator.view

    def empty(self, shape: int | tuple[int, ...], dtype: DTypeLike = "float32") -> np.ndarray[Any, Any]:
        """A new array, of zeros, in memory that the other ranks of this host can map.

        Verbs on tensors that lie in such arrays on all ranks work on the peers' memory in place, several times faster
        than on any other array. Local: the ranks map each other's memory in the first such verb. The memory goes with
        the array and its views, and may outlive the group.
        """
        return shared_memory.empty(self._communicator, shape, dtype)

    def abort(self, reason: str = "aborted by the user") -> None:
        """Ends every wait of the group, on every rank, with AbortedError."""
        self._communicator.abort(reason)

    def leave(self) -> None:
        """Leaves in order and closes this rank's connections. Idempotent; leaving the world leaves its sub-groups."""
        # A failure that no call of this rank has raised gets its flight record here.
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
    """The default group; None, or a BaguaError when it is `required`, before `init()`."""
    found: Group | None = process.default_group
    if found is None and required:
        raise BaguaError("there is no default group: call bagua.init() first")
    return found


def rank() -> int:
    """This process's rank in the default group. BaguaError before `init()`."""
    return default(required=True).rank


def world_size() -> int:
    """Number of ranks of the default group. BaguaError before `init()`."""
    return default(required=True).size


def set_default(group: Group | None) -> None:
    """Makes a group the one that the functions of `bagua` use."""
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
    """Builds a group with whatever the caller has to spread addresses.

    `spread` gets this rank's opaque address (a few hundred bytes) and returns every rank's, by rank. `towards` is a
    host and a port in whose direction the peers are: this rank listens on the interface of that route; None listens on
    loopback, or on the default route when other hosts take part according to `local_world_size`. `timeout` is in
    seconds, for joining and as the default of operations. `secret` proves to the others that this rank belongs to the
    job. `waiting` warns of ranks that do not come, and counts the time since it was made.
    """
    log.configure()
    waiting = waiting or log.Waiting(rank, world_size)
    chosen = config.settings(timeout=timeout, secret=secret)
    lifecycle.install(_leave_all)
    if not process.settings_checked and not local_rank:
        # One rank of a host says it for all.
        process.settings_checked = True
        config.warn_of_misspelt()
    host = listen_host(towards, world_size, local_world_size)
    listening = engine.Bootstrap(parameters(chosen, rank, world_size, name=name, listen_host=host))
    with contextlib.closing(listening) as bootstrap:
        addresses = [bytes(address) for address in spread(bootstrap.address())]
        lifecycle.note_job(b"".join(addresses))
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
) -> engine.GroupConfig:
    """Parameters of a group that listens on any free port of `listen_host`; `secret` None is that of `chosen`."""
    return engine.GroupConfig(
        rank,
        world_size,
        chosen,
        name=name,
        secret=chosen.secret if secret is None else secret,
        listen_host=listen_host,
    )


# Addresses that are reserved for documentation: the routes to them are the default routes, and nothing is sent.
_ELSEWHERE = (("192.0.2.1", 9), ("2001:db8::1", 9))

# The second one counts on a host without IPv4.
_LOOPBACK = (("127.0.0.1", 9), ("::1", 9))


def listen_host(towards: tuple[str, int] | None, world_size: int, local_world_size: int | None) -> str:
    """The address that this rank listens on, as `join` says."""
    if towards is not None:
        return engine.local_address_towards(*towards)
    on_one_host = world_size == 1 or local_world_size == world_size
    for place in _LOOPBACK if on_one_host else (*_ELSEWHERE, *_LOOPBACK):
        with contextlib.suppress(BaguaError):
            return engine.local_address_towards(*place)
    return "127.0.0.1"


def stats() -> dict[str, Any]:
    """What every group of this process did: `stats()["groups"][name]["ops"][kind]` counts one kind of operation.

    `stats()["groups"][name]["connections"]` has the numbers of open connections: "control", which all groups of a rank
    share, and "data", those of the group's channels and messages, of which so many were "opened" and "closed". "join_s"
    is the time in seconds from when this rank listened until all ranks were connected. "agreement" has the "messages"
    and "bytes" that this rank sent to agree on the group, where another one was shrunk to it.

    `stats()["elastic"]` is that of an elastic job, None in other jobs: "view", "ranks", "door" ("host:port") and
    "connections_refused".
    """
    groups = {group._key: group.stats() for group in sorted(process.live_groups(), key=lambda group: group._key)}
    return {"groups": groups, "elastic": None if process.elastic_stats is None else process.elastic_stats()}


def shutdown() -> None:
    """Leaves every group, also after a failure. Operations that are still running end with AbortedError. Idempotent.

    Groups of torch.distributed's backend "bagua" go on until torch destroys them.
    """
    _leave_all(torchs=False)


def end_job(error: BaseException | None) -> None:
    """Does what `shutdown` does at the end of a `with` block, which `error` has ended unless it is None.

    The other ranks do not wait for a rank that raised: they get the error first, as they get an uncaught exception.
    """
    if error is None or isinstance(error, SystemExit):
        shutdown()
        return
    lifecycle.report(type(error), error)
    # The group has failed, so that leaving it may raise too. The caller gets the error of the block.
    with contextlib.suppress(Exception):
        shutdown()


def _leave_all(torchs: bool = True) -> None:
    first: BaseException | None = None
    for hook in list(process.shutdown_hooks):
        try:
            hook()
        except Exception as error:
            first = first or error
    # The world last: leaving it leaves its sub-groups.
    for group in sorted(process.live_groups(), key=lambda group: group.size):
        if torchs or not group.used_by_torch:
            group.leave()
    process.default_group = None
    if first is not None:
        raise first
