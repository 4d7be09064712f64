"""Starts the ranks of a job on this host:

    python -m bagua.distributed.run --nproc_per_node N [...] script [arguments]
    python -m bagua.distributed.run --keep-going --nproc-per-node N [...] script [arguments]

The first is torchrun with the original's flags (`torchrun.py`). The second is the runner of elastic jobs, in this file:
it starts a rank that fails again, alone. Its options take their defaults from torchrun's PET_ variables.

Every rank runs under `end_with_parent.py` and in a session of its own, so that the runner can end what it has started
and the kernel does when the runner is killed. The runner has one thread, and imports no torch. On one node it draws the
job's secret where BAGUA_JOB_SECRET is not set, so that no other process of the host reaches the address book.
"""

from __future__ import annotations

import argparse
import importlib.util
import ipaddress
import math
import os
import secrets
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from bagua import config
from bagua.commands.parser import Parser
from bagua.distributed import end_with_parent, store, torchrun
from bagua.distributed.processes import how, say
from bagua.distributed.signals import Signals

__all__ = ["main"]

# Seconds between SIGTERM and SIGKILL, other than after SIGTERM to the runner.
_GRACE = 5.0

# Seconds that ranks have after SIGTERM to the runner, as with torchrun.
_SHUTDOWN_TIMEOUT_S = 30

# Options that torchrun has too.
_OF_TORCHRUN = (
    "nproc_per_node",
    "nnodes",
    "node_rank",
    "master_addr",
    "master_port",
    "max_restarts",
    "shutdown_timeout",
)

# Seconds between the end of the address book and its next start.
_BOOK_DELAY = 1.0

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one node's ranks to their end.

    The exit code: 0 when every rank has ended with 0; 1 after one restart too many, or without the address book;
    2 for arguments that cannot be used; 130, 143 and 129 after Ctrl-C, SIGTERM and SIGHUP.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given[:1] != ["--keep-going"]:
        return torchrun.run("run", given)
    options = _parse(given)
    with Signals(signal.SIGCHLD, *_ENDING) as signals:
        return _Runner(options, signals).run()


@dataclass(frozen=True)
class _Options:
    """The command line, checked."""

    nproc_per_node: int
    nnodes: int
    node_rank: int
    #: Where the ranks find the address book; port 0, on one node only, is any free port.
    master: tuple[str, int]
    max_restarts: int
    #: Seconds between the end of a rank and its next start.
    restart_delay: float
    #: Seconds between SIGTERM to the runner and SIGKILL to what is left of its ranks.
    shutdown_timeout: float
    #: What every rank runs.
    command: tuple[str, ...]


class _Process:
    """A child with all that it starts, in a session of its own."""

    def __init__(
        self,
        command: Sequence[str],
        variables: dict[str, str],
        *,
        output: int | None = None,
        files: tuple[int, ...] = (),
    ) -> None:
        wrapper = (sys.executable, "-I", "-S", end_with_parent.__file__, str(os.getpid()))
        self._popen = subprocess.Popen(
            [*wrapper, *command],
            env=config.environment(variables),
            stdout=output,
            pass_fds=files,
            start_new_session=True,
        )
        self.pid = self._popen.pid
        self.stdout = self._popen.stdout

    def code(self, *, sweep: bool = False) -> int | None:
        """The exit code, -N after signal N; None while it runs.

        What a failed one has left running in its session is killed, with `sweep` also what one that ended with 0 has.
        """
        if self._popen.returncode is None:
            # Until the process is collected, its number names no other session.
            ended = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if ended is None:
                return None
            if ended.si_status != 0 or sweep:
                self.kill()
        return self._popen.wait()

    def terminate(self) -> None:
        """SIGTERM to the child, which may end its own children in order."""
        self._popen.terminate()

    def kill(self) -> None:
        """SIGKILL to everything in the session."""
        # Until it has its own session, no other process is in it; a child that changed its user may be out of reach.
        try:
            os.killpg(self.pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            self._popen.kill()


class _Rank:
    """One rank of this node through all its starts."""

    def __init__(self, rank: int, local_rank: int) -> None:
        self.rank = rank
        self.local_rank = local_rank
        #: Restarts so far.
        self.restarts = 0
        #: None between two starts, and after it has ended with 0.
        self.process: _Process | None = None
        #: When it is to start, by time.monotonic; None while it runs and after it has ended with 0.
        self.due: float | None = time.monotonic()

    def is_done(self) -> bool:
        """Whether it has ended with 0."""
        return self.process is None and self.due is None


class _Runner:
    """The ranks of this node, and on node 0 the address book."""

    def __init__(self, options: _Options, signals: Signals) -> None:
        self._options = options
        self._signals = signals
        first = options.node_rank * options.nproc_per_node
        self._ranks = [_Rank(first + local, local) for local in range(options.nproc_per_node)]
        self._book: _Process | None = None
        # On one node every process of the job is a child of this one. On several the runners have to be given a secret.
        drawn = options.nnodes == 1 and config.text(config.SECRET) is None
        #: What the environment of every child has besides the runner's own.
        self._shared = {config.SECRET: secrets.token_hex(32)} if drawn else {}
        #: Memory with the entries of the book, so that they are there when its process is started again.
        self._entries = os.memfd_create("bagua-book")
        #: When the book is to start again, by time.monotonic; None while it runs, and on other nodes.
        self._book_due: float | None = None
        #: Seconds from SIGTERM to the ranks until SIGKILL.
        self._grace = _GRACE

    def run(self) -> int:
        """The exit code. No child is left when it returns or raises."""
        try:
            host, port = self._options.master
            if self._options.node_rank == 0:
                served = self._serve_book(port)
                if served is None:
                    return 1
                port = served
            return self._watch(host, port)
        except _Interrupted as interrupted:
            if interrupted.signal == signal.SIGTERM:
                self._grace = self._options.shutdown_timeout
            return 128 + interrupted.signal
        except OSError as error:
            say(f"cannot start a process: {error}")
            return 1
        finally:
            self._end([*(rank.process for rank in self._ranks), self._book])
            os.close(self._entries)

    def _serve_book(self, port: int) -> int | None:
        """The port of the book, once it can be reached; None when it cannot be served, which it has said itself."""
        host = self._options.master[0]
        # On several nodes a name may be this host's on another network, or 127.0.1.1 in its own /etc/hosts.
        listen = host if self._options.nnodes == 1 or _is_numeric(host) else ""
        address = f"[{listen}]:{port}" if ":" in listen else f"{listen}:{port}"
        keep = ("--keep", f"/proc/self/fd/{self._entries}")
        command = (sys.executable, "-m", "bagua.distributed.store", "--listen", address, *keep)
        self._book = _Process(command, self._shared, output=subprocess.PIPE, files=(self._entries,))
        assert self._book.stdout is not None
        with self._book.stdout as output:
            while not select.select([output], [], [], 0)[0]:
                self._next_event(None, output)
            line = output.readline().decode().strip()
        if not line:
            return None
        return int(line.rpartition(":")[2])

    def _watch(self, host: str, port: int) -> int:
        """Starts ranks when they are due until all have ended with 0, or one has no restart left."""
        where = store.url(host, port)
        while True:
            for rank in self._ranks:
                if rank.process is not None:
                    code = rank.process.code()
                    if code is not None and not self._ended(rank, rank.process.pid, code):
                        return 1
                if rank.due is not None and rank.due <= time.monotonic():
                    rank.process, rank.due = _Process(self._options.command, self._variables(rank, where)), None
            if all(rank.is_done() for rank in self._ranks):
                return 0
            self._watch_book(where, port)
            due = [rank.due for rank in self._ranks] + [self._book_due]
            self._next_event(min((moment for moment in due if moment is not None), default=None))

    def _watch_book(self, where: str, port: int) -> None:
        """Starts the address book again, at the same port and with its entries, a moment after it has ended."""
        if self._book is not None and (code := self._book.code()) is not None:
            say(f"the address book {where} {how(code)}: it is started again in {_BOOK_DELAY} s")
            self._book, self._book_due = None, time.monotonic() + _BOOK_DELAY
        if self._book_due is not None and self._book_due <= time.monotonic():
            self._book_due = None
            # When it cannot be served, its process has ended, which the next call sees.
            self._serve_book(port)

    def _ended(self, rank: _Rank, pid: int, code: int) -> bool:
        """Notes the end of a rank's process; False when it has failed and is not to be started again."""
        rank.process = None
        if code == 0:
            return True
        what = f"rank {rank.rank} (pid {pid}) {how(code)}"
        if rank.restarts == self._options.max_restarts:
            say(f"{what}: no restart of {self._options.max_restarts} is left, so the runner ends all its ranks")
            return False
        rank.restarts += 1
        rank.due = time.monotonic() + self._options.restart_delay
        which = f"restart {rank.restarts} of {self._options.max_restarts}"
        say(f"{what}: {which} in {self._options.restart_delay} s")
        return True

    def _variables(self, rank: _Rank, where: str) -> dict[str, str]:
        """What a rank's environment has besides the runner's own."""
        return {
            # As torchrun does: one rank per core, not each rank on all cores.
            "OMP_NUM_THREADS": config.text("OMP_NUM_THREADS") or "1",
            "RANK": str(rank.rank),
            "WORLD_SIZE": str(self._options.nnodes * self._options.nproc_per_node),
            "LOCAL_RANK": str(rank.local_rank),
            "LOCAL_WORLD_SIZE": str(self._options.nproc_per_node),
            "BAGUA_ELASTIC": where,
            "BAGUA_RESTART_COUNT": str(rank.restarts),
            **self._shared,
        }

    def _next_event(self, deadline: float | None, file: IO[bytes] | None = None) -> None:
        """Returns when a child may have ended, when `file` can be read, or at the deadline.

        _Interrupted when the runner is to end.
        """
        timeout = None if deadline is None else max(0.0, deadline - time.monotonic())
        for arrived in self._signals.wait(timeout, file):
            if arrived in _ENDING:
                raise _Interrupted(arrived)

    def _end(self, processes: Sequence[_Process | None]) -> None:
        """SIGTERM, and SIGKILL after the grace period or at another signal that ends the runner."""
        running = [process for process in processes if process is not None and process.code() is None]
        for process in running:
            process.terminate()
        deadline = time.monotonic() + self._grace
        while running := [process for process in running if process.code(sweep=True) is None]:
            if time.monotonic() >= deadline:
                for process in running:
                    process.kill()
            arrived = self._signals.wait(max(0.05, deadline - time.monotonic()))
            if any(number in _ENDING for number in arrived):
                deadline = 0.0


class _Interrupted(Exception):
    """A signal that ends the runner."""

    def __init__(self, number: signal.Signals) -> None:
        super().__init__(number)
        self.signal = number


def _is_numeric(host: str) -> bool:
    """Whether it is an IP address and no name."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _parse(arguments: Sequence[str]) -> _Options:
    """The options; SystemExit with code 2 and a message for those that cannot be used."""
    parser = Parser(
        prog="python -m bagua.distributed.run --keep-going",
        description="Starts the ranks of an elastic job on this node, and starts a rank that fails again, alone.",
        epilog="example: python -m bagua.distributed.run --keep-going --nproc-per-node 4 train.py",
        allow_abbrev=False,
    )
    parser.add_argument("--keep-going", action="store_true", help=argparse.SUPPRESS)
    needed = config.text("PET_NPROC_PER_NODE") is None
    parser.add_argument("--nproc-per-node", type=int, required=needed, metavar="N", help="ranks on each node")
    parser.add_argument("--nnodes", type=int, default=1, metavar="M", help="number of nodes")
    parser.add_argument("--node-rank", type=int, metavar="K", help="number of this node, from 0")
    parser.add_argument("--master-addr", metavar="A", help="node 0, which serves the address book")
    parser.add_argument("--master-port", type=int, metavar="P", help="port of the address book")
    parser.add_argument("--max-restarts", type=int, default=3, metavar="R", help="restarts of each rank")
    parser.add_argument("--restart-delay", type=float, default=1.0, metavar="S", help="seconds before a restart")
    parser.add_argument(
        "--shutdown-timeout",
        type=int,
        default=_SHUTDOWN_TIMEOUT_S,
        metavar="S",
        help="seconds that ranks have after SIGTERM",
    )
    parser.add_argument("-m", action="store_true", dest="is_module", help="the script is the name of a module")
    parser.add_argument("script", help="the Python program that every rank runs")
    # argparse would name it among the arguments that are missing.
    parser.add_argument("args", nargs=argparse.REMAINDER, help="its arguments").required = False
    # Kubeflow Trainer sets torchrun's variables instead of arguments. argparse converts them as it does arguments.
    for name in _OF_TORCHRUN:
        if (value := config.text(f"PET_{name.upper()}")) is not None:
            parser.set_defaults(**{name: value})
    given = parser.parse_args(arguments)
    if problem := _problem(given):
        parser.error(problem)
    python = (sys.executable, "-u", *(["-m"] if given.is_module else []))
    return _Options(
        nproc_per_node=given.nproc_per_node,
        nnodes=given.nnodes,
        node_rank=given.node_rank or 0,
        master=(given.master_addr or "127.0.0.1", given.master_port or 0),
        max_restarts=given.max_restarts,
        restart_delay=given.restart_delay,
        shutdown_timeout=given.shutdown_timeout,
        command=(*python, given.script, *given.args),
    )


def _problem(given: argparse.Namespace) -> str | None:
    """What is wrong with the arguments, if anything is."""
    for name, least in (("nproc_per_node", 1), ("nnodes", 1), ("max_restarts", 0), ("shutdown_timeout", 0)):
        if (value := getattr(given, name)) < least:
            return f"--{name.replace('_', '-')} is {value}; it must be at least {least}"
    if not (math.isfinite(given.restart_delay) and given.restart_delay >= 0):
        return f"--restart-delay is {given.restart_delay} s; it must be a number of seconds from 0"
    if given.nnodes > 1:
        for name in ("node_rank", "master_addr", "master_port"):
            if getattr(given, name) is None:
                return f"--nnodes {given.nnodes} needs --{name.replace('_', '-')}"
    if not 0 <= (given.node_rank or 0) < given.nnodes:
        return f"--node-rank is {given.node_rank}; with --nnodes {given.nnodes} it must be from 0 to {given.nnodes - 1}"
    if not (given.nnodes == 1 and given.master_port in (None, 0)) and not 1 <= given.master_port <= 65535:
        return f"--master-port is {given.master_port}; it must be from 1 to 65535"
    if given.master_addr == "":
        return "--master-addr is empty"
    if given.is_module:
        # Only the outermost package: looking further would run its code in the runner.
        if not given.script or importlib.util.find_spec(given.script.partition(".")[0]) is None:
            return f"no module named {given.script!r}"
    elif not (script := Path(given.script)).exists():
        return f"no file {given.script!r}"
    elif script.is_dir() and not (script / "__main__.py").exists():
        return f"{given.script!r} is a directory without a __main__.py"
    return None


if __name__ == "__main__":
    sys.exit(main())
