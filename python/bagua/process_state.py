"""Process-wide state, the fork hook, and the exit hooks.

All mutable module-level state is registered here, as one typed record per package. This module therefore decides what a
forked child inherits. A child is not a member of its parent's groups: it forgets them and sends nothing to their ranks.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import json
import os
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable
from types import TracebackType
from typing import Any, TypeVar

from bagua import config, extension
from bagua.errors import PeerLostError, PeerRaisedError

__all__ = [
    "Record",
    "cuda_libraries",
    "forget_groups",
    "install",
    "note_job",
    "process",
    "record",
    "report",
]

#: Seconds for which the interpreter's exit waits for callbacks of handles, so that a blocked callback cannot hang it.
_CALLBACKS_TIMEOUT = 5.0

#: Seconds added to the time of an error that another rank caused. torchrun notices a killed rank, and dates its
#: failure, late if the machine is busy.
_AFTER_ITS_CAUSE = 30


class Record:
    """Process-wide state of one package. :func:`record` makes its only instance.

    Each package defines its own subclass, because this module imports none of them. The methods are called around a
    fork.
    """

    def before_fork(self) -> None:
        """Prepares for a fork of this process."""

    def after_fork_in_child(self) -> None:
        """Forgets, in a forked child, what belongs to the parent only."""
        self.forget_groups()

    def after_fork_by_multiprocessing(self) -> None:
        """Runs after `after_fork_in_child`, when multiprocessing has cleared the child's finalizers."""

    def forget_groups(self) -> None:
        """Drops references to groups, because they have ended or belong to the parent process."""


R = TypeVar("R", bound=Record)


class _Process:
    def __init__(self) -> None:
        # Id of the process that installed the exit hooks; 0 before. In a forked child it is the parent's id.
        self.owner_pid = 0
        self.default_group: Any = None
        # Key in `stats()` -> bagua.Group. Weak references, so that a sub-group without other references leaves.
        self.groups: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()
        # Returns the "elastic" entry of `stats()`; None outside of elastic jobs.
        self.elastic_stats: Callable[[], Any] | None = None
        # `bagua.shutdown()` calls these in order before it leaves the groups.
        self.shutdown_hooks: list[Callable[[], None]] = []
        # Id of a failed group -> path of its flight record, and the text that its errors end with.
        self.records: dict[int, tuple[str | None, str]] = {}
        # Ids that all processes of this job share and no other job has, for flight records; see `note_job`.
        self.jobs: list[str] = []
        # Held while a record is written. Re-entrant, because a signal handler may use a failed group at that moment.
        self.records_lock = threading.RLock()
        # Rank -> token of the store entry by which this process joined last. That entry is not served again.
        self.joined_places: dict[int, str] = {}
        self.metrics_servers: list[Any] = []
        # In a forked child: the parent's groups. Freeing them would close the parent's connections.
        self.inherited: list[Any] = []
        # Set when bagua.cuda is imported. CUDA belongs to the importing process, and its forked children have none.
        self.cuda: extension.CudaLibraries | None = None
        # Devices that have been used, by number.
        self.cuda_devices: dict[int, extension.CudaDevice] = {}
        # The bagua.Group of torch.distributed's world if its backend is "bagua".
        self.torchs_world: Any = None
        # True once this process has checked for misspelt settings.
        self.settings_checked = False
        # The record of each imported package, by class.
        self.packages: dict[type[Record], Any] = {}

    def live_groups(self) -> list[Any]:
        """Returns the groups that exist now. Other threads may make and leave groups at the same time."""
        # A loop over the dict itself would fail if another thread changed it.
        return [group for ref in self.groups.valuerefs() if (group := ref()) is not None]


process = _Process()


def record(kind: type[R]) -> R:
    """Returns the only instance of a package's record, and makes it at the first call."""
    found: R | None = process.packages.get(kind)
    if found is None:
        found = process.packages[kind] = kind()
        if kind.after_fork_by_multiprocessing is not Record.after_fork_by_multiprocessing:
            from multiprocessing import util

            util.register_after_fork(found, kind.after_fork_by_multiprocessing)
    return found


def forget_groups() -> None:
    """Drops every package's references to groups, after the world has ended."""
    for package in process.packages.values():
        package.forget_groups()


def note_job(shared: bytes) -> None:
    """Notes bytes that all ranks of this job share and no other job has. Flight records use them to tell jobs apart."""
    process.jobs.append(hashlib.sha256(shared).hexdigest()[:16])


def cuda_libraries() -> extension.CudaLibraries:
    """Returns CUDA's libraries. The first call decides that they belong to this process, but loads nothing yet."""
    if process.cuda is None:
        process.cuda = extension.CudaLibraries()
    return process.cuda


def install(shutdown: Callable[[], None]) -> None:
    """Installs the exit hooks, once per process. `shutdown` runs at a normal exit."""
    if process.owner_pid == os.getpid():
        return
    inherited = process.owner_pid != 0
    process.owner_pid = os.getpid()
    if inherited:
        # A forked child has inherited the hooks.
        return

    def leave() -> None:
        if process.owner_pid == os.getpid():
            try:
                shutdown()
            finally:
                # Pending operations end now, and their callbacks need the interpreter.
                extension.wait_for_callbacks(_CALLBACKS_TIMEOUT)

    atexit.register(leave)
    previous = sys.excepthook

    def excepthook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        try:
            report(kind, error)
            _write_error_file(error)
        finally:
            previous(kind, error, trace)

    sys.excepthook = excepthook


def at_exit(action: Callable[[], None]) -> None:
    """Runs `action` at the start of the process's exit, while other threads still run."""
    atexit.register(action)


def report(kind: type[BaseException], error: BaseException) -> None:
    """Reports an uncaught exception to the other ranks of every group, which then raise PeerRaisedError."""
    if process.owner_pid != os.getpid():
        return
    # Start with the world, which has all ranks.
    for group in sorted(process.live_groups(), key=lambda group: -group.size):
        group.communicator.raise_(kind.__name__, str(error))


def _write_error_file(error: BaseException) -> None:
    """Writes an uncaught exception to the file from which torchrun makes its summary of a failed job.

    torchrun's summary names as the root cause the failure with the earliest second, and among those the lowest rank. An
    error that follows from another rank's failure is therefore dated later. Source of the format:
    ErrorHandler.record_exception of torch.distributed.elastic.multiprocessing.errors.
    """
    path = config.text("TORCHELASTIC_ERROR_FILE")
    if path is None or process.owner_pid != os.getpid() or not isinstance(error, Exception):
        return
    follows = isinstance(error, (PeerLostError, PeerRaisedError))
    if os.path.exists(path) and not follows:
        # torch's `record` decorator has written the file already.
        return
    text = "".join(traceback.format_exception(error))
    when = int(time.time()) + (_AFTER_ITS_CAUSE if follows else 0)
    extra = {"py_callstack": text, "timestamp": str(when)}
    with contextlib.suppress(OSError), open(path, "w", encoding="utf-8") as file:
        json.dump({"message": {"message": f"{type(error).__name__}: {error}", "extraInfo": extra}}, file)


def _before_fork() -> None:
    for package in process.packages.values():
        package.before_fork()


def _after_fork_in_child() -> None:
    process.inherited.extend(process.groups.values())
    process.groups.clear()
    process.default_group = None
    # An inherited listening socket would keep the port busy after the parent's end.
    for server in process.metrics_servers:
        server.socket.close()
    process.metrics_servers = []
    # A thread that does not exist in the child may have held the lock.
    process.records, process.records_lock = {}, threading.RLock()
    process.jobs = []
    process.torchs_world = None
    for package in process.packages.values():
        package.after_fork_in_child()


os.register_at_fork(before=_before_fork, after_in_child=_after_fork_in_child)
