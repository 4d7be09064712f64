"""Sets of rank processes that answer requests: one set for each library, or for each build of it.

Libraries that cannot live in one process (three MPIs, two builds of Bagua) run in sets of their own, which take part in
one measurement: the benchmark sends a request to one set at a time, while the ranks of every other set sleep in a read
from their socket. The ranks of a set meet at a barrier of their own (`common.Barrier`).

The benchmark is the client (:class:`RankSet`); `rank.py` is the process of a rank and serves the requests.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import tempfile
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

from common import ENVIRONMENT, HERE

#: Seconds that the ranks of a set have to connect, and to end.
START, END = 60.0, 10.0


class RankError(RuntimeError):
    """A rank ended, or did not answer in time."""


class RankSet:
    """Rank processes and a connection to each. A context manager: leaving it ends the processes.

    `python` runs the ranks. `launcher` is a command of an MPI that starts them (`-n` and the number are added), or
    empty to start them directly. RankError when they do not connect.
    """

    def __init__(
        self,
        name: str,
        ranks: int,
        python: str,
        *,
        launcher: Sequence[str] = (),
        env: dict[str, str] | None = None,
        limit: float,
    ) -> None:
        self.name, self.ranks = name, ranks
        self._until = time.monotonic() + limit
        self._folder = tempfile.TemporaryDirectory(prefix="bagua-bench-")
        self._connections: list[Connection] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        command = [python, str(HERE / "rank.py"), self._folder.name, str(ranks)]
        environment = {**os.environ, **ENVIRONMENT, **(env or {})}
        try:
            with socket.socket(socket.AF_UNIX) as server:
                server.bind(f"{self._folder.name}/socket")
                server.listen(ranks)
                if launcher:
                    self._start([*launcher, "-n", str(ranks), *command], environment)
                else:
                    for rank in range(ranks):
                        self._start(command, {**environment, "RANK": str(rank)})
                self._connections = self._accept(server)
        except BaseException:
            self.close()
            raise

    def _start(self, command: Sequence[str], environment: dict[str, str]) -> None:
        # Intel's launcher reads its standard input.
        self._processes.append(subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL))

    def _accept(self, server: socket.socket) -> list[Connection]:
        by_rank: dict[int, Connection] = {}
        until = time.monotonic() + START
        server.settimeout(0.1)
        while len(by_rank) < self.ranks:
            try:
                accepted, _ = server.accept()
            except TimeoutError:
                codes = [code for process in self._processes if (code := process.poll()) is not None]
                if codes:
                    raise RankError(f"a rank or its launcher ended with {codes[0]} before it connected") from None
                if time.monotonic() > until:
                    raise RankError(f"{len(by_rank)} of {self.ranks} ranks connected within {START:.0f} s") from None
                continue
            accepted.setblocking(True)
            connection = Connection(accepted.detach())
            by_rank[connection.recv()] = connection
        return [by_rank[rank] for rank in range(self.ranks)]

    def ask(self, request: str, *arguments: Any) -> list[Any]:
        """Calls a method of `rank.Server` on every rank; the results by rank. RankError names a rank that failed."""
        results: dict[Any, Any] = {}
        try:
            for connection in self._connections:
                connection.send((request, arguments))
            while pending := [connection for connection in self._connections if connection not in results]:
                ready = wait(pending, max(0.0, self._until - time.monotonic()))
                if not ready:
                    raise RankError(f"{self.name} did not answer '{request}' within the limit of this benchmark")
                for connection in pending:
                    if connection in ready:
                        results[connection] = connection.recv()
        except (EOFError, OSError):
            raise RankError(f"a rank of {self.name} ended during '{request}'; its output is above") from None
        return [results[connection] for connection in self._connections]

    def close(self) -> None:
        """Ends the ranks: a rank returns when its connection closes, an MPI finalizes then. Idempotent."""
        for connection in self._connections:
            connection.close()
        until = time.monotonic() + (END if self._connections else 0.0)
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, until - time.monotonic()))
            if process.poll() is None:
                # A launcher ends its ranks when it is asked to end.
                process.terminate()
                process.wait()
        self._connections, self._processes = [], []
        self._folder.cleanup()

    def __enter__(self) -> RankSet:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
