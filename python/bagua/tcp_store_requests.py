"""Requests to a store of torch.distributed that time out when its server does not answer.

A client of torch's TCPStore waits for an answer without a limit: when the process that serves the store is frozen, or
the line to it is cut, the call never returns. So each request is made by a thread of its own, and the caller waits for
the thread as long as it wants. A thread that returns into an interpreter that ends would abort the process, so the exit
ends the connections of requests that were given up, which ends the calls, and waits for them.
"""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, TypeAlias, TypeVar

from bagua.lifecycle import at_exit

__all__ = ["Connection", "StoreRequests"]

_T = TypeVar("_T")
# A result, or what was raised.
_Answers: TypeAlias = "queue.SimpleQueue[tuple[Any, BaseException | None]]"

#: Seconds that the exit of the process waits for requests that were given up.
_PATIENCE = 5.0

#: Seconds between two looks at whether waiting still makes sense, and whether a shut connection was opened anew.
_SLICE = 0.02

#: A folder with an entry for each open descriptor of this process, on Linux and elsewhere.
_DESCRIPTORS = "/proc/self/fd" if os.path.isdir("/proc/self/fd") else "/dev/fd"


class Connection:
    """The sockets that C++ code of this process opens towards one port, which it cannot be asked to close.

    They are those that were not there when this object was made; after :meth:`opened`, those that were there then.
    """

    def __init__(self, port: int) -> None:
        self._port = port
        self._before = {number for number, _ in _sockets()}
        # Numbers of the sockets, once they are all open.
        self._own: set[int] | None = None
        #: Whether the sockets were shut.
        self.ended = False

    def opened(self) -> None:
        """All sockets are open: later ones belong to other code."""
        self._own = {number for number, _ in self._towards_port()}

    def shut(self) -> None:
        """Ends both directions of every socket: a thread that reads from it gets an error."""
        self.ended = True
        for _, stream in self._towards_port():
            with contextlib.suppress(OSError):
                stream.shutdown(socket.SHUT_RDWR)

    def _towards_port(self) -> Iterator[tuple[int, socket.socket]]:
        for number, stream in _sockets():
            if number not in self._before if self._own is None else number in self._own:
                # It may have no peer yet, or no more.
                with contextlib.suppress(OSError):
                    if stream.getpeername()[1] == self._port:
                        yield number, stream


class StoreRequests:
    """The requests to one store, one at a time: after one that was given up, the next waits for that one first.

    `cause` is called while a request waits, and raises when no answer is worth waiting for. `connection` is the
    store's.
    """

    def __init__(self, cause: Callable[[], None] | None = None, connection: Connection | None = None) -> None:
        self._cause = cause
        self._connection = connection
        # The answer that is still to come to a request that was given up.
        self._open: _Answers | None = None
        self._thread: threading.Thread | None = None

    def let_go(self) -> None:
        """From now on only time ends a wait."""
        self._cause = None

    def abandon(self) -> None:
        """The last call: a request that is still open ends with its connection, even one that it opens later."""
        if self._open is None or self._connection is None or self._thread is None:
            return
        self._connection.shut()
        # A daemon, as what it waits for: the exit of the process does the same.
        ending = partial(_end, self._thread, self._connection)
        threading.Thread(target=ending, name="bagua-store-end", daemon=True).start()

    def ask(self, request: Callable[[], _T], limit: float) -> _T:
        """What `request` returns or raises; TimeoutError when it did neither for `limit` seconds."""
        until = time.monotonic() + limit
        if self._open is not None:
            self._await(self._open, until, limit)
        self._open = queue.SimpleQueue()
        # A daemon: the process may end although the server never answers.
        thread = threading.Thread(target=_make, args=(request, self._open), name="bagua-store", daemon=True)
        self._thread = thread
        thread.start()
        try:
            value, failure = self._await(self._open, until, limit)
        except BaseException:
            at_exit(partial(_end, thread, self._connection))
            raise
        if failure is not None:
            raise failure
        found: _T = value
        return found

    def _await(self, answers: _Answers, until: float, limit: float) -> tuple[Any, BaseException | None]:
        while True:
            left = until - time.monotonic()
            try:
                answer = answers.get(timeout=max(min(left, _SLICE), 0.0))
            except queue.Empty:
                if self._cause is not None:
                    self._cause()
                if left <= 0:
                    raise TimeoutError(f"no answer for {limit:.1f} s") from None
            else:
                self._open = None
                return answer


def _make(request: Callable[[], Any], answers: _Answers) -> None:
    try:
        answers.put((request(), None))
    except BaseException as failure:
        # Its traceback would keep the store, in a cycle that only the garbage collector finds.
        answers.put((None, failure.with_traceback(None)))


def _end(thread: threading.Thread, connection: Connection | None) -> None:
    """Waits for a thread whose request was given up."""
    until = time.monotonic() + _PATIENCE
    while thread.is_alive() and time.monotonic() < until:
        if connection is not None:
            # torch connects once more when it has lost its connection.
            connection.shut()
        thread.join(_SLICE)


def _sockets() -> Iterator[tuple[int, socket.socket]]:
    """The Internet sockets of this process, each with its inode's number, and open for as long as it is looked at."""
    for name in os.listdir(_DESCRIPTORS):
        # Its owner may close it at any moment.
        try:
            descriptor = os.dup(int(name))
        except OSError:
            continue
        found = os.fstat(descriptor)
        if not stat.S_ISSOCK(found.st_mode):
            os.close(descriptor)
            continue
        with socket.socket(fileno=descriptor) as stream:
            if stream.family in (socket.AF_INET, socket.AF_INET6):
                yield found.st_ino, stream
