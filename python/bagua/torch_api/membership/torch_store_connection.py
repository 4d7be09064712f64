"""Connects to a torch.distributed store that another process serves or will serve."""

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

#: Limit of the first attempt, in seconds. Each further attempt may take twice as long, for slow connections.
_ATTEMPT = 1.0

#: Seconds between two attempts while no process listens: first and longest pause.
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
    """Returns a client of the store at an address. The store may start to be served later.

    Calls ``cause`` between attempts and raises what it raises. After ``limit`` seconds raises TimeoutError, OSError or
    torch's DistError. A single call of torch would continue after its caller has given up.
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
    # Checks that a process listens there, because torch would try for three times its timeout.
    socket.create_connection((host, port), limit).close()
    # Without waiting for workers: missing ranks are named when addresses are exchanged.
    return TCPStore(host, port, world_size, False, timedelta(seconds=limit), wait_for_workers=False)
