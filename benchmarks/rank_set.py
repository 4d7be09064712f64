"""Sets of rank processes that answer requests: one set for each library, or for each build of it.

Libraries that exclude each other in one process (three MPIs, two builds of Bagua) run in sets of their own, which take
part in one measurement: the benchmark sends a request to one set at a time, while the ranks of every other set sleep in
a read from their socket. The ranks of a set meet at a barrier of their own (`common.Barrier`).

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


def torchrun(python: str, ranks: int) -> list[str]:
    """The command by which torch starts this number of processes of the command that follows it."""
    return [python, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "--no-python"]


class RankSet:
    """Rank processes and a connection to each. A context manager: leaving it ends the processes.

    `python` runs the ranks. `launcher` is the command that starts as many processes of the command that follows it;
    torchrun by default. RankError when they do not connect.
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
        self._process: subprocess.Popen[bytes] | None = None
        command = [python, str(HERE / "rank.py"), self._folder.name, str(ranks)]
        environment = {**os.environ, **ENVIRONMENT, **(env or {})}
        try:
            with socket.socket(socket.AF_UNIX) as server:
                server.bind(f"{self._folder.name}/socket")
                server.listen(ranks)
                # Intel's launcher reads its standard input.
                self._process = subprocess.Popen(
                    [*(launcher or torchrun(python, ranks)), *command], env=environment, stdin=subprocess.DEVNULL
                )
                self._connections = self._accept(server, self._process)
        except BaseException:
            self.close()
            raise

    def _accept(self, server: socket.socket, launcher: subprocess.Popen[bytes]) -> list[Connection]:
        by_rank: dict[int, Connection] = {}
        until = time.monotonic() + START
        server.settimeout(0.1)
        while len(by_rank) < self.ranks:
            try:
                accepted, _ = server.accept()
            except TimeoutError:
                if (code := launcher.poll()) is not None:
                    raise RankError(f"a rank or its launcher ended with {code} before it connected") from None
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
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(END if self._connections else 0.0)
            if self._process.poll() is None:
                # A launcher ends its ranks when it is asked to end.
                self._process.terminate()
                self._process.wait()
        self._connections, self._process = [], None
        self._folder.cleanup()

    def __enter__(self) -> RankSet:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
