"""Requests to a store of torch.distributed that are given up when nobody answers.

A client of torch's TCPStore waits for an answer without a limit: when the process that serves the store is frozen, or
the line to it is cut, the call never returns. So each request is made by a thread of its own, and the caller waits for
the thread as long as it wants. A thread that returns into an interpreter that ends would abort the process, so the exit
waits a moment for those that were given up.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar

from bagua.lifecycle import join_at_exit

__all__ = ["StoreRequests"]

_T = TypeVar("_T")
# A result, or what was raised.
_Answers: TypeAlias = "queue.SimpleQueue[tuple[Any, BaseException | None]]"

#: Seconds that the exit of the process waits for requests that were given up.
_PATIENCE = 2.0

#: Seconds between two looks at whether waiting still makes sense.
_SLICE = 0.02


class StoreRequests:
    """The requests to one store, one at a time: after one that was given up, the next waits for that one first.

    `cause` is called while a request waits, and raises when no answer is worth waiting for.
    """

    def __init__(self, cause: Callable[[], None] | None = None) -> None:
        self._cause = cause
        # The answer that is still to come to a request that was given up.
        self._open: _Answers | None = None

    def let_go(self) -> None:
        """From now on only time ends a wait."""
        self._cause = None

    def ask(self, request: Callable[[], _T], limit: float) -> _T:
        """What `request` returns or raises; TimeoutError when it did neither for `limit` seconds."""
        until = time.monotonic() + limit
        if self._open is not None:
            self._await(self._open, until, limit)
        self._open = queue.SimpleQueue()
        # A daemon: the process may end although nobody ever answers.
        thread = threading.Thread(target=_make, args=(request, self._open), name="bagua-store", daemon=True)
        thread.start()
        try:
            value, failure = self._await(self._open, until, limit)
        except BaseException:
            join_at_exit(thread, _PATIENCE)
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
        answers.put((None, failure))
