"""Key-value stores of bytes: the interface of the cache's stores, and several stores that act as one.

A store may lose values, which are then computed again. A store that fails reports a miss instead of raising, and warns
once (:class:`LossyStore`).
"""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar, TypeVar

from .cache_state import cache_state

__all__ = ["ClusterStore", "LossyStore", "Store"]

_log = logging.getLogger(__name__)
T = TypeVar("T")


class Store(ABC):
    """Bytes by key. Keys are text, text values are stored as UTF-8, and a missing value is ``None``."""

    def set(self, key: str, value: str | bytes) -> None:
        """Stores one value."""
        self.mset({key: value})

    def get(self, key: str) -> bytes | None:
        """Returns one value; None if it is missing."""
        return self.mget([key])[0]

    @abstractmethod
    def mset(self, dictionary: Mapping[str, str | bytes]) -> None:
        """Stores many values."""

    @abstractmethod
    def mget(self, keys: Sequence[str]) -> list[bytes | None]:
        """Returns the values in the order of ``keys``; None for each missing one."""

    @abstractmethod
    def num_keys(self) -> int:
        """Returns the number of values in the store, written by any process."""

    @abstractmethod
    def clear(self) -> None:
        """Removes all values, written by any process."""

    def status(self) -> bool:
        """Returns True if the store answers now."""
        return True

    def shutdown(self) -> None:
        """Closes what this process opened, and ends the servers that this process started."""
        return


class LossyStore(Store):
    """A store whose failures are misses.

    After a failed request, the store is not used for a second. The pause doubles with each further failure, up to a
    minute, so that a hanging server costs its timeout now and then instead of at every sample.
    """

    #: Errors that mean that the store cannot be reached.
    losses: ClassVar[tuple[type[BaseException], ...]] = (OSError,)
    #: Errors that mean that the store refuses this request, for instance because it is full.
    refusals: ClassVar[tuple[type[BaseException], ...]] = ()

    def __init__(self, name: str, clock: Callable[[], float] = time.monotonic) -> None:
        #: Name for messages. Never contains a password.
        self.name = name
        self._clock = clock
        #: True if the store could not be reached by the last request.
        self.lost = False
        self._pause = 0.0
        self._again = 0.0

    def _attempt(self, action: Callable[[], T], otherwise: T) -> T:
        """Returns the result of ``action``, or ``otherwise`` after a loss or refusal. Other errors are raised."""
        if self.lost and self._clock() < self._again:
            return otherwise
        try:
            result = action()
        # Refusals first, because a library may derive them from its general error class.
        except self.refusals as refusal:
            self._warn("refusal", f"the cache store {self.name} refuses requests, samples are computed: {refusal}")
        except self.losses as loss:
            self._warn("loss", f"the cache store {self.name} is lost, its samples are computed: {loss}")
            self.lost = True
            self._pause = min(60.0, max(1.0, 2 * self._pause))
            self._again = self._clock() + self._pause
        else:
            if self.lost:
                self.lost, self._pause = False, 0.0
                _log.info("the cache store %s is back", self.name)
            return result
        return otherwise

    def _warn(self, kind: str, text: str) -> None:
        # Logged instead of warnings.warn: if warnings are errors, a lost server would cost the sample too.
        if (self.name, kind) not in cache_state().warned:
            cache_state().warned.add((self.name, kind))
            _log.warning("%s", text)


class ClusterStore(Store):
    """Several stores as one: the xxh64 hash of a key, modulo the number of stores, selects its store.

    The hash is Yann Collet's XXH64 (https://github.com/Cyan4973/xxHash, doc/xxhash_spec.md) with seed 0 over the key in
    UTF-8. Keys of a lost store are not moved to another store, because they would have to move back when it returns.
    """

    def __init__(self, stores: Sequence[Store]) -> None:
        if not stores:
            raise ValueError("a cluster needs at least one store")
        self.stores = list(stores)
        self._hash: Callable[[bytes], int] | None = None
        if len(self.stores) > 1:
            try:
                from xxhash import xxh64_intdigest
            except ImportError as absent:
                raise ImportError(
                    'several cache stores need the package xxhash, which is not installed: pip install "xxhash>=3"'
                ) from absent
            self._hash = xxh64_intdigest

    def route(self, key: str) -> Store:
        """Returns the store that holds this key."""
        return self.stores[self._number(key)]

    def _number(self, key: str) -> int:
        return 0 if self._hash is None else self._hash(key.encode()) % len(self.stores)

    def set(self, key: str, value: str | bytes) -> None:
        self.route(key).set(key, value)

    def get(self, key: str) -> bytes | None:
        return self.route(key).get(key)

    def mset(self, dictionary: Mapping[str, str | bytes]) -> None:
        if self._hash is None:
            self.stores[0].mset(dictionary)
            return
        parts: dict[int, dict[str, str | bytes]] = {}
        for key, value in dictionary.items():
            parts.setdefault(self._number(key), {})[key] = value
        for number, part in parts.items():
            self.stores[number].mset(part)

    def mget(self, keys: Sequence[str]) -> list[bytes | None]:
        if self._hash is None:
            return self.stores[0].mget(keys)
        places: dict[int, list[int]] = {}
        for place, key in enumerate(keys):
            places.setdefault(self._number(key), []).append(place)
        values: list[bytes | None] = [None] * len(keys)
        for number, part in places.items():
            for place, value in zip(part, self.stores[number].mget([keys[place] for place in part]), strict=True):
                values[place] = value
        return values

    def num_keys(self) -> int:
        return sum(store.num_keys() for store in self.stores)

    def clear(self) -> None:
        for store in self.stores:
            store.clear()

    def status(self) -> bool:
        return all(store.status() for store in self.stores)

    def shutdown(self) -> None:
        for store in self.stores:
            store.shutdown()
