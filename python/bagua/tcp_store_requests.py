"""Requests to a store of torch.distributed that time out when its server does not answer.

A client of torch's TCPStore waits for the answer of a frozen server, or of another program on that port, without a
limit, whatever its timeout is. So a thread makes each request, and the caller waits for the thread as long as it wants.
A thread that gets no answer stays in its call until the server's end closes the connection, or this process ends.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

__all__ = ["ask"]

_T = TypeVar("_T")

#: Seconds between two looks at whether waiting still makes sense.
_SLICE = 0.02


def ask(request: Callable[[], _T], limit: float, look: Callable[[], object] = lambda: None) -> _T:
    """Returns what `request` returns, or raises what it raises; TimeoutError if it does neither for `limit` seconds.

    `look` is called again and again meanwhile. What it raises ends the wait.
    """
    answers: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()
    until = time.monotonic() + limit
    # A daemon: the process may end although the server never answers.
    threading.Thread(target=_make, args=(request, answers), name="bagua-store", daemon=True).start()
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


def _make(request: Callable[[], Any], answers: queue.SimpleQueue[tuple[Any, BaseException | None]]) -> None:
    try:
        answers.put((request(), None))
    except BaseException as failure:
        # Its traceback would keep the store, in a cycle that only the garbage collector finds.
        answers.put((None, failure.with_traceback(None)))
