"""Handles of operations that may still be running."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from bagua.torch_api import process_group


class Handle:
    """What the asynchronous forms return, for :func:`poll` and :func:`synchronize`."""

    __slots__ = ("_finish", "_parts", "_result")

    def __init__(self, parts: Sequence[process_group.Handle | None], finish: Callable[[], Any]) -> None:
        # The operations; None for one that is done.
        self._parts = [part for part in parts if part is not None]
        # Makes the result of what they received; None once it ran.
        self._finish: Callable[[], Any] | None = finish
        self._result: Any = None

    def is_completed(self) -> bool:
        """True when the communication is done or has failed."""
        return all(part.is_completed() for part in self._parts)

    def wait(self) -> Any:
        """The result, when it is there. Raises the operation's error."""
        for part in self._parts:
            part.wait()
        finish, self._finish = self._finish, None
        if finish is not None:
            self._result = finish()
        return self._result


def poll(handle: Handle) -> bool:
    """True when :func:`synchronize` would not wait."""
    return _checked(handle).is_completed()


def synchronize(handle: Handle) -> Any:
    """Waits for an asynchronous operation, and returns what its synchronous form returns, or raises its error."""
    return _checked(handle).wait()


def together(handles: Sequence[Handle]) -> Handle:
    """The handle of several operations, whose result is the list of theirs."""
    parts = [part for handle in handles for part in handle._parts]
    return Handle(parts, lambda: [handle.wait() for handle in handles])


def _checked(handle: Handle) -> Handle:
    if not isinstance(handle, Handle):
        raise TypeError(f"a handle of an asynchronous operation is needed, not {type(handle).__name__}")
    return handle
