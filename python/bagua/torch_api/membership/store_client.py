"""Connecting to a store of torch.distributed that another process serves, or will."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial

from torch._C._distributed_c10d import Store, TCPStore
from torch.distributed import DistError

from bagua import tcp_store_requests

__all__ = ["StoreClient", "connect"]

#: The longest first attempt, in seconds. On a slow line it takes several round trips, so each is twice as long as the
#: one before.
_ATTEMPT = 1.0

#: Seconds between two attempts while no process listens: at first, and at most.
_PAUSE, _LONGEST_PAUSE = 0.02, 0.25


@dataclass(frozen=True)
class StoreClient:
    """A store of torch.distributed."""

    store: Store
    #: True if this process serves it.
    serves: bool = False


def connect(
    host: str, port: int, world_size: int, limit: float, cause: Callable[[], None] = lambda: None
) -> StoreClient:
    """A client of the store at an address, which need not be served yet.

    Raises what `cause` raises, which is called in between; after `limit` seconds TimeoutError, OSError or torch's
    DistError. A call of torch's alone would go on trying when its caller has given up.
    """
    until = time.monotonic() + limit
    attempt, pause = min(_ATTEMPT, limit), _PAUSE
    while True:
        try:
            open_store = partial(_open, host, port, world_size, attempt)
            store = tcp_store_requests.ask(open_store, max(until - time.monotonic(), 0.0), cause)
        except DistError:
            attempt *= 2
            if time.monotonic() > until:
                raise
        except OSError:
            left = until - time.monotonic()
            if left <= 0:
                raise
            cause()
            time.sleep(min(pause, left))
            pause = min(2 * pause, _LONGEST_PAUSE)
        else:
            store.set_timeout(timedelta(seconds=limit))
            return StoreClient(store)


def _open(host: str, port: int, world_size: int, limit: float) -> TCPStore:
    # Checks that a process listens there: torch would try for three times its timeout.
    socket.create_connection((host, port), limit).close()
    # Without waiting for workers: a rank that is missing is found, and named, when addresses are exchanged.
    return TCPStore(host, port, world_size, False, timedelta(seconds=limit), wait_for_workers=False)
