"""Joins a group through a store of torch.distributed or our own.

1. Rank 0 starts a rendezvous server, and writes its address to the store as a new, numbered entry.
2. Other ranks read the newest entry and connect to rank 0. If it is not served any more, they wait for the next entry.
3. The ranks exchange their addresses there (rust/bagua-group/src/rendezvous/mod.rs).

The addresses themselves do not go through the store, because its server would have to send n lists of n addresses.
Every rank has to reach rank 0 for the group anyway. The entries are numbered because a store may outlive groups, and
under torchrun all processes of a job.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any, TypeVar

from bagua import config, extension, group, log, tcp_store_requests
from bagua.errors import BaguaError, BaguaTimeoutError, PeerLostError
from bagua.process_state import process

__all__ = ["join"]

_T = TypeVar("_T")

# Takes this rank's address and the secret; returns all addresses.
_Spread = Callable[[bytes, bytes], list[bytes]]

# Seconds between two attempts at an address that does not answer: the first pause, and the longest.
_PAUSE, _LONGEST_PAUSE = 0.02, 1.0

# Seconds by which the store's answer may be late after its own timeout.
_GRACE = 0.5


def join(
    store: Any,
    rank: int,
    world_size: int,
    *,
    what: str,
    towards: tuple[str, int] | None,
    local_rank: int | None,
    local_world_size: int | None,
    secret: bytes,
    timeout: float,
    waiting: log.Waiting | None = None,
) -> tuple[group.Group, int]:
    """Joins all ranks that use this store. Returns the group, and a number that no earlier group of this store had.

    `what` is the function that the user called, for error texts. `towards` is as in `group.join` on rank 0; other ranks
    listen towards rank 0. `timeout` is in seconds. `waiting` is as in `group.join`. Raises BaguaTimeoutError naming the
    ranks that did not come, and BaguaError if the store does not answer.
    """
    log.configure()
    found = waiting or log.Waiting(rank, world_size)

    def build(
        towards: tuple[str, int] | None, token: str, spread: Callable[[bytes, bytes], list[bytes]]
    ) -> group.Group:
        # Only processes that can read the store have the token, so it keeps other processes out even without a secret.
        both = secret + token.encode()
        return group.join(
            rank,
            world_size,
            lambda address: spread(address, both),
            towards=towards,
            local_rank=local_rank,
            local_world_size=local_world_size,
            secret=both,
            timeout=timeout,
            waiting=found,
        )

    chosen = config.settings(secret=secret)
    tls, heartbeat = chosen.tls, chosen.heartbeat_timeout
    entries = _Entries(store, what, timeout, look=(lambda: found([0])) if rank else (lambda: None))
    if world_size == 1:
        return build(towards, "", lambda address, _: [address]), entries.count(1)
    if rank == 0:
        server = extension.RendezvousServer(group.listen_host(towards, world_size, local_world_size), 0)
        host, port = server.address()
        entry = _Server(host, port, secrets.token_hex(16))
        number = entries.announce(entry)

        def serve(address: bytes, both: bytes) -> list[bytes]:
            return server.serve(world_size, address, both, timeout, tls, heartbeat, found)

        return build(towards, entry.token, serve), number

    trouble = ""
    for number, at in entries.servers(process.joined_places.get(rank)):

        def fetch(address: bytes, both: bytes, at: _Server = at) -> list[bytes]:
            left = max(entries.left(), 0.0)
            try:
                return extension.rendezvous_at(
                    at.host, at.port, rank, world_size, address, both, left, tls, heartbeat, found
                )
            except PeerLostError as lost:
                if lost.rank != 0:
                    raise
                raise _Gone(str(lost)) from lost
            except BaguaTimeoutError as late:
                # The last attempt had only the rest of the time.
                if late.missing != (0,):
                    raise
                raise _Gone(str(late)) from late

        try:
            joined = build((at.host, at.port), at.token, fetch)
        except _Gone as gone:
            trouble = f" ({gone})"
        else:
            process.joined_places[rank] = at.token
            return joined, number
    text = f"{what}: timed out after {timeout:.1f} s waiting for rank(s) 0{trouble}"
    raise BaguaTimeoutError(text, missing=(0,), after=timeout, noticed_by=rank)


class _Gone(Exception):
    """An entry is not served: it is of an earlier group, its rank 0 died, or the route to it is interrupted."""


@dataclass(frozen=True)
class _Server:
    """An entry of the store: the address of the rendezvous server on a group's rank 0."""

    host: str
    port: int
    #: Random token that identifies the group.
    token: str


class _Entries:
    """The numbered entries in the store. All requests fail when the timeout expires."""

    def __init__(self, store: Any, what: str, limit: float, look: Callable[[], object] = lambda: None) -> None:
        self._store, self._what, self._look = store, what, look
        # Each attempt of the launcher has its own counters.
        self._prefix = f"bagua/{config.attempt()}"
        self._until = time.monotonic() + limit

    def left(self) -> float:
        return self._until - time.monotonic()

    def count(self, more: int) -> int:
        return self._ask(lambda: int(self._store.add(f"{self._prefix}/places", more)))

    def announce(self, server: _Server) -> int:
        """Writes the newest entry. Returns its number."""
        number = self.count(0) + 1
        # Count after writing, so that a rank that reads the number finds the entry.
        self._ask(lambda: self._store.set(self._key(number), json.dumps(asdict(server)).encode()))
        return self.count(1)

    def servers(self, spent: str | None) -> Iterator[tuple[int, _Server]]:
        """Yields the newest entry and its number again and again, after pauses. Skips the token `spent`."""
        number, pause = max(self.count(0), 1), _PAUSE
        server = self._read(number, self.left())
        while server is not None and self.left() > 0:
            patience = self.left()
            if server.token != spent:
                yield number, server
                patience, pause = pause, min(2 * pause, _LONGEST_PAUSE)
            newer = self._read(number + 1, min(patience, self.left()))
            if newer is not None:
                number, server, pause = number + 1, newer, _PAUSE

    def _key(self, number: int) -> str:
        return f"{self._prefix}/place{number}"

    def _read(self, number: int, patience: float) -> _Server | None:
        """Returns an entry; None if it does not appear within `patience` seconds."""
        # A store takes 0 as no limit.
        patience = max(patience, 0.001)
        began = time.monotonic()
        try:
            key, limit = [self._key(number)], timedelta(seconds=patience)
            tcp_store_requests.ask(lambda: self._store.wait(key, limit), patience + _GRACE, self._look)
        except TimeoutError:
            return None
        except Exception as failure:
            # The class of the exception varies. A store that is gone fails at once.
            if time.monotonic() - began < patience / 2:
                raise self._silent(failure) from failure
            return None
        return _Server(**json.loads(self._ask(lambda: self._store.get(self._key(number)))))

    def _ask(self, request: Callable[[], _T]) -> _T:
        try:
            return tcp_store_requests.ask(request, max(self.left(), 0.0), self._look)
        except Exception as failure:
            raise self._silent(failure) from failure

    def _silent(self, failure: Exception) -> BaguaError:
        return BaguaError(f"{self._what}: the store does not answer: {failure}")
