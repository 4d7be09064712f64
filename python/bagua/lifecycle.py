"""Process-wide state, the fork hook, and the exit hooks.

Other modules keep no mutable module-level state of their own: each package has a typed record of it, which is
registered here. So one file decides what a forked child inherits. The child is no rank of its parent's groups: it
forgets them and sends nothing to their ranks.
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

from bagua import config, engine
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

#: How long the interpreter's exit waits for callbacks of handles, in seconds: one that blocks must not hang it.
_CALLBACKS_TIMEOUT = 5.0

#: Seconds added to the time of an error that another rank has caused. torchrun dates a rank that was killed when it
#: looks next, which may be a few seconds later.
_AFTER_ITS_CAUSE = 5


class Record:
    """The process-wide state of one package, whose one instance :func:`record` makes.

    The package defines it, because this module imports none of them; its methods are called around a fork.
    """

    def before_fork(self) -> None:
        """The process is about to fork."""

    def after_fork_in_child(self) -> None:
        """This is a forked child: what belongs to the parent alone is forgotten."""
        self.forget_groups()

    def after_fork_by_multiprocessing(self) -> None:
        """As `after_fork_in_child`, when multiprocessing has cleared the finalizers of the child."""

    def forget_groups(self) -> None:
        """The groups of this process have ended, or belong to its parent."""


R = TypeVar("R", bound=Record)


class _Process:
    """State of the framework-neutral layer, and the states of the layers above it once they are imported."""

    def __init__(self) -> None:
        # The process that installed the exit hooks; 0 before. In a forked child it is another process's id.
        self.owner_pid = 0
        # The bagua.Group that the functions of `bagua` use.
        self.default_group: Any = None
        # Key in `stats()` -> bagua.Group. Weak: a sub-group without another reference leaves.
        self.groups: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()
        # What `stats()` says of an elastic job, where there may be one.
        self.elastic_stats: Callable[[], Any] | None = None
        # Called in order by `bagua.shutdown()` before the groups leave.
        self.shutdown_hooks: list[Callable[[], None]] = []
        # Id of a failed group -> path of its flight record, and what its errors say of it.
        self.records: dict[int, tuple[str | None, str]] = {}
        # What only the processes of one job have in common, for their flight records: see `note_job`.
        self.jobs: list[str] = []
        # Held while a record is written. Re-entrant: a signal handler may use a failed group meanwhile.
        self.records_lock = threading.RLock()
        # Rank -> token of the rendezvous place by which this process joined last; no rank serves it again.
        self.joined_places: dict[int, str] = {}
        # HTTP servers of `bagua.metrics`.
        self.metrics_servers: list[Any] = []
        # In a forked child: the parent's groups. Collecting them would close the parent's connections.
        self.inherited: list[Any] = []
        # Since bagua.cuda was imported. They belong to the process that imported it: its forked children have no CUDA.
        self.cuda: engine.CudaLibraries | None = None
        # Devices whose arrays were communicated, by number.
        self.cuda_devices: dict[int, engine.CudaDevice] = {}
        # The bagua.Group of torch.distributed's world where its backend is "bagua".
        self.torchs_world: Any = None
        # Whether misspelt names of settings were looked for.
        self.settings_checked = False
        # The state of each package that was imported, by its class.
        self.packages: dict[type[Record], Any] = {}

    def live_groups(self) -> list[Any]:
        """The groups at one time: other threads may make and leave groups."""
        # A loop over the dict itself would fail where one does so meanwhile.
        return [group for ref in self.groups.valuerefs() if (group := ref()) is not None]


#: The only instance.
process = _Process()


def record(kind: type[R]) -> R:
    """The only instance of a package's state."""
    found: R | None = process.packages.get(kind)
    if found is None:
        found = process.packages[kind] = kind()
        if kind.after_fork_by_multiprocessing is not Record.after_fork_by_multiprocessing:
            from multiprocessing import util

            util.register_after_fork(found, kind.after_fork_by_multiprocessing)
    return found


def forget_groups() -> None:
    """After the world's end: no state of any package belongs to a group any more."""
    for package in process.packages.values():
        package.forget_groups()


def note_job(shared: bytes) -> None:
    """Notes bytes that all ranks of the job have and no other job has. Two records with one of them are of one job."""
    process.jobs.append(hashlib.sha256(shared).hexdigest()[:16])


def cuda_libraries() -> engine.CudaLibraries:
    """The libraries of CUDA. The first call loads nothing, and decides that they belong to this process."""
    if process.cuda is None:
        process.cuda = engine.CudaLibraries()
    return process.cuda


def install(shutdown: Callable[[], None]) -> None:
    """Installs the exit hooks once per process, with `shutdown` as that of a normal exit."""
    if process.owner_pid == os.getpid():
        return
    inherited = process.owner_pid != 0
    process.owner_pid = os.getpid()
    if inherited:
        # A forked child that joins a group of its own has the hooks already.
        return

    def leave() -> None:
        if process.owner_pid == os.getpid():
            try:
                shutdown()
            finally:
                # The operations that were pending have ended or end now. Their callbacks need the interpreter.
                engine.wait_for_callbacks(_CALLBACKS_TIMEOUT)

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
    """The exit of the process begins with this, while other threads still run."""
    atexit.register(action)


def report(kind: type[BaseException], error: BaseException) -> None:
    """Reports an uncaught exception to the other ranks of every group; they raise PeerRaisedError."""
    if process.owner_pid != os.getpid():
        return
    # The world first: it has all ranks.
    for group in sorted(process.live_groups(), key=lambda group: -group.size):
        group.communicator.raise_(kind.__name__, str(error))


def _write_error_file(error: BaseException) -> None:
    """Writes an uncaught exception to the file from which torchrun makes its summary of a failed job.

    The summary's root cause is the failure with the earliest second, and of several the lowest rank's. So an error
    that follows from another rank's failure is dated later. Source of the format: ErrorHandler.record_exception of
    torch.distributed.elastic.multiprocessing.errors.
    """
    path = config.text("TORCHELASTIC_ERROR_FILE")
    if path is None or process.owner_pid != os.getpid() or not isinstance(error, Exception):
        return
    follows = isinstance(error, (PeerLostError, PeerRaisedError))
    if os.path.exists(path) and not follows:
        # The script has torch's `record` decorator.
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
    # A child that kept a listening socket would hold its port after the parent's end.
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
