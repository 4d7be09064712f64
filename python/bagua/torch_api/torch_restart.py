"""torch.distributed begins anew, on the ranks that are left of its group."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import Store, TCPStore

from bagua import group as neutral
from bagua.lifecycle import torch_state

from . import communication
from .process_group import Communicator

__all__ = ["restart"]

#: Seconds between two looks for a key of another rank.
_PAUSE = 0.005

#: The longest attempt to connect to the store.
_ATTEMPT = timedelta(seconds=1)


class _Watched(Store):
    """A store whose waits end with the error of a group that has failed: who is waited for may be gone."""

    def __init__(self, inner: TCPStore, world: neutral.Group, limit: timedelta) -> None:
        super().__init__()
        self._inner = inner
        self._world = world
        self._limit = limit

    def set(self, key: str, value: Any) -> None:
        """Sets a key."""
        self._inner.set(key, value)

    def get(self, key: str) -> bytes:
        """Waits for a key and returns its value."""
        self.wait([key])
        return self._inner.get(key)

    def add(self, key: str, amount: int) -> int:
        """Adds to a counter."""
        return self._inner.add(key, amount)

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Sets a key if it has the expected value, and returns the value that it then has."""
        return self._inner.compare_set(key, expected, desired)

    def delete_key(self, key: str) -> bool:
        """Deletes a key; whether it was there."""
        return self._inner.delete_key(key)

    def num_keys(self) -> int:
        """How many keys there are."""
        return self._inner.num_keys()

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all keys are set."""
        return self._inner.check(list(keys))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Waits until all keys are set."""
        limit = self._limit if timeout is None else timeout
        until = time.monotonic() + limit.total_seconds()
        while not self.check(keys):
            self._world.communicator.cause()
            if time.monotonic() > until:
                raise TimeoutError(f"no value for {list(keys)} after {limit.total_seconds():.1f} s")
            time.sleep(_PAUSE)


def restart(world: neutral.Group, communicator: Communicator) -> None:
    """Initialises torch.distributed for the ranks of a new group, by a store of the lowest.

    The server of the old store may have been a rank that is gone. An error of any kind when a rank is lost meanwhile.
    """
    if dist.is_initialized():
        dist.destroy_process_group()
    limit = timedelta(seconds=world.timeout)
    store, host = None, world.communicator.listen_host
    if world.rank == 0:
        store = TCPStore(host, 0, world.size, True, limit, wait_for_workers=False)
    host, port = communicator.broadcast_object((host, store.port if store is not None else 0))
    if store is None:
        store = _client(host, port, world, limit)
    # For as long as the process lives, as that of init_process_group.
    torch_state().stores[host, port] = store
    communication.begin_torch(_Watched(store, world, limit), world.rank, world.size, limit)
    core = dist.distributed_c10d
    # Its name before torch 2.9.
    set_timeout: Any = getattr(core, "set_timeout", None) or core._set_pg_timeout
    set_timeout(communication.TORCH_TIMEOUT)


def _client(host: str, port: int, world: neutral.Group, limit: timedelta) -> TCPStore:
    """A client of the lowest rank's store, unless that is lost: a client alone would try to connect until the limit."""
    until = time.monotonic() + limit.total_seconds()
    while True:
        try:
            store = TCPStore(host, port, world.size, False, _ATTEMPT, wait_for_workers=False)
        except dist.DistError:
            world.communicator.cause()
            if time.monotonic() > until:
                raise
        else:
            store.set_timeout(limit)
            return store
