"""`Handle`: an asynchronous operation, or several operations as one, and the step that computes the result."""

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
        """Blocks until the operation is done. Raises its error, or BaguaTimeoutError after ``timeout`` seconds."""

    def then(self, callback: Callable[[Exception | None], object], /) -> None:
        """Calls ``callback(error)`` once when the operation is done: ``error`` is ``None``, or what :meth:`wait`
        raises.

        If the operation is already done, the call happens at once, otherwise on a thread that calls the callbacks of
        all handles. An exception in the callback goes to ``sys.unraisablehook``.
        """

    def is_completed(self) -> bool:
        """Returns True if the operation is done or has failed."""


class Handle(Generic[T]):
    """The future result of an asynchronous verb.

    The result is `result`, or the return value of `finish`, which computes it from the received data. `finish` runs
    once: on the first thread that waits, before the first callback, or when `is_completed` finds that all parts are
    done.
    """

    def __init__(
        self,
        parts: Sequence[AnyHandle | None],
        finish: Callable[[], T] | None = None,
        *,
        result: Any = None,
        keep: Any = None,
    ) -> None:
        # Keeps the group alive: a sub-group without references leaves, and its operations fail.
        self._keep = keep
        # A part that is None was done at once. The core's handles also take streams and have `synchronize`.
        self._parts: list[Any] = [part for part in parts if part is not None]
        # None after it has run.
        self._finish = finish
        self._result: T = result
        # The exception that `finish` raised.
        self._failure: Exception | None = None
        # Held while `finish` runs, so that a second thread waits for it.
        self._lock = threading.Lock()

    def wait(self, timeout: float | None = None, *, stream: int | None = None) -> T:
        """Blocks until the verb is done. Returns its result, or raises its error.

        `timeout` is in seconds, for each part; None waits until the verb's own timeout. BaguaTimeoutError leaves the
        verb running.

        For arrays on a CUDA device, waits for the ranks but not for the device: work that is put on `stream` (None: the
        stream of the verb) after this call sees the result.
        """
        for part in self._parts:
            if stream is None:
                part.wait(timeout)
            else:
                part.wait(timeout, stream=stream)
        return self._finished()

    def synchronize(self, timeout: float | None = None) -> T:
        """Blocks as `wait` does, and then until the device is done too, so that the host may read the result."""
        for part in self._parts:
            part.synchronize(timeout)
        return self._finished()

    def then(self, callback: Callable[[Exception | None], object], /) -> None:
        """Calls `callback(error)` exactly once when the verb is done: `error` is None, or the exception that `wait`
        raises.

        If the verb is already done, the call happens here. Otherwise it happens on the thread "bagua-callbacks", which
        calls all callbacks of the process one after another. A callback may block and start verbs; only other callbacks
        wait for it. The arrays are kept alive until the verb is done. An exception in a callback goes to
        `sys.unraisablehook`. KeyboardInterrupt and SystemExit are raised here if the call happens here.
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
        """Returns True if the verb is done or has failed. On a device, the device must be done too."""
        if not all(part.is_completed() for part in self._parts):
            return False
        if self._finish is not None:
            # An error is what `wait` raises.
            with contextlib.suppress(Exception):
                Handle.wait(self)
        return True

    def senders(self) -> list[int | None]:
        """Returns, for received messages, the rank that sent each; None for a message that has not come."""
        return [sender for part in self._parts for sender in part.senders()]

    @property
    def _is_what_came(self) -> bool:
        """True if nothing has to be done between the end of the parts and a callback."""
        return self._finish is None and self._failure is None

    def _before_callback(self) -> object:
        """Computes the result when all parts are done without an error, before the callback runs."""
        return self._finished()

    def _finished(self) -> T:
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
        """Calls `finish`. Subclasses choose the stream."""
        return finish()
