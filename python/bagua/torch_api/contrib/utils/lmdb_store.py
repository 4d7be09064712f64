"""A store in an LMDB file (https://www.symas.com/lmdb), shared by the processes of one host and kept after the job."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .cache_state import cache_state
from .store import LossyStore, Shared

__all__ = ["LmdbStore"]

_state = cache_state()


class LmdbStore(LossyStore):
    """An LMDB file in the folder ``path``, of at most ``capacity`` bytes. The file grows as values are added.

    A full file keeps its values and accepts no more. Only the owner can read the folder. Do not use a network file
    system: LMDB's locks do not work there. Raises ImportError if the package ``lmdb`` is not installed.
    """

    shared_by: Shared = "host"

    def __init__(self, path: str | os.PathLike[str], capacity: int = 107374182400) -> None:
        try:
            import lmdb
        except ImportError as absent:
            raise ImportError(
                'the cache backend "lmdb" needs the package lmdb, which is not installed: pip install "lmdb>=1.4"'
            ) from absent
        if capacity <= 0:
            raise ValueError(f"the capacity is {capacity} bytes; it must be positive")
        super().__init__(f"lmdb {path}")
        self._path = os.path.realpath(path)
        # LMDB requires whole pages, and uses a few for itself.
        self._capacity = max(1 << 16, -(-capacity // 65536) * 65536)
        self._environment: Any = None
        self._process = 0
        Path(self._path).mkdir(mode=0o700, parents=True, exist_ok=True)
        self._lmdb: Any = lmdb
        # Set on the instance, because the classes exist only after the import.
        self.losses = (lmdb.Error, OSError)  # type: ignore[misc]
        self.refusals = (lmdb.MapFullError, lmdb.BadValsizeError)  # type: ignore[misc]
        self._env()

    def __getstate__(self) -> dict[str, Any]:
        hidden = {"_environment": None, "_process": 0, "_lmdb": None, "losses": None, "refusals": None}
        return {**self.__dict__, **hidden}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        import lmdb

        self._lmdb = lmdb
        self.losses = (lmdb.Error, OSError)  # type: ignore[misc]
        self.refusals = (lmdb.MapFullError, lmdb.BadValsizeError)  # type: ignore[misc]

    def _env(self) -> Any:
        if self._process == os.getpid() and self._environment is not None:
            return self._environment
        with _state.lmdb_lock:
            environment, users = _state.lmdb_environments.get(self._path, (None, 0))
            if environment is None:
                # Without metasync, a power failure may undo the last transaction but never damages the file.
                environment = self._lmdb.open(
                    self._path, map_size=self._capacity, metasync=False, max_readers=1024, mode=0o600, readahead=False
                )
            _state.lmdb_environments[self._path] = environment, users + 1
        self._environment, self._process = environment, os.getpid()
        return environment

    @staticmethod
    def _name(key: str) -> bytes:
        # LMDB accepts keys of at most 511 bytes. The first byte tells hashed keys from plain ones.
        raw = key.encode()
        return b"k" + raw if len(raw) < 500 else b"h" + hashlib.sha256(raw).digest()

    def mset(self, dictionary: Mapping[str, str | bytes]) -> None:
        def write() -> None:
            with self._env().begin(write=True) as transaction:
                for key, value in dictionary.items():
                    transaction.put(self._name(key), value.encode() if isinstance(value, str) else value)

        self._attempt(write, None, writes=len(dictionary))

    def get(self, key: str) -> bytes | None:
        def read() -> bytes | None:
            with self._env().begin() as transaction:
                found: bytes | None = transaction.get(self._name(key))
                return found

        return self._attempt(read, None, reads=1)

    def mget(self, keys: Sequence[str]) -> list[bytes | None]:
        def read() -> list[bytes | None]:
            with self._env().begin() as transaction:
                return [transaction.get(self._name(key)) for key in keys]

        return self._attempt(read, [None] * len(keys), reads=len(keys))

    def num_keys(self) -> int:
        return self._attempt(lambda: int(self._env().stat()["entries"]), 0)

    def clear(self) -> None:
        def remove() -> None:
            with self._env().begin(write=True) as transaction:
                transaction.drop(self._env().open_db(txn=transaction), delete=False)

        self._attempt(remove, None)

    def status(self) -> bool:
        return self._attempt(lambda: self._env().stat() is not None, False)

    def shutdown(self) -> None:
        if self._environment is None or self._process != os.getpid():
            return
        self._environment = None
        with _state.lmdb_lock:
            environment, users = _state.lmdb_environments.pop(self._path)
            if users > 1:
                _state.lmdb_environments[self._path] = environment, users - 1
            else:
                environment.sync(True)
                environment.close()

    def stats(self) -> dict[str, int]:
        def used() -> int:
            environment = self._env()
            return int(environment.stat()["psize"]) * int(environment.info()["last_pgno"] + 1)

        return super().stats() | {"stored_bytes": self._attempt(used, 0)}
