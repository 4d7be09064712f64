"""Elastic jobs: the first start of all processes, and the return of one process into a running job.

1. Each rank runs a join server (``rust/bagua-group/src/joining``) and writes its address into an address book. The book
   only distributes addresses: a handshake proves that the process at an address belongs to the job.
2. If the servers of all ranks answer and none is in a job, rank 0 writes the address of the first group's rendezvous.
3. If a process reaches a rank that is in a job, it joins the averaging of that job's models instead
   (:mod:`..algorithms.async_model_average`).
"""

from __future__ import annotations

import json
import secrets
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bagua import config, extension, log
from bagua import group as neutral
from bagua.errors import BaguaError, BaguaTimeoutError
from bagua.process_state import note_job, process

from ..model_engine.state import model_state
from ..process_group import Communicator
from ..process_group.collectives import Collectives
from .state import membership_state

# Seconds to wait for a join server's answer, and between two reads of the address book.
_ANSWER, _PAUSE = 2.0, 0.1


class _AddressBook:
    """The address book: JSON objects in files, or in a store served by ``python -m bagua.distributed.store`` or a
    runner (``rust/bagua-group/src/store``).
    """

    def __init__(self, url: str) -> None:
        """Raises ValueError if the URL is not that of an address book, and BaguaTimeoutError if no server answers."""
        place = config.book_place(url)
        if isinstance(place, Path):
            place.mkdir(mode=0o700, parents=True, exist_ok=True)
            #: A (host, port) in the direction of the other ranks; None if unknown.
            self.towards: tuple[str, int] | None = None
            self._store = extension.Store.files(place)
            return
        self.towards = place
        chosen = config.settings()
        try:
            self._store = extension.Store.tcp(*place, chosen.secret, min(chosen.timeout, 60.0), chosen.tls)
        except BaguaTimeoutError as failure:
            text = f"init_process_group: no server answers for the address book {url}: {failure.during}"
            raise BaguaTimeoutError(text, missing=(), after=chosen.timeout, noticed_by=-1) from failure

    def read(self, name: str) -> dict[str, Any] | None:
        found = self._store.get(name)
        return None if found is None else _entry(found)

    def write(self, name: str, entry: dict[str, Any]) -> None:
        self._store.set(name, json.dumps(entry).encode())

    def write_new(self, name: str, entry: dict[str, Any]) -> dict[str, Any]:
        """Writes an entry unless it exists, and returns the entry that is then in the book."""
        found = _entry(self._store.set_new(name, json.dumps(entry).encode()))
        if found is None:
            raise BaguaError(f"{name!r} in the address book is not an entry")
        return found


def _entry(text: bytes) -> dict[str, Any] | None:
    try:
        found = json.loads(text)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


@dataclass
class Job:
    """The elastic job that this process is in."""

    join_server: extension.JoinServer
    #: True if this process found the job running.
    rejoined: bool
    rank: int
    world_size: int


def job() -> Job | None:
    """Returns the elastic job of this process; None in other jobs."""
    found: Job | None = membership_state.elastic
    return found


def rejoined() -> bool:
    """Returns True if this process rejoined a running elastic job."""
    found = job()
    return found is not None and found.rejoined


def enter(url: str, rank: int, world_size: int, local_rank: int, local_world_size: int) -> neutral.Group:
    """Forms the job with all other ranks, or finds it running.

    Returns the job's group, or a group of this process alone if the job was running. Raises BaguaError if another
    running process has this rank, and BaguaTimeoutError after ``BAGUA_TIMEOUT`` seconds.
    """
    chosen = config.settings()
    log.configure()
    waiting = log.Waiting(rank, world_size)
    book = _AddressBook(url)
    until = time.monotonic() + chosen.timeout
    token = str(book.write_new("token", {"token": secrets.token_hex(16)}).get("token", "")).encode()
    # The token identifies the job, because a restarted rank shares no addresses with the other ranks.
    note_job(token)
    # The token keeps processes of other jobs out if the user has set no secret.
    secret = chosen.secret + token
    towards = book.towards if local_world_size < world_size else None
    host = neutral.listen_host(towards, world_size, local_world_size)
    entering = neutral.parameters(chosen, rank, world_size, name="elastic", listen_host=host, secret=secret)
    own = extension.JoinServer(entering, token)
    other = _status(own, rank, book.read(f"rank-{rank}"))
    if other is not None:
        raise BaguaError(f"rank {rank} is alive: another process of this job runs as this rank")
    book.write(f"rank-{rank}", {"server": own.address, "incarnation": own.incarnation})

    def alone() -> neutral.Group:
        def spread(address: bytes) -> list[bytes]:
            return [address]

        return neutral.join(0, 1, spread, local_rank=0, local_world_size=1, secret=secret, timeout=chosen.timeout)

    while True:
        answers = _ask_servers(book, own, rank, world_size)
        left = max(until - time.monotonic(), 0.001)
        start = _start(book, rank, own, answers, world_size, host)
        if start is not None:
            server, place = start

            def spread(address: bytes, server: Any = server, place: Any = place, left: float = left) -> list[bytes]:
                if server is not None:
                    return list(
                        server.serve(world_size, address, secret, left, chosen.tls, chosen.heartbeat_timeout, waiting)
                    )
                return extension.rendezvous_at(
                    place[0],
                    place[1],
                    rank,
                    world_size,
                    address,
                    secret,
                    left,
                    chosen.tls,
                    chosen.heartbeat_timeout,
                    waiting,
                )

            group = (
                alone()
                if world_size == 1
                else neutral.join(
                    rank,
                    world_size,
                    spread,
                    towards=towards,
                    local_rank=local_rank,
                    local_world_size=local_world_size,
                    secret=secret,
                    timeout=chosen.timeout,
                    waiting=waiting,
                )
            )
            # The other ranks may have written their entries in the meantime.
            _ask_servers(book, own, rank, world_size)
            break
        if any(answer["in_job"] for answer in answers.values()):
            group = alone()
            break
        missing = tuple(sorted(set(range(world_size)) - set(answers) - {rank}))
        waiting(missing)
        if time.monotonic() > until:
            ranks = ", ".join(map(str, missing))
            text = f"init_process_group: timed out after {chosen.timeout:.1f} s waiting for rank(s) {ranks}"
            raise BaguaTimeoutError(text, missing=missing, after=chosen.timeout, noticed_by=rank)
        time.sleep(_PAUSE)
    membership_state.elastic = Job(own, start is None, rank, world_size)
    process.elastic_stats = stats
    own.enter_job()
    return group


def _status(own: extension.JoinServer, rank: int, entry: dict[str, Any] | None) -> dict[str, Any] | None:
    """Returns the state of a rank from the server named in its entry; None if no process of the job answers there."""
    if entry is None:
        return None
    try:
        return own.status(rank, str(entry.get("server", "")), _ANSWER)
    except (BaguaError, ValueError):
        return None


def _ask_servers(
    book: _AddressBook, own: extension.JoinServer, own_rank: int, world_size: int
) -> dict[int, dict[str, Any]]:
    """Returns the answers of the other ranks' servers, by rank, and tells their addresses to the own server."""
    answers = {}
    for rank in range(world_size):
        if rank == own_rank:
            continue
        try:
            entry = book.read(f"rank-{rank}")
        except BaguaError:
            continue
        answer = _status(own, rank, entry)
        if answer is not None and entry is not None:
            own.note_server(rank, str(entry["server"]))
            answers[rank] = answer
    return answers


def _start(
    book: _AddressBook,
    rank: int,
    own: extension.JoinServer,
    answers: dict[int, dict[str, Any]],
    world_size: int,
    host: str,
) -> tuple[extension.RendezvousServer | None, tuple[str, int]] | None:
    """Returns rank 0's server and the address of the first group's rendezvous; None if it has not started."""
    if rank == 0:
        if len(answers) < world_size - 1 or any(answer["in_job"] for answer in answers.values()):
            return None
        server = extension.RendezvousServer(host, 0)
        host, port = server.address()
        incarnations = {str(other): answer["incarnation"] for other, answer in answers.items()}
        book.write("start", {"host": host, "port": port, "incarnations": incarnations})
        return server, (host, port)
    start = book.read("start")
    # An entry from an earlier start names other processes.
    if start is None or start.get("incarnations", {}).get(str(rank)) != own.incarnation:
        return None
    return None, (str(start["host"]), int(start["port"]))


def _refusing(name: str) -> Any:
    def refuse(self: Any, *args: Any, **kwargs: Any) -> Any:
        raise BaguaError(
            f"{name}: this process rejoined a running elastic job and is in no group with its other ranks; only the "
            "averaging of models communicates with them"
        )

    return refuse


class RejoinedCommunicator(Communicator):
    """The default group's communicator in a process that rejoined. Its collectives raise BaguaError."""


for _name, _method in vars(Collectives).items():
    if callable(_method) and not _name.startswith("_") and _name not in ("rank", "nranks"):
        setattr(RejoinedCommunicator, _name, _refusing(_name))


def stats() -> dict[str, Any] | None:
    """Returns "view", "ranks", "door" ("host:port") and "connections_refused"; None outside elastic jobs."""
    found = job()
    if found is None:
        return None
    membership: dict[str, Any] = {"view": 1, "ranks": list(range(found.world_size))}
    for ddp in list(model_state.wrapped.values()):
        algorithm: Any = getattr(ddp, "bagua_algorithm", None)
        if hasattr(algorithm, "stats"):
            numbers = algorithm.stats()
            membership = {"view": numbers["view"], "ranks": numbers["ranks"]}
            break
    return {**membership, "door": found.join_server.address, "connections_refused": found.join_server.refused}
