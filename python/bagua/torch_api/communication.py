"""Joining and leaving the job, the default group, and the collectives on it: the names of the original's module.

``comm`` is what ``get_global_communicator()`` returns, or a process group, or ``None`` for the default group. On a rank
outside the group every collective returns without effect.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from bagua import config, launcher, metrics, torch_store
from bagua import group as neutral
from bagua.lifecycle import forget_groups, process

from . import default_collectives, env
from .default_collectives import *  # noqa: F403 - the collectives, which are listed there
from .default_collectives import default_communicator, default_group
from .membership import elastic as elastic_job
from .membership import torch_destroy, torch_init
from .membership.environment_store import environment_store
from .membership.store_client import StoreClient
from .model_engine import bucket_engine
from .model_engine.bucket_engine import BucketEngine
from .process_group import (
    NON_COMM_MEMBER,
    AnyCommunicator,
    Communicator,
    Handle,
    ProcessGroup,
    ReduceOp,
)
from .process_group.state import group_state as _state

__all__ = [
    "NON_COMM_MEMBER",
    "BaguaProcessGroup",
    "Communicator",
    "Handle",
    "ReduceOp",
    "_get_default_group",
    "_pg_group_ranks",
    "_rank_not_in_group",
    "destroy_process_group",
    "empty",
    "from_torch_group",
    "get_backend",
    "get_communicator",
    "init_process_group",
    "is_initialized",
    "new_group",
    "to_bagua_process_group",
]
__all__ += default_collectives.__all__

# The original's name for it.
_pg_group_ranks = _state.group_ranks


# --- groups -----------------------------------------------------------------------------------------------------------


class BaguaProcessGroup(ProcessGroup):
    """A set of ranks of the world. ``stream`` exists for the original's signature."""

    def __init__(self, ranks: Sequence[int], stream: Any = None, group_name: str = "") -> None:
        super().__init__(ranks, default_communicator, stream=stream, group_name=group_name)


def is_initialized() -> bool:
    """True between init_process_group and destroy_process_group."""
    return _state.default_group is not None


def _get_default_group() -> BaguaProcessGroup:
    return cast("BaguaProcessGroup", default_group())


def _remember(group: BaguaProcessGroup) -> None:
    _state.group_ranks[group] = {world: rank for rank, world in enumerate(group.ranks)}


def _rank_not_in_group(group: ProcessGroup | None = None) -> bool:
    """True when this process is not a member of ``group`` (``None``: the default group, which has every rank)."""
    return group is not None and default_communicator().rank() not in group.ranks


def new_group(ranks: Sequence[int] | None = None, stream: Any = None) -> BaguaProcessGroup:
    """A group of some ranks of the world (``None``: all).

    Collective among the members, who call it in the same order for the same ranks; local on other ranks.
    """
    size = default_communicator().nranks()
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
    # Opened now and not at first use, so that a missing member is an error of this call.
    communicator = group.get_global_communicator()
    if isinstance(communicator, Communicator):
        group.group_name = communicator.group.name
    return group


def get_communicator(group_name: str, comm_name: Literal["global", "inter", "intra"]) -> AnyCommunicator:
    """A communicator of the group of this name: of all its ranks, of its hosts' first ranks, or of those on this host.

    ``NON_COMM_MEMBER`` on a rank outside it. A new one is opened collectively by its members. ValueError for an unknown
    group name or communicator name.
    """
    if comm_name not in ("global", "inter", "intra"):
        raise ValueError(f"get_communicator: comm_name must be one of global, inter, intra; got {comm_name!r}")
    _get_default_group()
    groups = list(_state.group_ranks)
    for group in groups:
        if group.group_name == group_name:
            return group.communicator(comm_name)
    known = sorted(group.group_name for group in groups if group.group_name)
    raise ValueError(f"get_communicator: no group is called {group_name!r}, only {', '.join(map(repr, known))}")


def from_torch_group(group: dist.ProcessGroup, stream: Any = None) -> BaguaProcessGroup:
    """A group of the same ranks as a group of torch.distributed. Collective among its members, as :func:`new_group`."""
    return new_group(dist.get_process_group_ranks(group), stream)


def to_bagua_process_group(group: ProcessGroup | dist.ProcessGroup | None) -> ProcessGroup:
    """``None``: the default group; a group of torch.distributed: its counterpart; a group of bagua: itself."""
    if group is None:
        return _get_default_group()
    if isinstance(group, ProcessGroup):
        return group
    if isinstance(group, dist.ProcessGroup):
        bagua_patch(group)
        return _state.torch_groups[group]
    raise TypeError(f"a process group of bagua or torch.distributed is needed, not {type(group).__name__}")


def group_of(given: ProcessGroup | dist.ProcessGroup | None) -> ProcessGroup:
    """As :func:`to_bagua_process_group`. Where torch.distributed's world has the backend "bagua", it becomes the
    default group if there is none.
    """
    if not isinstance(given, ProcessGroup) and not is_initialized() and process.torchs_world is not None:
        init_process_group()
    return to_bagua_process_group(given)


def bagua_patch(self: dist.ProcessGroup, stream: Any = None) -> dist.ProcessGroup:
    """Creates ``group.bagua_pg`` of a group of torch.distributed. Collective at the first call, as `new_group`."""
    if self not in _state.torch_groups:
        _state.torch_groups[self] = from_torch_group(self, stream)
    return self


def empty(
    shape: int | Sequence[int], dtype: torch.dtype | None = None, group: ProcessGroup | dist.ProcessGroup | None = None
) -> torch.Tensor:
    """A new tensor of zeros in an arena: memory that the other ranks of this host can map, on which collectives need no
    copy.

    Local: the ranks map each other's arenas in the first collective on tensors that lie in arenas on all of them, of
    whichever group. ``dtype`` ``None`` is torch's default dtype. The memory is released with the last tensor that uses
    it, and may outlive the group. ValueError on a rank outside ``group`` (``None``: the default group).
    """
    world = default_communicator()
    # Not the group's communicator, which may not be open yet.
    if isinstance(group, dist.ProcessGroup):
        ranks = dist.get_process_group_ranks(group)
    else:
        ranks = to_bagua_process_group(group).ranks
    if world.rank() not in ranks:
        raise ValueError(f"empty: this rank is not in {group}")
    return world.empty(shape, dtype)


def get_backend(model_name: str, group: ProcessGroup | None = None) -> BucketEngine:
    """The backend of a model by its name; a new one on ``group`` (the default group) when there is none yet.

    Collective among the ranks of the group when it is new, in the same order on all of them; else local. ValueError
    when there is one on another group.
    """
    found = bucket_engine.find(model_name)
    if found is not None and group is not None and found.group.ranks != group.ranks:
        raise ValueError(f"the backend of {model_name!r} communicates with {found.group}, not with {group}")
    if found is None:
        found = BucketEngine(model_name, group or _get_default_group())
        bucket_engine.adopt(found)
    return found


class _Job(contextlib.AbstractContextManager[ProcessGroup]):
    """The result of :func:`init_process_group`. The end of its ``with`` block leaves the job."""

    def __enter__(self) -> ProcessGroup:
        return _get_default_group()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        neutral.end_job(error)


# --- joining and leaving ----------------------------------------------------------------------------------------------


def init_process_group(
    store: Store | None = None,
    rank: int = -1,
    world_size: int = -1,
    local_world_size: int = -1,
    *,
    elastic: str | None = None,
) -> contextlib.AbstractContextManager[ProcessGroup]:
    """Joins the job as one of its ranks. As ``with init_process_group():`` the end of the block is
    :func:`destroy_process_group`, and if the block raises, the other ranks get PeerRaisedError with its text.

    Rank and world size come from the launcher (page "Launchers"); arguments win, and RANK, WORLD_SIZE, LOCAL_RANK and
    LOCAL_WORLD_SIZE are written back to the environment.
    With a ``store``, ``rank``, ``world_size`` and ``local_world_size`` are required. Initialises torch.distributed with
    gloo unless it is initialised already; where its backend is "bagua", takes its group.

    ``elastic``, else ``BAGUA_ELASTIC``, makes the job an elastic one: the address book ``file:///directory`` that all
    ranks see, or ``tcp://host:port``, by which the ranks find each other. With ``store`` it is a ValueError.
    torch.distributed is neither initialised nor used then. The page "Elastic jobs" has more.

    RuntimeError when there is a group already; BaguaTimeoutError, which names the missing ranks, after
    ``BAGUA_TIMEOUT`` seconds.
    """
    if is_initialized():
        raise RuntimeError("init_process_group was called twice: call destroy_process_group() in between")
    if neutral.default() is not None:
        raise RuntimeError("bagua.init() was called already: call bagua.shutdown() before init_process_group")
    given = {"rank": rank, "world_size": world_size, "local_world_size": local_world_size}
    if store is not None and (absent := [name for name, value in given.items() if value < 0]):
        raise ValueError(f"init_process_group with a store also needs {', '.join(absent)}")
    if store is not None and elastic is not None:
        raise ValueError("init_process_group: the ranks of an elastic job find each other by its book, not by a store")
    book = (elastic or config.address_book()) if store is None else None
    foreign = book is None and dist.is_initialized()
    if store is None and foreign:
        rank = _consistent("rank", rank, dist.get_rank())
        world_size = _consistent("world_size", world_size, dist.get_world_size())
    place = launcher.place(None if rank < 0 else rank, None if world_size < 0 else world_size)
    rank, world_size = place.rank, place.world_size
    local_rank: int | None
    local_size: int | None
    if local_world_size >= 0:
        local_rank, local_size = rank % max(local_world_size, 1), local_world_size
    else:
        found = launcher.found()
        local_rank, local_size = found.local_rank, found.local_world_size
    if local_size is not None and not 0 <= (local_rank or 0) < local_size:
        raise ValueError(f"local rank {local_rank or 0} is not one of {local_size} ranks on this host")
    metrics.begin(local_rank)
    config.announce(RANK=str(rank), WORLD_SIZE=str(world_size))

    if book is not None:
        config.announce(LOCAL_RANK=str(local_rank or 0), LOCAL_WORLD_SIZE=str(local_size or 1))
        _adopt(elastic_job.enter(book, rank, world_size, local_rank or 0, local_size or 1))
        return _Job()
    if store is None and (adopted := process.torchs_world) is not None:
        config.announce(LOCAL_RANK=str(adopted.local_rank), LOCAL_WORLD_SIZE=str(adopted.local_world_size))
        _adopt(adopted)
        return _Job()
    if store is None and foreign:
        store = dist.distributed_c10d._get_default_store()
    client = environment_store(rank, world_size) if store is None else StoreClient(store)
    # Before torch's own group, whose timeout does not name the missing ranks.
    number = _join(client, rank, world_size, local_rank, local_size)
    if not foreign:
        _state.initialised_torch_distributed = True
        try:
            # A prefix of its own for each group: torch uses the same keys for every group.
            prefixed = PrefixStore(f"bagua/{config.attempt()}/torch{number}", client.store)
            torch_init.begin(replace(client, store=prefixed), default_communicator().group)
        except BaseException as failure:
            cause = (
                torch_init.cause_of_failure(default_communicator().group) if isinstance(failure, Exception) else None
            )
            neutral.shutdown()
            if cause is not None:
                raise cause from failure
            raise
    return _Job()


def _consistent(what: str, given: int, torchs: int) -> int:
    if given not in (-1, torchs):
        raise ValueError(f"{what} {given} was given, but torch.distributed is initialised with {torchs}")
    return torchs


def end_torch() -> None:
    """Destroys torch.distributed's group if it is ours."""
    if _state.initialised_torch_distributed:
        _state.initialised_torch_distributed = False
        if dist.is_initialized():
            torch_destroy.destroy()


def _join(client: StoreClient, rank: int, world_size: int, local_rank: int | None, local_world_size: int | None) -> int:
    """Joins the group, and returns its number in the store. The group finds out what is None."""
    chosen = config.settings()
    world, number = torch_store.join(
        client.store,
        rank,
        world_size,
        what="init_process_group",
        towards=None if local_world_size == world_size else _master(),
        local_rank=local_rank,
        local_world_size=local_world_size,
        secret=chosen.secret,
        timeout=chosen.timeout,
    )
    config.announce(LOCAL_RANK=str(world.local_rank), LOCAL_WORLD_SIZE=str(world.local_world_size))
    _adopt(world)
    return number


def _adopt(world: neutral.Group) -> None:
    """Makes a group the default one of both APIs."""
    neutral.set_default(world)
    if _leave not in process.shutdown_hooks:
        process.shutdown_hooks.append(_leave)
    set_world(world)
    metrics.begin(env.get_local_rank())
    if elastic_job.rejoined():
        _state.world = elastic_job.RejoinedCommunicator(world)


def set_world(world: neutral.Group) -> Communicator:
    """Makes a group of all ranks that of the default process group, and returns its communicator."""
    group, communicator = BaguaProcessGroup(range(world.size), None, world.name), Communicator(world)
    world.is_world_of_torch_api = True
    _state.default_group, _state.world = group, communicator
    group.adopt(communicator)
    _remember(group)
    return communicator


def _master() -> tuple[str, int] | None:
    host, port = launcher.known_master()
    return (host, port) if host and port else None


def _leave() -> None:
    """The shutdown hook of this layer, called before the group leaves."""
    bucket_engine.shut_down_all()
    forget_groups()
    end_torch()


def destroy_process_group() -> None:
    """Leaves the job: ``bagua.shutdown()``.

    Also destroys torch.distributed's group if init_process_group initialised it. May be called twice.
    """
    neutral.shutdown()
