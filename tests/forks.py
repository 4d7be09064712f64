"""Ranks as forks of a process that has imported torch and what an optimizer's first step imports, 2 to 9 s of work, or
only NumPy and bagua, 0.4 s.

What a fork shares with its peers and a fresh process would not, an order of sets and the addresses of libraries, hides
mistakes. So there are two such processes, and neighbouring ranks come from different ones. A rank that does not use
torch comes from two others, which have not imported it: bagua behaves differently in a process that has. All processes
of a run of pytest have these four in common.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import errno
import functools
import gc
import importlib
import os
import pickle
import runpy
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import uuid
import weakref
from pathlib import Path
from typing import IO, Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]

#: Read while libraries are loaded, so a fork comes too late for them.
LOADING = ("ATEN_", "LD_", "MALLOC_", "MKL_", "OMP_", "OPENBLAS_", "PYTHON", "TORCH_")

#: What a rank's pipe carries: first its number as a process, then its exit code.
_NUMBER = struct.Struct("=i")

#: What the libraries of all forks are loaded with. Their threads would fight for the cores that the ranks have.
LOADED = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1"}

#: What a process that forks ranks sends to each that connects, once it has imported everything.
_READY = b"ready"

#: Processes with the same name here start ranks from the same four: tests/conftest.py gives one to all of pytest.
run_name = uuid.uuid4().hex

#: What Linux says of the other end of a socket: process, user and group.
_PEER = struct.Struct("=iii")

#: Held while this process connects to those that fork ranks: threads that did so at once would have connections of
#: their own, and the exit would wait for a process that one of them still keeps.
_connecting = threading.Lock()

#: Names of the modules that all forks of this process have in common.
_COMMON: list[str] = []


class _Request(NamedTuple):
    """The work for a fork."""

    #: A module, a function of it, and the arguments.
    function: tuple[str, str, tuple[Any, ...]]
    environment: dict[str, str]
    #: The path of its network namespace, if that is not ours.
    namespace: str | None


class Fork:
    """A rank, with the methods of `subprocess.Popen` that a world uses. Its process group is its own."""

    #: The other ends of its standard input and output, where it was started with pipes.
    stdin: IO[bytes] | None = None
    stdout: IO[bytes] | None = None
    stderr: None = None

    def __init__(self, pipe: int) -> None:
        self._pipe = pipe
        self.returncode: int | None = None
        self.pid = self._read()

    def _read(self) -> int:
        said = os.read(self._pipe, _NUMBER.size)
        if len(said) < _NUMBER.size:
            raise _gone()
        return int(_NUMBER.unpack(said)[0])

    def poll(self) -> int | None:
        """The exit code, negative for a signal; None while it runs."""
        try:
            return self.wait(0.0)
        except subprocess.TimeoutExpired:
            return None

    def wait(self, timeout: float | None = None) -> int:
        """Waits for the process, and returns its exit code like `poll`."""
        if self.returncode is None:
            if not select.select([self._pipe], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(f"rank {self.pid}", timeout or 0.0)
            self.returncode = self._read()
            os.close(self._pipe)
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Nothing when it has ended."""
        if self.poll() is None:
            # The process that forked it may have collected it, and not yet sent its exit code.
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        """SIGKILL."""
        self.send_signal(signal.SIGKILL)


def _address(number: int, torch: bool) -> str:
    """No file, and free again when the process has ended."""
    return f"\0bagua-tests-{run_name}-{number}-{torch}"


@functools.cache
def _parent(number: int, torch: bool) -> socket.socket:
    """A connection to a process, with or without torch, that forks ranks when it is asked to. The first who needs it
    starts it; it ends when the last connection is closed.
    """
    address = _address(number, torch)
    while True:
        here = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            here.connect(address)
        except ConnectionRefusedError:
            here.close()
        else:
            return here
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            try:
                listener.bind(address)
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
                continue  # another process of the run starts it
            listener.listen()
            _start_parent(listener, number, torch)


@functools.cache
def _parents(torch: bool) -> list[socket.socket]:
    """Both such processes, once they can fork. A rank that ran while the other process still imports torch would wait
    for its peers meanwhile, and on a busy machine time out.
    """
    both = [_parent(number, torch) for number in range(2)]
    if not all(parent.recv(len(_READY)) for parent in both):
        raise _gone()
    return both


def _gone() -> ChildProcessError:
    return ChildProcessError("the process that ranks are forked from is gone")


def _start_parent(listener: socket.socket, number: int, torch: bool) -> None:
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    process = subprocess.Popen(
        [sys.executable, "-u", "-m", "tests.forks", str(listener.fileno()), *(["torch"] if torch else [])],
        cwd=ROOT,
        env=os.environ | LOADED | {"PYTHONPATH": path, "PYTHONHASHSEED": str(number)},
        stdin=subprocess.DEVNULL,
        pass_fds=[listener.fileno()],
        # Ctrl-C is for the tests.
        start_new_session=True,
    )

    def end() -> None:
        _parent(number, torch).close()
        process.wait()

    atexit.register(end)


def start(
    rank: int, call: Path, environment: dict[str, str], output: Path, namespace: str | None = None, *, torch: bool
) -> Fork:
    """Starts `tests.world` for a rank, in a network namespace if it is given one; what it prints goes to `output`."""
    function = ("tests.world", "rank_main", (str(call), rank))
    with open(os.devnull, "rb") as nothing, open(output, "ab") as out:
        standard = nothing.fileno(), out.fileno(), out.fileno()
        return _start(_Request(function, environment, namespace), rank, *standard, torch=torch)


def start_script(path: Path, *arguments: str, rank: int, environment: dict[str, str], output: Path) -> Fork:
    """Starts a rank that runs a Python file as a program; what it prints goes to `output`.

    A name that the file uses without importing it may be there all the same, because forks have imported much. So one
    rank of a job should be a new process.
    """
    request = _Request((__name__, "run_script", (str(path), *arguments)), environment | LOADED, None)
    with open(os.devnull, "rb") as nothing, open(output, "ab") as out:
        return _start(request, rank, nothing.fileno(), out.fileno(), out.fileno())


def run_script(path: str, *arguments: str) -> None:
    """Runs a file in this process as `python path arguments …` would."""
    sys.argv = [path, *arguments]
    sys.path[0] = os.path.dirname(path)
    runpy.run_path(path, run_name="__main__")


def start_with_pipes(
    module: str, *arguments: Any, rank: int, environment: dict[str, str], namespace: str | None = None
) -> Fork:
    """Calls `main` of the module in a fork, with a pipe to its standard input and one from its standard output; its
    errors go to ours.
    """
    asks, stdin = os.pipe()
    stdout, answers = os.pipe()
    try:
        request = _Request((module, "main", arguments), environment | LOADED, namespace)
        made = _start(request, rank, asks, answers, 2)
    finally:
        os.close(asks)
        os.close(answers)
    made.stdin, made.stdout = os.fdopen(stdin, "wb"), os.fdopen(stdout, "rb")
    return made


def _start(request: _Request, rank: int, *standard: int, torch: bool = True) -> Fork:
    """A fork with these files as its standard input, output and error output."""
    reading, writing = os.pipe()
    try:
        with _connecting:
            parent = _parents(torch)[rank % 2]
        socket.send_fds(parent, [pickle.dumps(request)], [writing, *standard])
    finally:
        os.close(writing)
    return Fork(reading)


def _enter(namespace: str) -> None:
    """Moves this process, which has one thread yet, into a network namespace."""
    with open(namespace, "rb") as file:
        # os.setns is new in Python 3.12.
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), 0) != 0:
            raise OSError(ctypes.get_errno(), f"setns({namespace})")


def _serve(listener: socket.socket) -> _Request | None:
    """Forks a rank for each request. Returns the request in the rank, and None in the parent, in the end."""
    clients: dict[int, socket.socket] = {}
    pipes: dict[int, tuple[int, int]] = {}
    poll = select.poll()
    poll.register(listener, select.POLLIN)
    while True:
        for ready, _ in poll.poll():
            if ready == listener.fileno():
                client, _ = listener.accept()
                if _PEER.unpack(client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))[1] == os.getuid():
                    clients[client.fileno()] = client
                    poll.register(client, select.POLLIN)
                    with contextlib.suppress(BrokenPipeError):
                        client.send(_READY)
                continue
            if ready in pipes:
                pid, pipe = pipes.pop(ready)
                poll.unregister(ready)
                code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                with contextlib.suppress(BrokenPipeError):
                    os.write(pipe, _NUMBER.pack(code))
                os.close(pipe)
                os.close(ready)
                continue
            text, passed = b"", list[int]()
            # A process that has ended before it read what it was sent.
            with contextlib.suppress(ConnectionResetError):
                text, passed, _, _ = socket.recv_fds(clients[ready], 1 << 20, 4)
            if not text:
                poll.unregister(ready)
                clients.pop(ready).close()
                if not clients:
                    return None
                continue
            pipe, *standard = passed
            pid = os.fork()
            if pid == 0:
                os.setsid()
                os.write(pipe, _NUMBER.pack(os.getpid()))
                for number, file in enumerate(standard):
                    os.dup2(file, number)
                os.closerange(3, max(map(int, os.listdir("/proc/self/fd"))) + 1)
                # Their numbers are among those that were closed.
                for each in (listener, *clients.values()):
                    each.detach()
                request: _Request = pickle.loads(text)
                if request.namespace is not None:
                    _enter(request.namespace)
                os.environ.clear()
                os.environ.update(request.environment)
                return request
            for file in standard:
                os.close(file)
            pidfd = os.pidfd_open(pid)
            pipes[pidfd] = pid, pipe
            poll.register(pidfd, select.POLLIN)


class _EndOfRank:
    """Ends this process, when Python drops it, with the exit code that the rank chose."""

    def __init__(self, code: int) -> None:
        self._code = code
        self._files = sys.stdout, sys.stderr
        self._exit = ctypes.PyDLL(None).exit

    def __del__(self) -> None:
        for file in self._files:
            file.flush()
        self._exit(self._code)


def _end_early(code: int) -> None:
    """Lets this process end with what it did itself, and leave as it is what all forks have in common.

    That would be copied to be destroyed, 0.1 s of processor of the 0.17 s that a rank of torch costs. What comes before
    happens as in every program: Python's exit hooks, the clearing of bagua's modules and of those that the rank
    imported, and what libraries do that are loaded from now on.
    """
    # Python clears this module after all others.
    vars(sys)["_end_of_rank"] = _EndOfRank(code)


def _forget_common_modules() -> None:
    """The last exit hook: Python clears only modules that it finds."""
    if hasattr(sys, "_end_of_rank"):
        common = [sys.modules.pop(name, None) for name in _COMMON]
        # For ever.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(common))


def _leave_out_destructors() -> None:
    """Lets this process end before the libraries that were loaded until now destroy their global objects."""
    libc = ctypes.CDLL(None)
    # Called in the reverse order: first C writes what it has not written yet, then `_exit` is given the exit code.
    libc.on_exit(libc._exit, None)
    libc.__cxa_atexit(libc.fflush, None, None)


def _import_torch() -> None:
    import torch

    for name in ("bagua.aggregation", "bagua.torch_api", "torch.nn.parallel"):
        importlib.import_module(name)
    parameter = torch.nn.Parameter(torch.zeros(1))
    torch.optim.SGD([parameter], lr=0.1).step()
    # At exit torch would take back the definitions of its own operators one by one: 0.035 s of each rank.
    for made in vars(weakref.finalize)["_registry"]:
        made.atexit = False


def _call(module: str, name: str, arguments: tuple[Any, ...]) -> None:
    """Runs a rank. An exception that it does not catch ends it as it ends every program."""
    try:
        getattr(importlib.import_module(module), name)(*arguments)
    except SystemExit as end:
        if isinstance(end.code, int):
            _end_early(end.code)
        raise
    _end_early(0)


def _main() -> None:
    # Before bagua's own hooks, which are called in the reverse order.
    atexit.register(_forget_common_modules)
    import numpy as np

    for name in ("tests.world", "bagua"):
        importlib.import_module(name)
    if with_torch := "torch" in sys.argv[2:]:
        _import_torch()
    # Forks end with what was made before them frozen: to look for circles among these 300,000 objects, at the end of
    # every rank, would take 1 s of processor each. Modules are cleared, and what ranks make is collected, as ever.
    gc.collect()
    gc.freeze()
    _COMMON.extend(name for name in sys.modules if name.partition(".")[0] not in {"bagua", "builtins", "sys"})
    asked = _serve(socket.socket(fileno=int(sys.argv[1])))
    if asked is not None:
        if with_torch:
            _leave_out_destructors()
        np.random.seed()
        _call(*asked.function)


if __name__ == "__main__":
    _main()
