"""Counters that a process shares with the processes that it forks or spawns."""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
import tempfile
import threading
from collections.abc import Sequence
from multiprocessing import context, reduction
from typing import Any

__all__ = ["SharedCounters"]

# Number of calls of add() after which a process adds its counts to the shared ones.
_BATCH = 64


class SharedCounters:
    """Named counters of one loader, shared by a training process and its DataLoader workers.

    Each process counts locally, and now and then adds its counts to the shared ones under a file lock. If the holder is
    killed, the kernel releases a file lock. A lock of multiprocessing would stay locked and block all processes.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._names = tuple(names)
        self._open(_anonymous_file(8 * len(self._names)))

    def _open(self, file: int) -> None:
        self._file = file
        self._shared = mmap.mmap(file, 8 * len(self._names))
        self._layout = struct.Struct(f"={len(self._names)}q")
        self._waiting = [0] * len(self._names)
        self._place = {name: place for place, name in enumerate(self._names)}
        self._events = 0
        self._guard = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        self.publish()
        # A descriptor can travel only while a process is being spawned. Any other copy gets counters of its own.
        spawning = context.get_spawning_popen() is not None
        return {"names": self._names, "file": reduction.DupFd(self._file) if spawning else None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._names = state["names"]
        file = state["file"]
        self._open(_anonymous_file(8 * len(self._names)) if file is None else file.detach())

    def __del__(self) -> None:
        if hasattr(self, "_shared"):
            self._shared.close()
            os.close(self._file)

    def add(self, **amounts: int) -> None:
        """Adds to counters. If a thread interrupts another one here, a count may be lost, but nothing else happens."""
        for name, amount in amounts.items():
            self._waiting[self._place[name]] += amount
        self._events += 1
        if self._events >= _BATCH:
            self.publish()

    def publish(self) -> None:
        """Adds this process's counts to the shared counts."""
        with self._guard:
            waiting, self._waiting = self._waiting, [0] * len(self._names)
            self._events = 0
            if not any(waiting):
                return
            fcntl.lockf(self._file, fcntl.LOCK_EX)
            try:
                together = self._layout.unpack(self._shared[:])
                self._shared[:] = self._layout.pack(*(a + b for a, b in zip(together, waiting, strict=True)))
            finally:
                fcntl.lockf(self._file, fcntl.LOCK_UN)

    def read(self) -> dict[str, int]:
        """Returns the counts of all processes, by name."""
        self.publish()
        return dict(zip(self._names, self._layout.unpack(self._shared[:]), strict=True))

    def first(self, name: str) -> bool:
        """Adds one to a counter, and returns True if it was 0 in all processes before."""
        with self._guard:
            fcntl.lockf(self._file, fcntl.LOCK_EX)
            try:
                together = list(self._layout.unpack(self._shared[:]))
                before: int = together[self._place[name]]
                together[self._place[name]] += 1
                self._shared[:] = self._layout.pack(*together)
            finally:
                fcntl.lockf(self._file, fcntl.LOCK_UN)
        return before == 0

    def in_child(self) -> None:
        """Called after a fork. Counts that the parent had not published yet are the parent's to publish."""
        self._waiting = [0] * len(self._names)
        self._events = 0
        self._guard = threading.Lock()


def _anonymous_file(size: int) -> int:
    """Opens a file without a name, so that nothing is left behind."""
    if hasattr(os, "memfd_create"):
        file = os.memfd_create("bagua-cache-counters")
    else:
        with tempfile.TemporaryFile() as named:
            file = os.dup(named.fileno())
    os.ftruncate(file, size)
    return file
