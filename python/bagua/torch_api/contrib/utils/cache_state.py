"""What the caches of a process share."""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Callable
from multiprocessing import util
from typing import Any

from bagua.lifecycle import Record, record

__all__ = ["CacheState", "cache_state"]

_log = logging.getLogger(__name__)


class CacheState(Record):
    """State of the sample cache in `bagua.torch_api.contrib`."""

    def __init__(self) -> None:
        # Loaders with a write buffer.
        self.loaders: weakref.WeakSet[Any] = weakref.WeakSet()
        # Store name -> counters of the warnings that were logged. One lost server is one warning, however many loaders
        # and DataLoader workers use it.
        self.warnings: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()
        # Real path -> (LMDB environment, number of stores that use it). A file may be opened once per process
        # (http://www.lmdb.tech/doc/ on mdb_env_open), so loaders share it.
        self.lmdb_environments: dict[str, tuple[Any, int]] = {}
        self.lmdb_lock = threading.Lock()
        # The job's Redis servers and the index of this host's, as the first call in a world found them; the server that
        # this process started for the job, if it did; the servers that a user started by start_redis_server_cli.
        self.job_servers: tuple[list[dict[str, Any]], int] | None = None
        # torch.distributed's world in which that call was made, while it exists.
        self.job_world: Callable[[], Any] = lambda: None
        self.own_server: Any = None
        self.job_lock = threading.Lock()
        self.cli_servers: list[Any] = []
        # Encoded header -> dtype, shape, ... of the tensors and arrays that were read: a memo of the decoder.
        self.tensor_forms: dict[bytes, Any] = {}
        self.array_forms: dict[bytes, Any] = {}
        # Writing ends of the pipes to the servers: a server ends when the last writing end is closed.
        self.server_pipes: set[int] = set()

    def flush(self) -> None:
        """Writes every loader's buffer to its store. A failure is logged: the values can be computed again."""
        for loader in list(self.loaders):
            try:
                loader.flush()
            except Exception:
                _log.exception("cached values were not written")

    def flush_at_exit(self) -> None:
        """Flushes when this process ends, also if it is a child of multiprocessing, which runs no atexit hooks."""
        # Before the servers of this process are stopped (priority -10).
        util.Finalize(None, self.flush, exitpriority=100)

    def after_fork_in_child(self) -> None:
        """Environments, pipes and buffers belong to the parent."""
        for counters in list(self.warnings.values()):
            counters.in_child()
        # A lock may have been held by a thread that does not exist in the child.
        self.lmdb_lock, self.job_lock = threading.Lock(), threading.Lock()
        # LMDB forbids using an environment after fork. Closing it releases this process's mapping and descriptors; the
        # parent's reader slots and locks are keyed by its process id.
        for environment, _ in self.lmdb_environments.values():
            environment.close()
        self.lmdb_environments.clear()
        # A child that kept a writing end would keep the server alive after its owner's death.
        for pipe in self.server_pipes:
            os.close(pipe)
        self.server_pipes.clear()
        for loader in list(self.loaders):
            loader.in_child()
        if len(self.loaders):
            self.flush_at_exit()

    def before_fork(self) -> None:
        """What is in a buffer then belongs to the parent alone."""
        self.flush()

    def after_fork_by_multiprocessing(self) -> None:
        """Its finalizers flush the buffers."""
        if len(self.loaders):
            self.flush_at_exit()


def cache_state() -> CacheState:
    """The state of this process."""
    return record(CacheState)
