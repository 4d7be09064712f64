"""Starts a job on several hosts by ssh: `python -m bagua.distributed.launch` once per host.

    baguarun --host_list host0,host1:2222 --nproc_per_node N [-x NAME[=VALUE] ...] script [arguments]

The job ends when one host's launcher fails, or with this process: each remote launcher ends when its standard input
does, which ssh closes with its connection.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence

from bagua import config
from bagua.commands.parser import Parser
from bagua.distributed.launch import END_WITH_STDIN
from bagua.distributed.signals import Signals

__all__ = ["hosts_of", "main", "parser"]

# Seconds in which the launchers may end by themselves. Those that need longer go on without a connection.
_GRACE = 3.0

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the job to its end.

    The exit code: 0 when every host's launcher has ended with 0, else that of the first that has not; 2 for arguments
    that cannot be used; 130, 143 and 129 after Ctrl-C, SIGTERM and SIGHUP.
    """
    known = parser()
    options = known.parse(sys.argv[1:] if arguments is None else arguments)
    try:
        hosts = hosts_of(
            options.host_list or config.host_list() or "",
            config.ssh_port() if options.ssh_port is None else options.ssh_port,
        )
        carried = _carried(options.x)
    except ValueError as error:
        known.error(str(error))
    commands = [_command(options, hosts, node_rank, carried) for node_rank in range(len(hosts))]
    with Signals(signal.SIGCHLD, *_ENDING) as signals:
        return _run(hosts, commands, signals)


def _run(hosts: Sequence[tuple[str, int]], commands: Sequence[str], signals: Signals) -> int:
    """Starts the command of each host, and waits for all of them or the first that fails."""
    connections: list[subprocess.Popen[bytes]] = []
    try:
        for (host, port), command in zip(hosts, commands, strict=True):
            # In this process group, so that ssh may ask for a password.
            connections.append(subprocess.Popen(["ssh", "-p", str(port), host, command], stdin=subprocess.PIPE))
        while True:
            codes = [connection.poll() for connection in connections]
            for (host, _), code in zip(hosts, codes, strict=True):
                if code not in (None, 0):
                    print(f"baguarun: {host} ended with exit code {code}: the job ends", file=sys.stderr)
                    return code if code > 0 else 128 - code
            if all(code == 0 for code in codes):
                return 0
            for number in signals.wait():
                if number in _ENDING:
                    return 128 + number
    except OSError as error:
        print(f"baguarun: cannot start ssh: {error}", file=sys.stderr)
        return 1
    finally:
        _end(connections, signals)


def _end(connections: Sequence[subprocess.Popen[bytes]], signals: Signals) -> None:
    """Ends the standard input of the launchers; after the grace period, or at another signal, the connections."""
    for connection in connections:
        assert connection.stdin is not None
        with contextlib.suppress(OSError):
            connection.stdin.close()
    deadline = time.monotonic() + _GRACE
    while any(connection.poll() is None for connection in connections) and time.monotonic() < deadline:
        if any(number in _ENDING for number in signals.wait(deadline - time.monotonic())):
            break
    for connection in connections:
        if connection.poll() is None:
            connection.kill()
            connection.wait()


def _command(
    options: argparse.Namespace, hosts: Sequence[tuple[str, int]], node_rank: int, carried: dict[str, str]
) -> str:
    """Returns what the shell of one host runs."""
    launch = [sys.executable, "-m", "bagua.distributed.launch", END_WITH_STDIN]
    launch += ["--nnodes", str(len(hosts)), "--node_rank", str(node_rank)]
    launch += ["--nproc_per_node", str(options.nproc_per_node)]
    launch += ["--master_addr", hosts[0][0].rpartition("@")[2], "--master_port", str(options.master_port)]
    launch += [f"--{name}" for name in ("module", "no_python") if getattr(options, name)]
    launch += [options.script, *options.args]
    # The shell replaces itself, so that what ends the connection ends the launcher.
    steps = [f"cd {shlex.quote(os.getcwd())}"]
    steps += [f"export {name}={shlex.quote(value)}" for name, value in carried.items()]
    return " && ".join([*steps, f"exec {shlex.join(launch)}"])


def hosts_of(text: str, port: int) -> list[tuple[str, int]]:
    """Returns the hosts of "host0,user@host1:2222" with their ssh ports; `port` for a host without one.

    Raises ValueError for a bad one.
    """
    found = []
    for part in text.split(","):
        match = re.fullmatch(r"([^\s:-][^\s:]*)(?::([0-9]+))?", part.strip())
        if match is None:
            raise ValueError(f"--host_list: {part!r} is not HOST or HOST:PORT" if text else "--host_list is missing")
        found.append((match[1], int(match[2] or port)))
    return found


def _carried(given: Sequence[str]) -> dict[str, str]:
    """The variables of -x. ValueError for a name that is none, or that this process does not have."""
    own = config.environment({})
    found = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise ValueError(f"-x {text!r} is neither NAME nor NAME=VALUE")
        if not equals and name not in own:
            raise ValueError(f"-x {name}: this process has no variable {name}; write {name}=VALUE")
        found[name] = value if equals else own[name]
    return found


def parser() -> Parser:
    """That of the command line."""
    parser = Parser(
        prog="baguarun",
        description="Starts the ranks of a job on several hosts, by ssh.",
        epilog="example: baguarun --host_list host0,host1 --nproc_per_node 8 train.py",
        allow_abbrev=False,
    )
    parser.add_version()

    def both(name: str) -> tuple[str, str]:
        return f"--{name.replace('_', '-')}", f"--{name}"

    parser.add_argument(*both("host_list"), metavar="HOST[:PORT],...", help="or the variable BAGUA_NODE_DOMAIN_NAMES")
    parser.add_argument(*both("ssh_port"), type=int, metavar="PORT", help="or the variable BAGUA_SSH_PORT (22)")
    parser.add_argument(*both("nproc_per_node"), required=True, metavar="N", help="ranks on each host")
    parser.add_argument(*both("master_port"), type=int, default=29500, metavar="PORT", help="on the first host (29500)")
    parser.add_argument("-x", action="append", default=[], metavar="NAME[=VALUE]", help="a variable for every rank")
    parser.add_argument("-m", "--module", action="store_true", help="the script is the name of a module")
    parser.add_argument(*both("no_python"), action="store_true", help="the script is a program of its own")
    parser.add_argument("script", help="the program that every rank runs")
    # argparse would name it among the arguments that are missing.
    parser.add_argument("args", nargs=argparse.REMAINDER, help="its arguments").required = False
    return parser


if __name__ == "__main__":
    sys.exit(main())
