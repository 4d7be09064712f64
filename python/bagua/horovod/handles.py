"""Handles of operations that may still be running."""

from __future__ import annotations

from typing import Any

from bagua.handle import Handle

__all__ = ["poll", "synchronize"]


def poll(handle: Handle[Any]) -> bool:
    """True when :func:`synchronize` would not wait."""
    return _checked(handle).is_completed()


def synchronize(handle: Handle[Any]) -> Any:
    """Waits for an asynchronous operation, and returns what its synchronous form returns, or raises its error."""
    return _checked(handle).wait()


def _checked(handle: Any) -> Handle[Any]:
    if not isinstance(handle, Handle):
        raise TypeError(f"a handle of an asynchronous operation is needed, not {type(handle).__name__}")
    return handle
