"""Initialises torch.distributed beside a group of ours, whose failure ends the initialisation: at first, and again on
the ranks that are left of a group.
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
from . import torch_destroy
from .state import membership_state
from .store_client import StoreClient, connect

__all__ = ["begin", "begin_again", "begin_gloo", "cause_of_failure"]

_T = TypeVar("_T")

#: The timeout of torch.distributed's operations, as torch's own default.
_TIMEOUT = timedelta(minutes=30)

#: Seconds that gloo's start may take, and one more for every rank: addresses are fetched one after the other. A rank
#: that waits for the connection of a peer that has given up is not notified.
_LONGEST_START = 20.0

#: Seconds between two looks for a key of another rank.
_PAUSE = 0.005

#: How long a failure of torch.distributed waits for the report of a lost rank that may have caused it, in seconds.
_CAUSE_GRACE = 0.5


class _Watched(Store):
    """A store whose requests end with the error of a group that has failed: the rank waited for may be lost."""

    def __init__(self, client: StoreClient, world: neutral.Group, limit: timedelta) -> None:
        super().__init__()
        self._inner = client.store
        self._limit = limit
        self._look: Callable[[], object] = lambda: world.communicator.cause()

    def let_go(self) -> None:
        """Requests no longer look at the group, which ends when its owners leave it."""
        self._look = lambda: None

    def _ask(self, request: Callable[[], _T]) -> _T:
        return tcp_store_requests.ask(request, self._limit.total_seconds(), self._look)

    def set(self, key: str, value: Any) -> None:
        """Sets a key."""
        self._ask(lambda: self._inner.set(key, value))

    def get(self, key: str) -> bytes:
        """Waits for a key and returns its value."""
        self.wait([key])
        return self._ask(lambda: self._inner.get(key))

    def add(self, key: str, amount: int) -> int:
        """Adds to a counter."""
        return self._ask(lambda: self._inner.add(key, amount))

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Sets a key if it has the expected value, and returns the value that it then has."""
        return self._ask(lambda: self._inner.compare_set(key, expected, desired))

    def delete_key(self, key: str) -> bool:
        """Deletes a key; whether it was there."""
        return self._ask(lambda: self._inner.delete_key(key))

    def num_keys(self) -> int:
        """How many keys there are."""
        return self._ask(self._inner.num_keys)

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all keys are set."""
        return self._ask(lambda: self._inner.check(list(keys)))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Waits until all keys are set."""
        limit = (self._limit if timeout is None else timeout).total_seconds()
        until = time.monotonic() + limit
        # By short requests: a rank that gives up leaves none behind that is not answered.
        while not self.check(keys):
            if time.monotonic() > until:
                raise TimeoutError(f"no value for {list(keys)} after {limit:.1f} s")
            time.sleep(_PAUSE)


def begin(client: StoreClient, world: neutral.Group) -> None:
    """Initialises torch.distributed with gloo for the ranks of ``world``, within its timeout or less.

    An error of any kind when a rank is lost meanwhile: see :func:`cause_of_failure`.
    """
    limit = timedelta(seconds=min(world.timeout, _LONGEST_START + world.size))
    watched = _Watched(client, world, limit)
    core = dist.distributed_c10d
    # The keys of a group have its number, which torch counts also where the group fails, and not all ranks come so far.
    groups = core._world.group_count
    try:
        begin_gloo(watched, world.rank, world.size, limit)
    except BaseException:
        core._world.group_count = groups
        raise
    finally:
        watched.let_go()
    # A rank that leaves as soon as its own connections are open would break those that others are still making.
    world.barrier()
    # Later groups take the plain store: torch clones it, and may outlive the Python half of the watched one.
    default: Any = core._get_default_group()
    backend, _ = core._world.pg_map[default]
    core._world.pg_map[default] = (backend, PrefixStore("later", client.store))
    membership_state.gloo_store = watched
    # Its name before torch 2.9.
    set_timeout: Any = getattr(core, "set_timeout", None) or core._set_pg_timeout
    set_timeout(_TIMEOUT)


def begin_again(world: neutral.Group, communicator: Communicator) -> None:
    """Initialises torch.distributed for the ranks of a new group, by a store that one of them serves.

    An error of any kind when a rank is lost meanwhile.
    """
    if dist.is_initialized():
        torch_destroy.destroy()
    client = _common_store(communicator) or _new_store(world, communicator)
    # A prefix of its own for each group: torch uses the same keys for every group.
    prefix = f"bagua/rebuilt/{communicator.broadcast_object(secrets.token_hex(8))}"
    begin(replace(client, store=PrefixStore(prefix, client.store)), world)


def _common_store(communicator: Communicator) -> StoreClient | None:
    """The last of each rank's stores, if that is the same one on all ranks and one of them serves it.

    A new one costs two connections of each rank. For each, the one thread of torch's server asks the name server for
    the name of the peer, and answers no request meanwhile: at 20 ranks 5 s where the name server drops questions.
    """
    place, client = next(reversed(membership_state.stores.items()), (None, None))
    said = communicator.allgather_object((place, client is not None and client.serves))
    places, serves = zip(*said, strict=True)
    return client if any(serves) and all(each == places[0] for each in places) else None


def _new_store(world: neutral.Group, communicator: Communicator) -> StoreClient:
    """A store that the lowest rank serves until its process ends, as that of init_process_group."""
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
    """Initialises torch.distributed. ``limit`` is the timeout of this, and of its operations."""
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=limit)


def cause_of_failure(world: neutral.Group) -> PeerLostError | PeerRaisedError | None:
    """Why something that the ranks of ``world`` did together has failed, if a rank was lost or raised."""
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
