"""A cache of values that are expensive to compute, in Redis or in memory."""

from __future__ import annotations

import logging
import secrets
import sys
import threading
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any, TypeVar

from bagua import config

from .utils.cache_state import cache_state
from .utils.counters import SharedCounters
from .utils.memory_store import MemoryStore
from .utils.redis_store import RedisStore
from .utils.store import Store

__all__ = ["CacheLoader"]

_log = logging.getLogger(__name__)
K = TypeVar("K")
V = TypeVar("V")

_COUNTS = ("hits", "misses", "unreadable", "bytes_read", "bytes_written", "failed_reads", "failed_writes")


class CacheLoader:
    """Values by key: computed by the first :meth:`get` and read from a store afterwards.

    - ``backend``: ``"redis"`` (arguments of :class:`~bagua.torch_api.contrib.utils.redis_store.RedisStore`: ``hosts``,
      ``cluster_mode``, ``capacity_per_node``, ``timeout``); ``"memory"``, for this process alone
      (``capacity_per_node`` in bytes); or ``"auto"``: Redis if ``hosts`` is given or ``redis-server`` is installed,
      else memory.
    - ``dataset_name``: Values are stored under ``"{dataset_name}_{key}"``. Loaders with the same name share their
      values.
    - ``writer_buffer_size``: Number of values that are written to the store at a time. This process can read buffered
      values. They are written by :meth:`flush` and :meth:`close`, before a fork, and at exit.
    - ``allow_pickle``: By default, values are numbers, text, bytes, ``None``, lists, tuples, dictionaries, sets, NumPy
      arrays and tensors. True also allows other values, which are pickled and signed with the job's secret
      (``BAGUA_JOB_SECRET``; Redis servers started by the job have a secret of their own). A pickle without a valid
      signature is never loaded.

    If a store is lost, hangs or is full, values are computed instead, and :meth:`stats` counts them. A process and its
    DataLoader workers log one warning per server. May be used from several threads and in DataLoader workers, forked or
    spawned.

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
        self._counters = SharedCounters(_COUNTS)
        self._begin()

    def _begin(self) -> None:
        # Values that are not in the store yet.
        self._buffer: dict[str, bytes] = {}
        self._writing = threading.RLock()
        self._seen_failures = {"failed_reads": 0, "failed_writes": 0}
        cache_state().loaders.add(self)
        cache_state().flush_at_exit()

    def __getstate__(self) -> dict[str, Any]:
        self.flush()
        state = self.__dict__.copy()
        for name in ("_buffer", "_writing", "_seen_failures"):
            del state[name]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._begin()
        # The original already counted the failures recorded in this copy of the store.
        self._seen_failures = self._failures()

    def __del__(self) -> None:
        # A loader whose construction failed has nothing to write. At interpreter exit, the exit hooks have flushed
        # already.
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
            try:
                value: V = self._serializer.loads(name, raw)
            except ValueError:
                self._counters.add(unreadable=1)
            else:
                self._counters.add(hits=1, bytes_read=len(raw))
                return value
        value = load_fn(key)
        self._counters.add(misses=1)
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
        size = unreadable = 0
        for name, raw in zip(names, self._raw(names), strict=True):
            if raw is not None:
                try:
                    values.append(read(name, raw))
                except ValueError:
                    unreadable += 1
                else:
                    size += len(raw)
                    continue
            places.setdefault(name, []).append(len(values))
            values.append(None)
        found = len(values) - sum(map(len, places.values()))
        self._counters.add(hits=found, bytes_read=size, unreadable=unreadable)
        if not places:
            return values
        loaded = load_many([keys[numbers[0]] for numbers in places.values()])
        self._counters.add(misses=len(places))
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
        """Returns the number of values in the store, including other data sets and values that this process has
        buffered.
        """
        self.flush()
        return self.store.num_keys()

    def flush(self) -> None:
        """Writes buffered values to the store."""
        with self._writing:
            if self._buffer:
                batch = dict(self._buffer)
                self.store.mset(batch)
                self._counters.add(bytes_written=sum(map(len, batch.values())))
                # Cleared last, so that another thread can read the values from the buffer until the store has them.
                self._buffer.clear()
            self._publish()

    def close(self) -> None:
        """Flushes, closes connections, and ends the servers that this process started for the job. May be called
        twice.
        """
        self.flush()
        self.store.shutdown()

    def stats(self) -> dict[str, float]:
        """Returns counts of this loader in this process and its DataLoader workers, and the state of its store.

        - ``hits``, ``misses``, ``hit_rate``: reads of values; the rate is 0 before the first read.
        - ``bytes_read``, ``bytes_written``: bytes of values.
        - ``unreadable``: stored values that were foreign or damaged and were computed again.
        - ``failed_reads``, ``failed_writes``: values that a lost or full store did not return or accept.
        - ``lost_servers``: servers that do not answer now.
        - ``buffered``: values in this process that are not in the store yet.
        - ``stored_bytes``, ``evictions``: of the whole store.

        Workers add their counts in small batches, and the rest when they end.
        """
        self._publish()
        counts: dict[str, float] = dict(self._counters.read())
        reads = counts["hits"] + counts["misses"]
        store = self.store.stats()
        return {
            **counts,
            "hit_rate": counts["hits"] / reads if reads else 0.0,
            "buffered": len(self._buffer),
            **{name: store[name] for name in ("stored_bytes", "evictions", "lost_servers")},
        }

    def _write(self, values: dict[str, bytes]) -> None:
        with self._writing:
            self._buffer.update(values)
            if len(self._buffer) >= self._buffer_size:
                self.flush()

    def _failures(self) -> dict[str, int]:
        return self.store.failures()

    def _publish(self) -> None:
        with self._writing:
            failures = self._failures()
            for name, count in failures.items():
                if more := count - self._seen_failures[name]:
                    self._counters.add(**{name: more})
            self._seen_failures = failures
        self._counters.publish()

    def in_child(self) -> None:
        """Called after a fork. The parent flushed before it, so values in the copied buffer are the parent's to
        write.
        """
        self._buffer = {}
        self._writing = threading.RLock()
        self._counters.in_child()
        self._seen_failures = self._failures()


def _make_store(backend: str, options: dict[str, Any]) -> Store:
    if backend == "redis":
        return RedisStore(**options)
    if backend == "auto":
        if strange := set(options) - {"hosts", "cluster_mode", "capacity_per_node", "timeout"}:
            raise TypeError(f"the cache backend 'auto' does not know {', '.join(sorted(strange))}")
        if options.get("hosts") is not None or all(find_spec(package) is not None for package in ("redis", "xxhash")):
            try:
                return RedisStore(**options)
            except RuntimeError as failure:
                # All ranks raise this error together, so all ranks choose the same backend.
                _log.info("no Redis for the cache: %s", failure)
        options = {name: value for name, value in options.items() if name == "capacity_per_node"}
    elif backend != "memory":
        raise ValueError(f"backend must be one of redis, memory, auto; got {backend!r}")
    if strange := set(options) - {"capacity_per_node"}:
        raise TypeError(f"the cache backend 'memory' does not know {', '.join(sorted(strange))}")
    return MemoryStore(options["capacity_per_node"]) if options else MemoryStore()


def _secret(store: Store) -> bytes:
    """Returns the key that signs pickles: the job's secret, or one that all processes with access to the store
    share.
    """
    if secret := config.settings().secret:
        return secret
    if isinstance(store, RedisStore) and store.secret:
        return store.secret
    if store.shared_by == "process":
        return secrets.token_bytes(32)
    raise ValueError(
        "allow_pickle=True needs a secret, because others may write to this store: set BAGUA_JOB_SECRET, the same on"
        " all ranks"
    )
