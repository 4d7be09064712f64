"""Joining and leaving the job, and every name that the original kept in this module.

``init_process_group`` needs a store of torch.distributed only to spread addresses; what is communicated afterwards goes
through the Rust core.
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import ClassVar

import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, Store, TCPStore
from torch.distributed.rendezvous import rendezvous

import bagua
from bagua import config, stores
from bagua import group as neutral
from bagua.errors import BaguaTimeoutError

from . import env
from .backend import get_backend
from .backend import shut_down_all as _shut_down_backends
from .collectives import (
    Handle,
    ReduceOp,
    allgather,
    allgather_inplace,
    allreduce,
    allreduce_coalesced_inplace,
    allreduce_inplace,
    alltoall,
    alltoall_inplace,
    alltoall_v,
    alltoall_v_inplace,
    barrier,
    broadcast,
    broadcast_coalesced,
    broadcast_object,
    gather,
    gather_inplace,
    recv,
    reduce,
    reduce_inplace,
    reduce_scatter,
    reduce_scatter_inplace,
    scatter,
    scatter_inplace,
    send,
)
from .groups import (
    NON_COMM_MEMBER,
    BaguaProcessGroup,
    Communicator,
    _get_default_group,
    _pg_group_ranks,
    _rank_not_in_group,
    adopt_world,
    from_torch_group,
    get_communicator,
    is_initialized,
    new_group,
    to_bagua_process_group,
)
from .groups import state as _groups

__all__ = [
    "NON_COMM_MEMBER",
    "BaguaProcessGroup",
    "Communicator",
    "Handle",
    "ReduceOp",
    "_get_default_group",
    "_pg_group_ranks",
    "_rank_not_in_group",
    "allgather",
    "allgather_inplace",
    "allreduce",
    "allreduce_coalesced_inplace",
    "allreduce_inplace",
    "alltoall",
    "alltoall_inplace",
    "alltoall_v",
    "alltoall_v_inplace",
    "barrier",
    "broadcast",
    "broadcast_coalesced",
    "broadcast_object",
    "destroy_process_group",
    "from_torch_group",
    "gather",
    "gather_inplace",
    "get_backend",
    "get_communicator",
    "init_process_group",
    "is_initialized",
    "new_group",
    "recv",
    "reduce",
    "reduce_inplace",
    "reduce_scatter",
    "reduce_scatter_inplace",
    "scatter",
    "scatter_inplace",
    "send",
    "to_bagua_process_group",
]

#: How long torch.distributed waits for a peer: its own default.
_PATIENCE = timedelta(minutes=30)


class _Begun:
    """What init_process_group started besides the group, so that the end undoes that and nothing else."""

    torch_distributed = False
    # By address and port: the store that the environment names. Kept, as a second group must not wait for a port that
    # the first one's store still holds, nor find it on a peer that is slower to end.
    stores: ClassVar[dict[tuple[str | None, str | None], Store]] = {}

    @classmethod
    def forget(cls) -> None:
        """In a forked child: torch.distributed is the parent's, and ending it here would end the process."""
        cls.torch_distributed = False


os.register_at_fork(after_in_child=_Begun.forget)


def init_process_group(
    store: Store | None = None, rank: int = -1, world_size: int = -1, local_world_size: int = -1
) -> None:
    """Joins the job as one of its ranks.

    Without arguments the environment that torchrun sets says who this is; values given here win over it and are written
    back to it. With a ``store``, ``rank``, ``world_size`` and ``local_world_size`` are required. Initialises
    torch.distributed with gloo if nobody has.

    RuntimeError when there is a group already; BaguaTimeoutError, which names the ranks that did not come, after
    ``BAGUA_TIMEOUT`` seconds.
    """
    if is_initialized():
        raise RuntimeError("init_process_group was called twice: call destroy_process_group() in between")
    if neutral.default() is not None:
        raise RuntimeError("bagua.init() was called already: call bagua.shutdown() before init_process_group")
    given = {"rank": rank, "world_size": world_size, "local_world_size": local_world_size}
    if store is not None and (absent := [name for name, value in given.items() if value < 0]):
        raise ValueError(f"init_process_group with a store also needs {', '.join(absent)}")
    foreign = dist.is_initialized()
    if store is None and foreign:
        rank = _agree("rank", rank, dist.get_rank())
        world_size = _agree("world_size", world_size, dist.get_world_size())
    rank = env.get_rank() if rank < 0 else rank
    world_size = env.get_world_size() if world_size < 0 else world_size
    if local_world_size < 0:
        local_world_size, local_rank = env.get_local_size(), env.get_local_rank()
    else:
        local_rank = rank % max(local_world_size, 1)
    if not 0 <= rank < world_size:
        raise ValueError(f"rank {rank} is not in a world of {world_size}")
    if not 0 <= local_rank < local_world_size:
        raise ValueError(f"local rank {local_rank} is not one of {local_world_size} ranks on this host")
    config.announce(
        RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(local_rank), LOCAL_WORLD_SIZE=str(local_world_size)
    )

    if store is None:
        store = dist.distributed_c10d._get_default_store() if foreign else _environment_store(rank, world_size)
    # Before torch's own group, which would not say who is missing.
    number = _join(store, rank, world_size, local_rank, local_world_size)
    if not foreign:
        _Begun.torch_distributed = True
        try:
            dist.init_process_group(
                "gloo",
                # Of its own for each group: torch's keys are those of its predecessor too.
                store=PrefixStore(f"bagua/{config.attempt()}/torch{number}", store),
                rank=rank,
                world_size=world_size,
                timeout=_PATIENCE,
            )
        except BaseException:
            bagua.shutdown()
            raise


def _agree(what: str, given: int, torchs: int) -> int:
    if given not in (-1, torchs):
        raise ValueError(f"{what} {given} was given, but torch.distributed is initialised with {torchs}")
    return torchs


def _environment_store(rank: int, world_size: int) -> Store:
    """The store at MASTER_ADDR and MASTER_PORT, which the launcher or rank 0 serves."""
    place = config.text("MASTER_ADDR"), config.text("MASTER_PORT")
    if world_size == 1 and place[0] is None:
        # A plain `python script.py`: nobody to meet.
        return HashStore()
    if place not in _Begun.stores:
        _Begun.stores[place] = _meet(rank, world_size)
    return _Begun.stores[place]


def _meet(rank: int, world_size: int) -> Store:
    limit = config.settings().timeout
    if config.agent_serves_store():
        found: Store = next(rendezvous("env://", rank, world_size, timeout=timedelta(seconds=limit)))[0]
        return found
    host, port = config.master()
    try:
        # As torch's rendezvous does it, but without waiting for workers: who waits for whom is seen when addresses are
        # read, and can be named.
        return TCPStore(
            host, port, world_size, rank == 0, timedelta(seconds=limit), wait_for_workers=False, multi_tenant=True
        )
    except dist.DistError as failure:
        if rank == 0:
            raise
        text = f"init_process_group: rank 0 does not serve {host}:{port} after {limit:.1f} s"
        raise BaguaTimeoutError(text, missing=(0,), after=limit, noticed_by=rank) from failure


def _end_torch() -> None:
    if _Begun.torch_distributed:
        _Begun.torch_distributed = False
        if dist.is_initialized():
            dist.destroy_process_group()


def _join(store: Store, rank: int, world_size: int, local_rank: int, local_world_size: int) -> int:
    """Joins the group, and returns its number in the store."""
    chosen = config.settings()
    world, number = stores.join(
        store,
        rank,
        world_size,
        what="init_process_group",
        towards=_master() if local_world_size < world_size else None,
        local_rank=local_rank,
        local_world_size=local_world_size,
        secret=chosen.secret,
        timeout=chosen.timeout,
    )
    neutral.set_default(world)
    if _leave not in neutral.shutdown_hooks:
        neutral.shutdown_hooks.append(_leave)
    adopt_world(world)
    return number


def _master() -> tuple[str, int] | None:
    host, port = config.text("MASTER_ADDR"), config.integer("MASTER_PORT", 0)
    return (host, port) if host and port else None


def _leave() -> None:
    """What bagua.shutdown() does for this layer before the group is left."""
    _shut_down_backends()
    _groups.clear()
    _end_torch()


def destroy_process_group() -> None:
    """Leaves the job: ``bagua.shutdown()``.

    Also ends torch.distributed if init_process_group began it. May be called twice.
    """
    bagua.shutdown()
