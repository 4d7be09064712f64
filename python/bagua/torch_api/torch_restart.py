"""torch.distributed begins anew, on the ranks that are left of its group."""

from __future__ import annotations

import time
from datetime import timedelta
from functools import partial

import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from bagua import group as neutral
from bagua.lifecycle import torch_state
from bagua.store_requests import StoreRequests

from . import torch_group
from .process_group import Communicator

__all__ = ["restart"]

#: The longest first attempt to connect to the store. On a slow line it takes several round trips, so each is twice as
#: long as the one before.
_ATTEMPT = timedelta(seconds=1)


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
    torch_group.begin(store, world)


def _client(host: str, port: int, world: neutral.Group, limit: timedelta) -> TCPStore:
    """A client of the lowest rank's store, unless that is lost: a client alone would try to connect until the limit."""
    until = time.monotonic() + limit.total_seconds()
    requests = StoreRequests(lambda: world.communicator.cause())
    attempt = _ATTEMPT
    while True:
        longest = min(attempt, limit)
        try:
            store = requests.ask(partial(_connect, host, port, world.size, longest), max(until - time.monotonic(), 0.0))
        except dist.DistError:
            attempt *= 2
            if time.monotonic() > until:
                raise
        else:
            store.set_timeout(limit)
            return store


def _connect(host: str, port: int, size: int, limit: timedelta) -> TCPStore:
    return TCPStore(host, port, size, False, limit, wait_for_workers=False)
