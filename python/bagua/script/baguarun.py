"""Starts a job on several hosts by ssh: `python -m bagua.distributed.launch` once per host.

    baguarun --host_list host0,host1:2222 --nproc_per_node N [-x NAME[=VALUE] ...] script [arguments]

The job ends if one host's launcher fails, or if this process ends. Each remote launcher ends when its standard input
closes, which happens when the ssh connection ends.
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

# Seconds that the launchers get to end by themselves. After that their connections are closed.
_GRACE = 3.0

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the job until it ends. Returns the exit code.

    The exit code is 0 if every host's launcher ended with 0, else that of the first one that failed; 2 for bad
    arguments; 130, 143 and 129 after Ctrl-C, SIGTERM and SIGHUP.
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
        return _run_on_hosts(hosts, commands, signals)


def _run_on_hosts(hosts: Sequence[tuple[str, int]], commands: Sequence[str], signals: Signals) -> int:
    """Runs one command per host over ssh, until all have ended or one has failed."""
    connections: list[subprocess.Popen[bytes]] = []
    try:
        for (host, port), command in zip(hosts, commands, strict=True):
            # ssh stays in this process group, so that it may ask for a password.
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
        _end_connections(connections, signals)


def _end_connections(connections: Sequence[subprocess.Popen[bytes]], signals: Signals) -> None:
    """Closes the launchers' standard input. After the grace period, or at another signal, kills the connections."""
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
    launch = [sys.executable, "-m", "bagua.distributed.launch", END_WITH_STDIN]
    launch += ["--nnodes", str(len(hosts)), "--node_rank", str(node_rank)]
    launch += ["--nproc_per_node", str(options.nproc_per_node)]
    launch += ["--master_addr", hosts[0][0].rpartition("@")[2], "--master_port", str(options.master_port)]
    launch += [f"--{name}" for name in ("module", "no_python") if getattr(options, name)]
    launch += [options.script, *options.args]
    # The shell replaces itself with the launcher, so that the end of the connection ends the launcher.
    steps = [f"cd {shlex.quote(os.getcwd())}"]
    steps += [f"export {name}={shlex.quote(value)}" for name, value in carried.items()]
    return " && ".join([*steps, f"exec {shlex.join(launch)}"])


def hosts_of(text: str, port: int) -> list[tuple[str, int]]:
    """Returns the hosts of "host0,user@host1:2222" with their ssh ports. `port` is for hosts without one.

    Raises ValueError for a malformed host.
    """
    found = []
    for part in text.split(","):
        match = re.fullmatch(r"([^\s:-][^\s:]*)(?::([0-9]+))?", part.strip())
        if match is None:
            raise ValueError(f"--host_list: {part!r} is not HOST or HOST:PORT" if text else "--host_list is missing")
        found.append((match[1], int(match[2] or port)))
    return found


def _carried(given: Sequence[str]) -> dict[str, str]:
    """Returns the variables of -x. Raises ValueError for an invalid name, or a variable that is not set."""
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
    """Returns the command line parser."""
    parser = Parser(
        prog="baguarun",
        description="Starts the ranks of a job on several hosts, by ssh.",
        epilog="example: baguarun --host_list host0,host1 --nproc_per_node 8 train.py",
        allow_abbrev=False,
    )
    parser.add_version()

    def both(name: str) -> tuple[str, str]:
        return f"--{name.replace('_', '-')}", f"--{name}"

    parser.add_argument(*both("host_list"), metavar="HOST[:PORT],...", help="hosts (default: BAGUA_NODE_DOMAIN_NAMES)")
    parser.add_argument(*both("ssh_port"), type=int, metavar="PORT", help="ssh port (default: BAGUA_SSH_PORT, else 22)")
    parser.add_argument(*both("nproc_per_node"), required=True, metavar="N", help="number of ranks on each host")
    parser.add_argument(
        *both("master_port"), type=int, default=29500, metavar="PORT", help="port on the first host (default: 29500)"
    )
    parser.add_argument(
        "-x", action="append", default=[], metavar="NAME[=VALUE]", help="environment variable for every rank"
    )
    parser.add_argument("-m", "--module", action="store_true", help="the script is the name of a module")
    parser.add_argument(
        *both("no_python"), action="store_true", help="the script is an executable, not a Python program"
    )
    parser.add_argument("script", help="the program that every rank runs")
    # argparse would name it among the arguments that are missing.
    parser.add_argument("args", nargs=argparse.REMAINDER, help="its arguments").required = False
    return parser


if __name__ == "__main__":
    sys.exit(main())
