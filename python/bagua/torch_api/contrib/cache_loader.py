"""A cache of values that are expensive to compute, in Redis or in memory."""

from __future__ import annotations

import contextlib
import secrets
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from bagua import config

from .utils.cache_state import cache_state
from .utils.memory_store import MemoryStore
from .utils.redis_store import RedisStore
from .utils.store import Store

__all__ = ["CacheLoader"]

K = TypeVar("K")
V = TypeVar("V")


class CacheLoader:
    """Values by key: computed by the first :meth:`get` and read from a store afterwards.

    - ``backend``: ``"redis"`` (arguments of :class:`~bagua.torch_api.contrib.utils.redis_store.RedisStore`: ``hosts``,
      ``cluster_mode``, ``capacity_per_node``, ``timeout``); or ``"memory"``, for this process alone
      (``capacity_per_node`` in bytes).
    - ``dataset_name``: Values are stored under ``"{dataset_name}_{key}"``. Loaders with the same name share their
      values.
    - ``writer_buffer_size``: Number of values that are written to the store at a time. This process can read buffered
      values. They are written by :meth:`flush` and :meth:`close`, before a fork, and at exit.
    - ``allow_pickle``: By default, values are numbers, text, bytes, ``None``, lists, tuples, dictionaries, sets, NumPy
      arrays and tensors. True also allows other values, which are pickled and signed with the job's secret
      (``BAGUA_JOB_SECRET``; Redis servers started by the job have a secret of their own). A pickle without a valid
      signature is never loaded.

    If a store is lost, hangs or is full, values are computed instead, and each process logs one warning per server. May
    be used from several threads and in DataLoader workers, forked or spawned.

    Raises ValueError and TypeError for unusable arguments, ImportError for a missing package, and ConnectionError if no
    server answers.
    """

    def __init__(
        self,
        backend: str = "redis",
        dataset_name: str = "",
        writer_buffer_size: int = 1,
        *,
        allow_pickle: bool = False,
        **kwargs: Any,
    ) -> None:
        if writer_buffer_size < 1:
            raise ValueError(f"writer_buffer_size is {writer_buffer_size}; it must be at least 1")
        #: The store behind this loader.
        self.store: Store = _make_store(backend, kwargs)
        self._prefix = f"{dataset_name}_"
        secret = _secret(self.store) if allow_pickle else b""
        try:
            from .utils.serialization import Serializer
        except ImportError as absent:
            raise ImportError(
                'the cache needs the package msgpack, which is not installed: pip install "msgpack>=1"'
            ) from absent
        self._serializer = Serializer(dataset_name, allow_pickle=allow_pickle, secret=secret)
        self._buffer_size = writer_buffer_size
        self._begin()

    def _begin(self) -> None:
        # Values that are not in the store yet.
        self._buffer: dict[str, bytes] = {}
        self._writing = threading.RLock()
        cache_state().loaders.add(self)
        cache_state().flush_at_exit()

    def __getstate__(self) -> dict[str, Any]:
        self.flush()
        state = self.__dict__.copy()
        del state["_buffer"], state["_writing"]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._begin()

    def __del__(self) -> None:
        # A loader whose construction failed has nothing to write. At exit, the exit hooks have flushed already.
        if "_buffer" in self.__dict__ and not sys.is_finalizing():
            self.flush()

    def get(self, key: K, load_fn: Callable[[K], V]) -> V:
        """Returns the value of ``key``. On a miss, calls ``load_fn(key)`` and stores the result.

        Changing the returned value does not change the cache. Raises TypeError if the value cannot be stored, and
        whatever ``load_fn`` raises.
        """
        name = f"{self._prefix}{key}"
        raw = self._buffer.get(name)
        if raw is None:
            raw = self.store.get(name)
        if raw is not None:
            # A foreign or damaged value is computed again.
            with contextlib.suppress(ValueError):
                found: V = self._serializer.loads(name, raw)
                return found
        value = load_fn(key)
        self._write({name: self._serializer.dumps(name, value)})
        return value

    def get_many(self, keys: Sequence[K], load_fn: Callable[[K], V]) -> list[V]:
        """Returns the values of many keys in their order, read in one round trip per server.

        Calls ``load_fn`` for each missing key. Otherwise like :meth:`get`.
        """
        return self._get_many(keys, lambda missing: [load_fn(key) for key in missing])

    def _get_many(self, keys: Sequence[K], load_many: Callable[[list[K]], Sequence[V]]) -> list[V]:
        prefix, read = self._prefix, self._serializer.loads
        names = [f"{prefix}{key}" for key in keys]
        values: list[Any] = []
        places: dict[str, list[int]] = {}
        for name, raw in zip(names, self._raw(names), strict=True):
            if raw is not None:
                try:
                    values.append(read(name, raw))
                    continue
                except ValueError:
                    pass  # A foreign or damaged value is computed again.
            places.setdefault(name, []).append(len(values))
            values.append(None)
        if not places:
            return values
        loaded = load_many([keys[numbers[0]] for numbers in places.values()])
        written: dict[str, bytes] = {}
        for (name, numbers), value in zip(places.items(), loaded, strict=True):
            written[name] = raw = self._serializer.dumps(name, value)
            values[numbers[0]] = value
            for number in numbers[1:]:
                # A repeated key gets two separate values, so that changing one leaves the other as it is.
                values[number] = read(name, raw)
        self._write(written)
        return values

    def _raw(self, names: list[str]) -> Sequence[bytes | None]:
        """Returns the encoded values from the buffer or the store, in the order of the names."""
        if not self._buffer:
            return self.store.mget(names)
        buffered = [self._buffer.get(name) for name in names]
        absent = [place for place, raw in enumerate(buffered) if raw is None]
        for place, raw in zip(absent, self.store.mget([names[place] for place in absent]), strict=True):
            buffered[place] = raw
        return buffered

    def num_keys(self) -> int:
        """Returns the number of values in the store, including other data sets and this process's buffer."""
        self.flush()
        return self.store.num_keys()

    def flush(self) -> None:
        """Writes buffered values to the store."""
        with self._writing:
            if self._buffer:
                self.store.mset(dict(self._buffer))
                # Cleared last, so that another thread can read the values from the buffer until the store has them.
                self._buffer.clear()

    def close(self) -> None:
        """Flushes, closes connections, and ends the servers that this process started. May be called twice."""
        self.flush()
        self.store.shutdown()

    def _write(self, values: dict[str, bytes]) -> None:
        with self._writing:
            self._buffer.update(values)
            if len(self._buffer) >= self._buffer_size:
                self.flush()

    def in_child(self) -> None:
        """Called after a fork. The parent flushed before, so the values in the copied buffer are the parent's."""
        self._buffer = {}
        self._writing = threading.RLock()


def _make_store(backend: str, options: dict[str, Any]) -> Store:
    if backend == "redis":
        return RedisStore(**options)
    if backend != "memory":
        raise ValueError(f"backend must be one of redis, memory; got {backend!r}")
    if strange := set(options) - {"capacity_per_node"}:
        raise TypeError(f"the cache backend 'memory' does not know {', '.join(sorted(strange))}")
    return MemoryStore(options["capacity_per_node"]) if options else MemoryStore()


def _secret(store: Store) -> bytes:
    """Returns the key that signs pickles: the job's secret, or a key that all users of the store share."""
    if secret := config.settings().secret:
        return secret
    if isinstance(store, RedisStore) and store.secret:
        return store.secret
    if isinstance(store, MemoryStore):
        return secrets.token_bytes(32)
    raise ValueError(
        "allow_pickle=True needs a secret, because others may write to this store: set BAGUA_JOB_SECRET, the same on"
        " all ranks"
    )
