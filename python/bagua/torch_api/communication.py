"""Joins and leaves a job, and defines the default group, with the function names of the original Bagua.

``comm`` is a communicator from ``get_global_communicator()``, a process group, or None for the default group. On a rank
outside the group, every collective returns without effect.
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

from bagua import config, launcher, metrics, store_rendezvous
from bagua import group as neutral
from bagua.process_state import forget_groups, process

from . import default_collectives, env
from .default_collectives import *  # noqa: F403 - the collectives, which are listed there
from .default_collectives import default_communicator, default_group
from .membership import elastic as elastic_job
from .membership import torch_destroy_process_group, torch_init_process_group
from .membership.torch_store_connection import StoreClient
from .membership.torch_store_from_environment import environment_store
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

_pg_group_ranks = _state.group_ranks


class BaguaProcessGroup(ProcessGroup):
    """A set of ranks of the job. ``stream`` is accepted for compatibility with the original Bagua and has no effect."""

    def __init__(self, ranks: Sequence[int], stream: Any = None, group_name: str = "") -> None:
        super().__init__(ranks, default_communicator, stream=stream, group_name=group_name)


def is_initialized() -> bool:
    """Returns True between :func:`init_process_group` and :func:`destroy_process_group`."""
    return _state.default_group is not None


def _get_default_group() -> BaguaProcessGroup:
    return cast("BaguaProcessGroup", default_group())


def _remember(group: BaguaProcessGroup) -> None:
    _state.group_ranks[group] = {world: rank for rank, world in enumerate(group.ranks)}


def _rank_not_in_group(group: ProcessGroup | None = None) -> bool:
    """Returns True if this process is not a member of ``group``. Every rank is a member of the default group (None)."""
    return group is not None and default_communicator().rank() not in group.ranks


def new_group(ranks: Sequence[int] | None = None, stream: Any = None) -> BaguaProcessGroup:
    """Returns a new group of some ranks of the job; ``None`` means all ranks.

    Collective among the members, who call this function in the same order with the same ranks. On other ranks the call
    is local. Raises ValueError if ``ranks`` is empty, repeats a rank, or names a rank outside the job.
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
    # Open the communicator now instead of at first use, so that this call raises the error if a member is missing.
    communicator = group.get_global_communicator()
    if isinstance(communicator, Communicator):
        group.group_name = communicator.group.name
    return group


def get_communicator(group_name: str, comm_name: Literal["global", "inter", "intra"]) -> AnyCommunicator:
    """Returns a communicator of the group called ``group_name``.

    - ``group_name``: The name of a group that this process knows.
    - ``comm_name``: ``"global"`` for all ranks of the group, ``"inter"`` for the first rank of each host, ``"intra"``
      for the ranks on this host.

    Returns ``NON_COMM_MEMBER`` on a rank outside the communicator. The members open a new communicator collectively.
    Raises ValueError for an unknown group name or communicator name.
    """
    if comm_name not in ("global", "inter", "intra"):
        raise ValueError(f"get_communicator: comm_name must be one of global, inter, intra; got {comm_name!r}")
    _get_default_group()
    groups = list(_state.group_ranks)
    for group in groups:
        if group.group_name == group_name:
            return group.communicator(comm_name)
    known = sorted(group.group_name for group in groups if group.group_name)
    raise ValueError(
        f"get_communicator: no group is called {group_name!r}; known groups: {', '.join(map(repr, known))}"
    )


def from_torch_group(group: dist.ProcessGroup, stream: Any = None) -> BaguaProcessGroup:
    """Returns a new group with the ranks of a torch.distributed group. Collective like :func:`new_group`."""
    return new_group(dist.get_process_group_ranks(group), stream)


def to_bagua_process_group(group: ProcessGroup | dist.ProcessGroup | None) -> ProcessGroup:
    """Returns the process group of Bagua for ``group``.

    ``None`` gives the default group, a torch.distributed group its counterpart (collective on the first call, like
    :func:`new_group`), and a group of Bagua itself. Raises TypeError for anything else.
    """
    if group is None:
        return _get_default_group()
    if isinstance(group, ProcessGroup):
        return group
    if isinstance(group, dist.ProcessGroup):
        bagua_patch(group)
        return _state.torch_groups[group]
    raise TypeError(f"group must be a process group of bagua or torch.distributed, not {type(group).__name__}")


def group_of(given: ProcessGroup | dist.ProcessGroup | None) -> ProcessGroup:
    """Like :func:`to_bagua_process_group`, but joins the job if torch.distributed uses the backend "bagua" and there is
    no default group yet. The world of torch.distributed then becomes the default group.
    """
    if not isinstance(given, ProcessGroup) and not is_initialized() and process.torchs_world is not None:
        init_process_group()
    return to_bagua_process_group(given)


def bagua_patch(self: dist.ProcessGroup, stream: Any = None) -> dist.ProcessGroup:
    """Adds the attribute ``bagua_pg`` to a torch.distributed group, and returns the group.

    Collective on the first call for each group, like :func:`new_group`.
    """
    if self not in _state.torch_groups:
        _state.torch_groups[self] = from_torch_group(self, stream)
    return self


def empty(
    shape: int | Sequence[int], dtype: torch.dtype | None = None, group: ProcessGroup | dist.ProcessGroup | None = None
) -> torch.Tensor:
    """Returns a new tensor of zeros in memory shared with the other ranks of this host, on which collectives need no
    copy.

    Local: ranks map each other's memory in the first collective whose tensors all lie in such memory, in any group.
    ``dtype`` None means torch's default dtype. The memory is released with the last tensor that uses it, and may
    outlive the group. Raises ValueError on a rank outside ``group`` (None: the default group).
    """
    world = default_communicator()
    # The group's communicator may not be open yet.
    if isinstance(group, dist.ProcessGroup):
        ranks = dist.get_process_group_ranks(group)
    else:
        ranks = to_bagua_process_group(group).ranks
    if world.rank() not in ranks:
        raise ValueError(f"empty: this rank is not in {group}")
    return world.empty(shape, dtype)


def get_backend(model_name: str, group: ProcessGroup | None = None) -> BucketEngine:
    """Returns the backend of the model called ``model_name``, and makes one on ``group`` if there is none yet.

    Making a backend is collective among the ranks of ``group`` (None: the default group), in the same order on all
    ranks. Raises ValueError if the model's backend communicates with another group.
    """
    found = bucket_engine.find(model_name)
    if found is not None and group is not None and found.group.ranks != group.ranks:
        raise ValueError(f"the backend of {model_name!r} communicates with {found.group}, not with {group}")
    if found is None:
        found = BucketEngine(model_name, group or _get_default_group())
        bucket_engine.adopt(found)
    return found


class _Job(contextlib.AbstractContextManager[ProcessGroup]):
    """The result of :func:`init_process_group`. Leaving its ``with`` block leaves the job."""

    def __enter__(self) -> ProcessGroup:
        return _get_default_group()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        neutral.end_job(error)


def init_process_group(
    store: Store | None = None,
    rank: int = -1,
    world_size: int = -1,
    local_world_size: int = -1,
    *,
    elastic: str | None = None,
) -> contextlib.AbstractContextManager[ProcessGroup]:
    """Joins the job as one of its ranks.

    In ``with init_process_group():`` the end of the block calls :func:`destroy_process_group`. If the block raises, the
    other ranks raise PeerRaisedError with the text of the error.

    - ``store``: A store of torch.distributed through which the ranks find each other. Requires ``rank``, ``world_size``
      and ``local_world_size``.
    - ``rank``, ``world_size``, ``local_world_size``: This process's rank, the number of ranks, and the number of ranks
      on this host. By default the launcher's (page "Launchers"). RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE are
      written to the environment.
    - ``elastic``: Makes the job elastic: the address book through which ranks find each other, ``file:///directory`` on
      a file system that all ranks see, or ``tcp://host:port``. The default is ``BAGUA_ELASTIC``. Cannot be combined
      with ``store``. See the page "Elastic jobs".

    Initialises torch.distributed with gloo, unless it is initialised already or the job is elastic. If
    torch.distributed uses the backend "bagua", its group becomes the default group.

    Raises RuntimeError if there is a default group already, ValueError for arguments that contradict each other, and
    BaguaTimeoutError with the missing ranks after ``BAGUA_TIMEOUT`` seconds.
    """
    if is_initialized():
        raise RuntimeError("init_process_group was called twice: call destroy_process_group() in between")
    if neutral.default() is not None:
        raise RuntimeError("bagua.init() was called already: call bagua.shutdown() before init_process_group")
    given = {"rank": rank, "world_size": world_size, "local_world_size": local_world_size}
    if store is not None and (absent := [name for name, value in given.items() if value < 0]):
        raise ValueError(f"init_process_group with a store also needs {', '.join(absent)}")
    if store is not None and elastic is not None:
        raise ValueError(
            "init_process_group: give either store or elastic, not both: an elastic job uses its address book"
        )
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
    # Before torch creates its own group, because a timeout of torch does not name the missing ranks.
    number = _join(client, rank, world_size, local_rank, local_size)
    if not foreign:
        _state.initialised_torch_distributed = True
        try:
            # Each group needs its own prefix because torch uses the same keys for every group.
            prefixed = PrefixStore(f"bagua/{config.attempt()}/torch{number}", client.store)
            torch_init_process_group.init_torch(replace(client, store=prefixed), default_communicator().group)
        except BaseException as failure:
            cause = (
                torch_init_process_group.cause_of_failure(default_communicator().group)
                if isinstance(failure, Exception)
                else None
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
    """Destroys the group of torch.distributed if :func:`init_process_group` created it."""
    if _state.initialised_torch_distributed:
        _state.initialised_torch_distributed = False
        if dist.is_initialized():
            torch_destroy_process_group.destroy()


def _join(client: StoreClient, rank: int, world_size: int, local_rank: int | None, local_world_size: int | None) -> int:
    """Joins the group and returns its number in the store. The group finds a local rank or size that is None."""
    chosen = config.settings()
    world, number = store_rendezvous.join(
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
    """Makes a group the default group of both APIs."""
    neutral.set_default(world)
    if _leave not in process.shutdown_hooks:
        process.shutdown_hooks.append(_leave)
    set_world(world)
    metrics.begin(env.get_local_rank())
    if elastic_job.rejoined():
        _state.world = elastic_job.RejoinedCommunicator(world)


def set_world(world: neutral.Group) -> Communicator:
    """Makes a group of all ranks the default process group, and returns its communicator."""
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
    """Closes this layer. Called as a shutdown hook, before the group is left."""
    bucket_engine.shut_down_all()
    forget_groups()
    end_torch()


def destroy_process_group() -> None:
    """Leaves the job, like ``bagua.shutdown()``. May be called twice.

    Also destroys the group of torch.distributed if :func:`init_process_group` created it.
    """
    neutral.shutdown()
