"""State of the sample cache that all caches of a process share."""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Callable
from multiprocessing import util
from typing import Any

from bagua.process_state import Record, record

__all__ = ["CacheState", "cache_state"]

_log = logging.getLogger(__name__)


class CacheState(Record):
    """State of the sample cache in ``bagua.torch_api.contrib``."""

    def __init__(self) -> None:
        # Loaders with a write buffer.
        self.loaders: weakref.WeakSet[Any] = weakref.WeakSet()
        # (name of a store, kind of warning) for each warning that this process has logged.
        self.warned: set[tuple[str, str]] = set()
        # The job's Redis servers, and the index of this host's server.
        self.job_servers: tuple[list[dict[str, Any]], int] | None = None
        # The world of torch.distributed in which job_servers was computed, while it exists.
        self.job_world: Callable[[], Any] = lambda: None
        self.own_server: Any = None
        self.job_lock = threading.Lock()
        self.cli_servers: list[Any] = []
        # Write ends of the pipes to the servers. A server ends when the last write end of its pipe is closed.
        self.server_pipes: set[int] = set()

    def flush(self) -> None:
        """Writes every loader's buffer to its store. Logs failures, because the values can be computed again."""
        for loader in list(self.loaders):
            try:
                loader.flush()
            except Exception:
                _log.exception("cached values were not written")

    def flush_at_exit(self) -> None:
        """Flushes when this process ends. A finalizer, because multiprocessing's children run no atexit hooks."""
        # Runs before the servers of this process are stopped, which have priority -10.
        util.Finalize(None, self.flush, exitpriority=100)

    def after_fork_in_child(self) -> None:
        """Closes what belongs to the parent: pipes and buffers."""
        # A thread that does not exist in the child may have held the lock.
        self.job_lock = threading.Lock()
        # A child with an open write end would keep the server alive after its owner's death.
        for pipe in self.server_pipes:
            os.close(pipe)
        self.server_pipes.clear()
        for loader in list(self.loaders):
            loader.in_child()
        if len(self.loaders):
            self.flush_at_exit()

    def before_fork(self) -> None:
        """Flushes, because buffered values are the parent's alone after the fork."""
        self.flush()

    def after_fork_by_multiprocessing(self) -> None:
        """Registers the flush at exit again, because multiprocessing clears finalizers in a child."""
        if len(self.loaders):
            self.flush_at_exit()


def cache_state() -> CacheState:
    return record(CacheState)
