"""`Handle`: an asynchronous operation, or several as one, with what makes the result of what they received."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from typing import Any, Generic, Protocol, TypeVar

__all__ = ["AnyHandle", "Handle"]

T = TypeVar("T")


class AnyHandle(Protocol):
    """An operation that may still be running."""

    def wait(self, timeout: float | None = None) -> Any:
        """Waits until it is done, or raises its error; after ``timeout`` seconds BaguaTimeoutError."""

    def then(self, callback: Callable[[Exception | None], object], /) -> None:
        """Calls ``callback(error)`` once when it is done: ``error`` is ``None``, or what :meth:`wait` raises.

        The call is made at once when it is done already, otherwise on a thread that calls the callbacks of all handles.
        An exception of the callback goes to ``sys.unraisablehook``.
        """

    def is_completed(self) -> bool:
        """True when it is done or has failed."""


class Handle(Generic[T]):
    """The outcome of an asynchronous verb, now or later.

    `result` is the outcome, or `finish` makes it of what was received: once, on the first thread that waits, before the
    first callback, or when `is_completed` finds that the parts are done.
    """

    def __init__(
        self,
        parts: Sequence[AnyHandle | None],
        finish: Callable[[], T] | None = None,
        *,
        result: Any = None,
        keep: Any = None,
    ) -> None:
        # The group: a sub-group without another reference leaves, and its operations fail.
        self._keep = keep
        # None is one that was done when it began. The core's have what a device asks for, too: streams, `synchronize`.
        self._parts: list[Any] = [part for part in parts if part is not None]
        # None once it ran.
        self._finish = finish
        self._result: T = result
        # What `finish` raised.
        self._failure: Exception | None = None
        # Held while `finish` runs, so that a second thread returns after it too.
        self._lock = threading.Lock()

    def wait(self, timeout: float | None = None, *, stream: int | None = None) -> T:
        """Waits until the verb is done, and returns its result.

        `timeout` is in seconds, for each part; None waits until the verb's own deadline. BaguaTimeoutError leaves the
        verb running.

        Of arrays on a CUDA device the ranks' part is waited for: work that `stream` (None: the call's) gets from now on
        sees the result, whether or not the device has come so far.
        """
        for part in self._parts:
            if stream is None:
                part.wait(timeout)
            else:
                part.wait(timeout, stream=stream)
        return self._finished()

    def synchronize(self, timeout: float | None = None) -> T:
        """As `wait`, until the device is done too, so that the host may read what it has written."""
        for part in self._parts:
            part.synchronize(timeout)
        return self._finished()

    def then(self, callback: Callable[[Exception | None], object], /) -> None:
        """Calls `callback(error)` when the verb is done, exactly once: `error` is None, or the exception that `wait`
        raises.

        When the verb is done already, the call happens here. Otherwise it happens on the thread "bagua-callbacks",
        which calls all callbacks of the process one after another: a callback may block and start verbs, and only
        other callbacks wait for it. The arrays are kept until the verb is done. An exception of a callback goes to
        `sys.unraisablehook`; only one that is no Exception (KeyboardInterrupt, SystemExit) is raised here, when the
        call happens here.
        """
        if not callable(callback):
            raise TypeError(f"{callback!r} is not callable")
        if len(self._parts) == 1 and self._is_what_came:
            self._parts[0].then(callback)
            return
        lock, errors, running = threading.Lock(), list[Exception](), [len(self._parts)]

        def ended(error: Exception | None) -> None:
            with lock:
                if error is not None:
                    errors.append(error)
                running[0] -= 1
                last = running[0] <= 0
            if not last:
                return
            error = errors[0] if errors else None
            if error is None:
                try:
                    self._before_callback()
                except Exception as failure:
                    error = failure
            callback(error)

        for part in self._parts:
            part.then(ended)
        if not self._parts:
            ended(None)

    def is_completed(self) -> bool:
        """True when the verb is done, well or not; of arrays on a device, when the device is done with them."""
        if not all(part.is_completed() for part in self._parts):
            return False
        if self._finish is not None:
            # An error is what `wait` raises.
            with contextlib.suppress(Exception):
                Handle.wait(self)
        return True

    def senders(self) -> list[int | None]:
        """Of received messages: the ranks that sent them; None for one that has not come."""
        return [sender for part in self._parts for sender in part.senders()]

    @property
    def _is_what_came(self) -> bool:
        """Whether nothing has to be done between the end of the parts and a callback."""
        return self._finish is None and self._failure is None

    def _before_callback(self) -> object:
        """Called when the parts are done, before a callback that is given no error."""
        return self._finished()

    def _finished(self) -> T:
        """The result, which is made now if that is still to be done."""
        if self._finish is not None:
            with self._lock:
                if self._finish is not None:
                    try:
                        self._result = self._run(self._finish)
                    except Exception as error:
                        self._failure = error
                    self._finish = None
        if self._failure is not None:
            raise self._failure
        return self._result

    def _run(self, finish: Callable[[], T]) -> T:
        """Calls `finish`, where its work belongs."""
        return finish()
