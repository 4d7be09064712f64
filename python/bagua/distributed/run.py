"""Starts the ranks of a job on this host:

    python -m bagua.distributed.run --nproc_per_node N [...] script [arguments]
    python -m bagua.distributed.run --keep-going --nproc-per-node N [...] script [arguments]

The first is torchrun (`launch.py`). The second is the runner of elastic jobs, in this file: it starts a rank that fails
again, alone, and serves the address book on node 0.

Every rank runs under `end_with_parent.py` and in a session of its own, so that the runner can end what it has started
and the kernel does when the runner is killed. The runner imports no torch. On one node it draws the job's secret if
BAGUA_JOB_SECRET is not set, so that no other process of the host reaches the address book.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Sequence

from bagua import config
from bagua.commands.parser import Parser
from bagua.distributed import end_with_parent, launch, store
from bagua.distributed.signals import Signals

__all__ = ["main"]

# Seconds between SIGTERM and SIGKILL, as with torchrun.
_GRACE_S = 30.0

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one node's ranks until they end. Returns the exit code.

    The exit code is 0 if every rank ended with 0; 1 if a rank failed more often than allowed, or the address book could
    not be served; 2 for bad arguments; 130, 143 and 129 after Ctrl-C, SIGTERM and SIGHUP.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given[:1] != ["--keep-going"]:
        return launch.main(given)
    options = _parse(given)
    with Signals(signal.SIGCHLD, *_ENDING) as signals:
        return _Runner(options, signals).run()


class _Rank:
    """One rank of this node: its process, its restarts and the time of its next start."""

    def __init__(self, rank: int, local_rank: int) -> None:
        self.rank = rank
        self.local_rank = local_rank
        #: Number of restarts so far.
        self.restarts = 0
        #: The running process; None before a restart, and after the rank has ended with 0.
        self.process: subprocess.Popen[bytes] | None = None
        #: Time of the next start, by time.monotonic. None while the rank runs, and after it has ended with 0.
        self.due: float | None = time.monotonic()


class _Runner:
    """Starts and watches the ranks of this node. On node 0, also serves the address book."""

    def __init__(self, options: argparse.Namespace, signals: Signals) -> None:
        self._options = options
        self._signals = signals
        first = options.node_rank * options.nproc_per_node
        self._ranks = [_Rank(first + local, local) for local in range(options.nproc_per_node)]
        # On one node every process of the job is a child of this one. On several the runners have to be given a secret.
        drawn = options.nnodes == 1 and config.text(config.SECRET) is None
        #: Environment variables that every rank gets in addition to the runner's own.
        self._shared = {config.SECRET: secrets.token_hex(32)} if drawn else {}

    def run(self) -> int:
        """Returns the exit code. No rank is left when it returns or raises."""
        book = None
        host, port = self._options.master_addr, self._options.master_port
        try:
            if self._options.node_rank == 0:
                # On several nodes a name may be this host's on another network, or 127.0.1.1 in its own /etc/hosts.
                is_address = ":" in host or host.replace(".", "").isdigit()
                listen = host if self._options.nnodes == 1 or is_address else ""
                book = store.serve(listen, port, config.settings(secret=self._shared.get(config.SECRET)))
                port = book.port
            self._shared["BAGUA_ELASTIC"] = store.url(host, port)
            return self._watch()
        except (OSError, ValueError) as error:
            _say(str(error))
            return 1
        finally:
            self._end_ranks()
            if book is not None:
                book.stop()

    def _watch(self) -> int:
        """Starts ranks when they are due. Returns the exit code when all have ended with 0, or one is not restarted."""
        while True:
            for rank in self._ranks:
                code = None if rank.process is None else _code(rank.process)
                if code is not None and not self._ended(rank, code):
                    return 1
                if rank.due is not None and rank.due <= time.monotonic():
                    rank.process, rank.due = self._start(rank), None
            if all(rank.process is None and rank.due is None for rank in self._ranks):
                return 0
            due = min((rank.due for rank in self._ranks if rank.due is not None), default=None)
            for number in self._signals.wait(None if due is None else max(0.0, due - time.monotonic())):
                if number in _ENDING:
                    return 128 + number

    def _start(self, rank: _Rank) -> subprocess.Popen[bytes]:
        variables = {
            # One thread per rank by default, as with torchrun, so that ranks do not each use all cores.
            "OMP_NUM_THREADS": config.text("OMP_NUM_THREADS") or "1",
            "RANK": str(rank.rank),
            "WORLD_SIZE": str(self._options.nnodes * self._options.nproc_per_node),
            "LOCAL_RANK": str(rank.local_rank),
            "LOCAL_WORLD_SIZE": str(self._options.nproc_per_node),
            "BAGUA_RESTART_COUNT": str(rank.restarts),
            **self._shared,
        }
        python = (sys.executable, "-u", *(["-m"] if self._options.m else []))
        wrapper = (sys.executable, "-I", "-S", end_with_parent.__file__, str(os.getpid()))
        return subprocess.Popen(
            [*wrapper, *python, self._options.script, *self._options.args],
            env=config.environment(variables),
            start_new_session=True,
        )

    def _ended(self, rank: _Rank, code: int) -> bool:
        """Notes the end of a rank's process. Returns False if it has failed and is not to be started again."""
        assert rank.process is not None
        what = f"rank {rank.rank} (pid {rank.process.pid}) {_how(code)}"
        rank.process = None
        if code == 0:
            return True
        most = self._options.max_restarts
        if rank.restarts == most:
            _say(f"{what}: no restart of {most} is left, so the runner ends all its ranks")
            return False
        rank.restarts += 1
        rank.due = time.monotonic() + self._options.restart_delay
        _say(f"{what}: restart {rank.restarts} of {most} in {self._options.restart_delay} s")
        return True

    def _end_ranks(self) -> None:
        """Sends SIGTERM to all ranks, and SIGKILL after the grace period or at another signal that ends the runner."""
        running = [rank.process for rank in self._ranks if rank.process is not None and _code(rank.process) is None]
        for process in running:
            process.terminate()
        deadline = time.monotonic() + _GRACE_S
        while running := [process for process in running if _code(process, sweep=True) is None]:
            if time.monotonic() >= deadline:
                for process in running:
                    _kill(process)
            arrived = self._signals.wait(max(0.05, deadline - time.monotonic()))
            if any(number in _ENDING for number in arrived):
                deadline = 0.0


def _code(process: subprocess.Popen[bytes], *, sweep: bool = False) -> int | None:
    """Returns the exit code of a rank's process, -N after signal N; None while it runs.

    Kills what a failed process has left running in its session, and with `sweep` also what one that ended with 0 has.
    """
    if process.returncode is None:
        # Until the process is collected, its number names no other session.
        ended = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if ended is None:
            return None
        if ended.si_status != 0 or sweep:
            _kill(process)
    return process.wait()


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Sends SIGKILL to everything in a process's session."""
    # Until it has its own session, no other process is in it; a child that changed its user may be out of reach.
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        process.kill()


def _how(code: int) -> str:
    if code > 0:
        return f"ended with exit code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"


def _say(text: str) -> None:
    """Writes one line to standard error at once, so that lines of several programs do not mix."""
    # If nobody reads standard error any more, the message is lost, but the job continues.
    with contextlib.suppress(OSError):
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = Parser(
        prog="python -m bagua.distributed.run --keep-going",
        description="Starts the ranks of an elastic job on this node, and starts a rank that fails again, alone.",
        epilog="example: python -m bagua.distributed.run --keep-going --nproc-per-node 4 train.py",
        allow_abbrev=False,
    )
    parser.add_argument("--keep-going", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--nproc-per-node", type=int, required=True, metavar="N", help="ranks on each node")
    parser.add_argument("--nnodes", type=int, default=1, metavar="M", help="number of nodes")
    parser.add_argument("--node-rank", type=int, metavar="K", help="number of this node, from 0")
    parser.add_argument("--master-addr", metavar="A", help="node 0, which serves the address book")
    parser.add_argument("--master-port", type=int, metavar="P", help="port of the address book")
    parser.add_argument("--max-restarts", type=int, default=3, metavar="R", help="restarts of each rank")
    parser.add_argument("--restart-delay", type=float, default=1.0, metavar="S", help="seconds before a restart")
    parser.add_argument("-m", action="store_true", help="the script is the name of a module")
    parser.add_argument("script", help="the Python program that every rank runs")
    # argparse would name it among the arguments that are missing.
    parser.add_argument("args", nargs=argparse.REMAINDER, help="its arguments").required = False
    given = parser.parse_args(arguments)
    for name, least in (("nproc_per_node", 1), ("nnodes", 1), ("max_restarts", 0), ("restart_delay", 0)):
        if not least <= (value := getattr(given, name)) < math.inf:
            parser.error(f"--{name.replace('_', '-')} is {value}; it must be at least {least}")
    if given.nnodes > 1 and None in (given.node_rank, given.master_addr, given.master_port):
        parser.error(f"--nnodes {given.nnodes} needs --node-rank, --master-addr and --master-port")
    given.node_rank, given.master_port = given.node_rank or 0, given.master_port or 0
    given.master_addr = given.master_addr or "127.0.0.1"
    if not 0 <= given.node_rank < given.nnodes:
        parser.error(f"--node-rank is {given.node_rank}; with --nnodes {given.nnodes} it must be below that, from 0")
    if not (1 if given.nnodes > 1 else 0) <= given.master_port <= 65535:
        parser.error(f"--master-port is {given.master_port}; it must be from 1 to 65535")
    return given


if __name__ == "__main__":
    sys.exit(main())
