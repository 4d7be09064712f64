"""Requests to a torch.distributed store that time out even if its server does not answer.

torch's TCPStore ignores its own timeout while a frozen server, or another program on that port, sends no answer. Each
request therefore runs on a thread, and the caller waits for the thread with a timeout. A thread without an answer stays
in its call until the server closes the connection or this process ends.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

__all__ = ["ask"]

_T = TypeVar("_T")

#: Seconds between two calls of `look`.
_SLICE = 0.02


def ask(request: Callable[[], _T], limit: float, look: Callable[[], object] = lambda: None) -> _T:
    """Calls `request` on a thread. Returns its result or raises its exception.

    Raises TimeoutError after `limit` seconds. Meanwhile, calls `look` repeatedly; an exception in it ends the wait.
    """
    answers: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()
    until = time.monotonic() + limit
    # A daemon thread, so that the process can end even if the server never answers.
    threading.Thread(target=_answer, args=(request, answers), name="bagua-store", daemon=True).start()
    while True:
        left = until - time.monotonic()
        try:
            value, failure = answers.get(timeout=max(min(left, _SLICE), 0.0))
        except queue.Empty:
            look()
            if left <= 0:
                raise TimeoutError(f"no answer for {limit:.1f} s") from None
        else:
            if failure is not None:
                raise failure
            found: _T = value
            return found


def _answer(request: Callable[[], Any], answers: queue.SimpleQueue[tuple[Any, BaseException | None]]) -> None:
    try:
        answers.put((request(), None))
    except BaseException as failure:
        # The traceback would keep the store alive in a reference cycle.
        answers.put((None, failure.with_traceback(None)))
