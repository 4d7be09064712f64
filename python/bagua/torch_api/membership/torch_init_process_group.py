"""Initialises torch.distributed for the ranks of a Bagua group, at first and after ``rebuild``.

If the Bagua group fails, the initialisation ends with its error.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from bagua import group as neutral
from bagua import tcp_store_requests
from bagua.errors import PeerLostError, PeerRaisedError

from ..process_group import Communicator
from . import torch_destroy_process_group
from .state import membership_state
from .torch_store_connection import StoreClient, connect

__all__ = ["begin_again", "begin_gloo", "cause_of_failure", "init_torch"]

_T = TypeVar("_T")

#: Timeout of torch.distributed's operations, equal to torch's default.
_TIMEOUT = timedelta(minutes=30)

#: Seconds that gloo may take to start, plus one for each rank, because addresses are fetched one after the other. If a
#: peer gives up, the ranks that wait for its connection are not told.
_LONGEST_START = 20.0

#: Seconds between two reads of another rank's key.
_PAUSE = 0.005

#: Seconds to wait, after a failure of torch.distributed, for the report of a lost rank that may have caused it.
_CAUSE_GRACE = 0.5


class _Watched(Store):
    """A store whose requests raise a group's error if the group fails, because the rank waited for may be lost."""

    def __init__(self, client: StoreClient, world: neutral.Group, limit: timedelta) -> None:
        super().__init__()
        self._inner = client.store
        self._limit = limit
        self._look: Callable[[], object] = lambda: world.communicator.cause()

    def let_go(self) -> None:
        """Stops watching the group."""
        self._look = lambda: None

    def _ask(self, request: Callable[[], _T]) -> _T:
        return tcp_store_requests.ask(request, self._limit.total_seconds(), self._look)

    def set(self, key: str, value: Any) -> None:
        self._ask(lambda: self._inner.set(key, value))

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._ask(lambda: self._inner.get(key))

    def add(self, key: str, amount: int) -> int:
        return self._ask(lambda: self._inner.add(key, amount))

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Sets a key if it has the expected value, and returns the value that it then has."""
        return self._ask(lambda: self._inner.compare_set(key, expected, desired))

    def delete_key(self, key: str) -> bool:
        return self._ask(lambda: self._inner.delete_key(key))

    def num_keys(self) -> int:
        return self._ask(self._inner.num_keys)

    def check(self, keys: Sequence[str]) -> bool:
        return self._ask(lambda: self._inner.check(list(keys)))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        limit = (self._limit if timeout is None else timeout).total_seconds()
        until = time.monotonic() + limit
        # Uses short requests, so that a rank that gives up leaves none unanswered.
        while not self.check(keys):
            if time.monotonic() > until:
                raise TimeoutError(f"no value for {list(keys)} after {limit:.1f} s")
            time.sleep(_PAUSE)


def init_torch(client: StoreClient, world: neutral.Group) -> None:
    """Initialises torch.distributed with gloo for the ranks of ``world``, within the timeout of ``world`` or less.

    If a rank is lost meanwhile, raises an error of any type; see :func:`cause_of_failure`.
    """
    limit = timedelta(seconds=min(world.timeout, _LONGEST_START + world.size))
    watched = _Watched(client, world, limit)
    core = dist.distributed_c10d
    # Torch puts the number of a group into its keys, and counts groups that failed too. Not all ranks get that far.
    groups = core._world.group_count
    try:
        begin_gloo(watched, world.rank, world.size, limit)
    except BaseException:
        core._world.group_count = groups
        raise
    finally:
        watched.let_go()
    # Without a barrier, a rank that leaves early would break connections that other ranks are still making.
    world.barrier()
    # Later groups use the plain store. Torch clones the store, and a clone of the watched one could be used after its
    # Python half is gone.
    default: Any = core._get_default_group()
    backend, _ = core._world.pg_map[default]
    core._world.pg_map[default] = (backend, PrefixStore("later", client.store))
    membership_state.gloo_store = watched
    # _set_pg_timeout is the name before torch 2.9.
    set_timeout: Any = getattr(core, "set_timeout", None) or core._set_pg_timeout
    set_timeout(_TIMEOUT)


def begin_again(world: neutral.Group, communicator: Communicator) -> None:
    """Initialises torch.distributed for the ranks of a new group, through a store that one of them serves.

    If a rank is lost meanwhile, raises an error of any type.
    """
    if dist.is_initialized():
        torch_destroy_process_group.destroy()
    client = _common_store(communicator) or _new_store(world, communicator)
    # Each group needs its own prefix because torch uses the same keys for every group.
    prefix = f"bagua/rebuilt/{communicator.broadcast_object(secrets.token_hex(8))}"
    init_torch(replace(client, store=PrefixStore(prefix, client.store)), world)


def _common_store(communicator: Communicator) -> StoreClient | None:
    """Returns the newest store if all ranks have the same one and one of them serves it; otherwise None.

    A new store needs two connections per rank. For each connection, torch's single server thread asks the name server
    for the peer's name and answers no request meanwhile. At 20 ranks, this takes 5 s if the name server drops
    questions.
    """
    place, client = next(reversed(membership_state.stores.items()), (None, None))
    said = communicator.allgather_object((place, client is not None and client.serves))
    places, serves = zip(*said, strict=True)
    return client if any(serves) and all(each == places[0] for each in places) else None


def _new_store(world: neutral.Group, communicator: Communicator) -> StoreClient:
    """Opens a store that the lowest rank serves until its process ends."""
    own, host = None, world.communicator.listen_host
    if world.rank == 0:
        limit = timedelta(seconds=world.timeout)
        own = TCPStore(host, 0, world.size, True, limit, wait_for_workers=False)
    host, port = communicator.broadcast_object((host, own.port if own is not None else 0))
    if own is not None:
        client = StoreClient(own, serves=True)
    else:
        client = connect(host, port, world.size, world.timeout, lambda: world.communicator.cause())
    membership_state.stores[host, port] = client
    return client


def begin_gloo(store: Store, rank: int, world_size: int, limit: timedelta) -> None:
    """Initialises torch.distributed with gloo. ``limit`` is the timeout of the start and of operations."""
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=limit)


def cause_of_failure(world: neutral.Group) -> PeerLostError | PeerRaisedError | None:
    """Returns the error of a lost or raising rank if it explains a failed operation of ``world``; else None."""
    until = time.monotonic() + _CAUSE_GRACE
    while time.monotonic() < until:
        try:
            world.communicator.cause()
        except (PeerLostError, PeerRaisedError) as cause:
            return cause
        except RuntimeError:
            return None
        time.sleep(0.01)
    return None
