"""A store in the memory of this process."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from .store import Store

__all__ = ["MemoryStore"]


class MemoryStore(Store):
    """A dictionary that holds at most ``capacity`` bytes of values.

    A full store evicts values chosen at random. Training reads every sample once per epoch, and least-recently-used
    would then evict exactly the samples that are needed next. A forked process continues with its own copy.
    """

    def __init__(self, capacity: int = 107374182400) -> None:
        if capacity <= 0:
            raise ValueError(f"the capacity is {capacity} bytes; it must be positive")
        self._capacity = capacity
        self._values: dict[str, bytes] = {}
        # All keys in any order, for choosing one at random, and the index of each key in that list.
        self._keys: list[str] = []
        self._place: dict[str, int] = {}
        self._bytes = 0
        self._evictions = 0
        # A separate generator, so that the cache does not change the random numbers of the training script.
        self._draw = random.Random(0)

    def mset(self, dictionary: Mapping[str, str | bytes]) -> None:
        for key, value in dictionary.items():
            raw = value.encode() if isinstance(value, str) else bytes(value)
            self._remove(key)
            if len(raw) > self._capacity:
                continue
            while self._bytes + len(raw) > self._capacity:
                self._remove(self._keys[self._draw.randrange(len(self._keys))])
                self._evictions += 1
            self._values[key] = raw
            self._place[key] = len(self._keys)
            self._keys.append(key)
            self._bytes += len(raw)

    def _remove(self, key: str) -> None:
        raw = self._values.pop(key, None)
        if raw is None:
            return
        self._bytes -= len(raw)
        place, last = self._place.pop(key), self._keys.pop()
        if last != key:
            self._keys[place] = last
            self._place[last] = place

    def get(self, key: str) -> bytes | None:
        return self._values.get(key)

    def mget(self, keys: Sequence[str]) -> list[bytes | None]:
        return [self._values.get(key) for key in keys]

    def num_keys(self) -> int:
        return len(self._values)

    def clear(self) -> None:
        self._values.clear()
        self._keys.clear()
        self._place.clear()
        self._bytes = 0

    def stats(self) -> dict[str, int]:
        return super().stats() | {"stored_bytes": self._bytes, "evictions": self._evictions}
