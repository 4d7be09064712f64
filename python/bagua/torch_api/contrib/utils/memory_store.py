"""A store in the memory of this process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from .store import Store

__all__ = ["MemoryStore"]


class MemoryStore(Store):
    """A dictionary that holds at most ``capacity`` bytes of values.

    A full store keeps its values and takes no new ones: training reads every sample once per epoch, so that any choice
    of samples serves as well. A forked process continues with its own copy.
    """

    def __init__(self, capacity: int = 107374182400) -> None:
        if capacity <= 0:
            raise ValueError(f"the capacity is {capacity} bytes; it must be positive")
        self._capacity = capacity
        self._values: dict[str, bytes] = {}
        self._bytes = 0

    def mset(self, dictionary: Mapping[str, str | bytes]) -> None:
        for key, value in dictionary.items():
            raw = value.encode() if isinstance(value, str) else bytes(value)
            self._bytes -= len(self._values.pop(key, b""))
            if self._bytes + len(raw) <= self._capacity:
                self._values[key] = raw
                self._bytes += len(raw)

    def get(self, key: str) -> bytes | None:
        return self._values.get(key)

    def mget(self, keys: Sequence[str]) -> list[bytes | None]:
        return [self._values.get(key) for key in keys]

    def num_keys(self) -> int:
        return len(self._values)

    def clear(self) -> None:
        self._values.clear()
        self._bytes = 0
