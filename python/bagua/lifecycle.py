"""The life of this process: every piece of process-wide state, the fork hook, the exit hooks, and Ctrl-C.

Other modules keep no mutable module-level state of their own: they refer to an object of this file and change it in
place. So one place says what a forked child inherits. The child is no rank of its parent's groups: it forgets them and
sends nothing to their ranks.
"""

from __future__ import annotations

import atexit
import logging
import os
import signal
import sys
import threading
import weakref
from collections.abc import Callable, MutableMapping
from types import TracebackType
from typing import Any

from bagua import engine

__all__ = [
    "CacheState",
    "TorchState",
    "cache_state",
    "cuda_libraries",
    "install",
    "process",
    "report",
    "torch_state",
    "torchs_world",
]

_log = logging.getLogger(__name__)

#: How long the interpreter's exit waits for callbacks of handles, in seconds: one that blocks must not hang it.
_CALLBACKS_TIMEOUT = 5.0


class TorchState:
    """State of `bagua.torch_api`. Its values are typed where they are used: this module stands below all of them."""

    def __init__(self) -> None:
        from torch.utils.weak import WeakIdKeyDictionary, WeakTensorKeyDictionary

        # Between init_process_group and destroy_process_group: the default group, and its communicator.
        self.default_group: Any = None
        self.world: Any = None
        # Process group -> {world rank: rank in the group}. Weak: a group without another reference leaves.
        self.group_ranks: MutableMapping[Any, dict[int, int]] = weakref.WeakKeyDictionary()
        # torch.distributed's process group -> its BaguaProcessGroup.
        self.torch_groups: MutableMapping[Any, Any] = weakref.WeakKeyDictionary()
        # Whether init_process_group also initialised torch.distributed, so that its end destroys that too.
        self.initialised_torch_distributed = False
        # (host, port) of the master -> the StoreClient of the store served there. Kept after the group ends: a second
        # group must not wait for a port that the first one's store still holds, nor reach the store of a peer that is
        # slower to end.
        self.stores: dict[tuple[str, int], Any] = {}
        # The store by which torch.distributed's own group began, which its C++ half may still ask.
        self.gloo_store: Any = None
        # Tensor -> its name, model and closures.
        self.registrations: MutableMapping[Any, Any] = WeakTensorKeyDictionary()
        # Model name -> its Backend; and every Backend that has not been collected.
        self.backends: dict[str, Any] = {}
        self.all_backends: weakref.WeakSet[Any] = weakref.WeakSet()
        # Parameter -> weak reference to the ModelEngine that communicates its gradient.
        self.gradient_owners: MutableMapping[Any, weakref.ref[Any]] = WeakTensorKeyDictionary()
        # Module -> its ModelEngine, and module -> its name. Kept beside the modules and not in them,
        # so that a copied or pickled module is a plain one.
        self.wrapped: MutableMapping[Any, Any] = WeakIdKeyDictionary()
        self.module_names: MutableMapping[Any, str] = WeakIdKeyDictionary()
        # What was wrapped for a group that has ended -> the model's name, and a hook.
        self.ended: MutableMapping[Any, Any] = WeakIdKeyDictionary()
        # What a call of rebuild() that raised had still to do: its _Plan.
        self.rebuilding: Any = None
        # The Job of an elastic job.
        self.elastic: Any = None
        # Between bagua.horovod.init and shutdown: its Job.
        self.horovod: Any = None
        # Groups of torch.distributed's backend "bagua" until they are destroyed; the one of its world; and the first of
        # them with its sub-groups.
        self.c10d_groups: list[Any] = []
        self.c10d_world: Any = None
        self.c10d_tree: Any = None
        # After a fit of Lightning that failed: (store, world size, number of the next world).
        self.lightning_restart: Any = None
        # Numbers models in the order of their wrapping, which is the same on all ranks.
        self.wrapped_count = 0

    def forget_groups(self) -> None:
        """After the world's end, and in a forked child: there is no default group, and no group belongs to one."""
        self.default_group = self.world = self.elastic = self.horovod = self.gloo_store = None
        self.group_ranks.clear()
        self.torch_groups.clear()

    def after_fork_in_child(self) -> None:
        """The groups, and torch.distributed, belong to the parent."""
        # Collecting them would close the parent's connections.
        process.inherited.extend(self.c10d_groups)
        self.c10d_groups, self.c10d_world, self.c10d_tree = [], None, None
        self.forget_groups()
        self.initialised_torch_distributed = False


class CacheState:
    """State of the sample cache in `bagua.torch_api.contrib`."""

    def __init__(self) -> None:
        from multiprocessing import util

        # Loaders with a write buffer.
        self.loaders: weakref.WeakSet[Any] = weakref.WeakSet()
        # Store name -> counters of the warnings that were logged. One lost server is one warning, however many loaders
        # and DataLoader workers use it.
        self.warnings: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()
        # Real path -> (LMDB environment, number of stores that use it). A file may be opened once per process
        # (http://www.lmdb.tech/doc/ on mdb_env_open), so loaders share it.
        self.lmdb_environments: dict[str, tuple[Any, int]] = {}
        self.lmdb_lock = threading.Lock()
        # The job's Redis servers and the index of this host's, as the first call found them; the server that this
        # process started for the job, if it did; the servers that a user started by start_redis_server_cli.
        self.job_servers: tuple[list[dict[str, Any]], int] | None = None
        self.own_server: Any = None
        self.job_lock = threading.Lock()
        self.cli_servers: list[Any] = []
        # Encoded header -> dtype, shape, ... of the tensors and arrays that were read: a memo of the decoder.
        self.tensor_forms: dict[bytes, Any] = {}
        self.array_forms: dict[bytes, Any] = {}
        # Writing ends of the pipes to the servers: a server ends when the last writing end is closed.
        self.server_pipes: set[int] = set()
        util.register_after_fork(self, CacheState._after_multiprocessing_fork)

    def flush(self) -> None:
        """Writes every loader's buffer to its store. A failure is logged: the values can be computed again."""
        for loader in list(self.loaders):
            try:
                loader.flush()
            except Exception:
                _log.exception("cached values were not written")

    def flush_at_exit(self) -> None:
        """Flushes when this process ends, also if it is a child of multiprocessing, which runs no atexit hooks."""
        from multiprocessing import util

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

    def _after_multiprocessing_fork(self) -> None:
        # multiprocessing clears its finalizers in a child after `after_fork_in_child` has run.
        if len(self.loaders):
            self.flush_at_exit()


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
        self.torch: TorchState | None = None
        self.cache: CacheState | None = None

    def live_groups(self) -> list[Any]:
        """The groups at one time: other threads may make and leave groups."""
        # A loop over the dict itself would fail where one does so meanwhile.
        return [group for ref in self.groups.valuerefs() if (group := ref()) is not None]


#: The only instance.
process = _Process()


def torch_state() -> TorchState:
    """State of `bagua.torch_api`; imports torch at the first call."""
    if process.torch is None:
        process.torch = TorchState()
    return process.torch


def cache_state() -> CacheState:
    """State of the sample cache."""
    if process.cache is None:
        process.cache = CacheState()
    return process.cache


def cuda_libraries() -> engine.CudaLibraries:
    """The libraries of CUDA. The first call loads nothing, and decides that they belong to this process."""
    if process.cuda is None:
        process.cuda = engine.CudaLibraries()
    return process.cuda


def torchs_world() -> Any:
    """The bagua.Group of torch.distributed's world where its backend is "bagua", else None."""
    world = None if process.torch is None else process.torch.c10d_world
    return None if world is None else world.bagua_group


def install(shutdown: Callable[[], None]) -> None:
    """Installs the exit hooks once per process, with `shutdown` as that of a normal exit; and, at every call on the
    main thread, the wakeup descriptor for Ctrl-C.
    """
    _watch_for_interrupts()
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

    def excepthook(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        try:
            report(kind, error)
        finally:
            previous(kind, error, traceback)

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


def _watch_for_interrupts() -> None:
    """Lets Ctrl-C end a blocking call of the main thread, unless other code uses the wakeup descriptor."""
    foreign = process.owner_pid not in (0, os.getpid())
    if foreign or threading.current_thread() is not threading.main_thread():
        return
    descriptor = engine.listen_for_interrupts()
    previous = signal.set_wakeup_fd(descriptor, warn_on_full_buffer=False)
    if previous not in (-1, descriptor):
        signal.set_wakeup_fd(previous)


def _before_fork() -> None:
    if process.cache is not None:
        # What is in a buffer then belongs to the parent alone.
        process.cache.flush()


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
    if process.torch is not None:
        process.torch.after_fork_in_child()
    if process.cache is not None:
        process.cache.after_fork_in_child()
    # The descriptor leads to the parent's interrupt pipe.
    if process.owner_pid and threading.current_thread() is threading.main_thread():
        signal.set_wakeup_fd(-1)


os.register_at_fork(before=_before_fork, after_in_child=_after_fork_in_child)
