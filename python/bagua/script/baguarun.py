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
from typing import NamedTuple

from bagua import config
from bagua.commands.parser import Parser
from bagua.distributed import flags
from bagua.distributed.launch import END_WITH_STDIN
from bagua.distributed.signals import Signals

__all__ = ["hosts_of", "main", "parser"]

# Seconds in which the launchers may end by themselves. Those that need longer go on without a connection.
_GRACE = 3.0

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


_HOST = re.compile(r"(?P<user>[^@\s]+@)?(?:\[(?P<six>[^\]\s]+)\]|(?P<name>[^:\[\]\s]+))(?::(?P<port>[0-9]+))?")


class Host(NamedTuple):
    """Where ssh connects to."""

    #: Also user@host.
    name: str
    port: int

    def address(self) -> str:
        """The name without a user."""
        return self.name.rpartition("@")[2]


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
    if said := flags.warning(options):
        print(f"baguarun: {said}", file=sys.stderr)
    commands = [_command(options, hosts, node_rank, carried) for node_rank in range(len(hosts))]
    with Signals(signal.SIGCHLD, *_ENDING) as signals:
        return _run(hosts, commands, signals)


def _run(hosts: Sequence[Host], commands: Sequence[str], signals: Signals) -> int:
    """Starts the command of each host, and waits for all of them or the first that fails."""
    connections: list[subprocess.Popen[bytes]] = []
    try:
        for host, command in zip(hosts, commands, strict=True):
            # In this process group, so that ssh may ask for a password.
            connections.append(
                subprocess.Popen(["ssh", "-p", str(host.port), host.name, command], stdin=subprocess.PIPE)
            )
        while True:
            codes = [connection.poll() for connection in connections]
            for host, code in zip(hosts, codes, strict=True):
                if code not in (None, 0):
                    print(f"baguarun: {host.name} ended with exit code {code}: the job ends", file=sys.stderr)
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


def _command(options: argparse.Namespace, hosts: Sequence[Host], node_rank: int, carried: dict[str, str]) -> str:
    """What the shell of one host runs."""
    launch = [sys.executable, "-m", "bagua.distributed.launch", END_WITH_STDIN]
    launch += ["--nnodes", str(len(hosts)), "--node_rank", str(node_rank)]
    launch += ["--nproc_per_node", str(options.nproc_per_node)]
    launch += ["--master_addr", hosts[0].address(), "--master_port", str(options.master_port)]
    for alone in ("module", "no_python", "set_additional_flag"):
        if getattr(options, alone):
            launch.append(f"--{alone}")
    if options.logdir is not None:
        launch += ["--logdir", options.logdir]
    launch += [options.script, *options.args]
    # The shell replaces itself, so that what ends the connection ends the launcher.
    steps = [f"cd {shlex.quote(os.getcwd())}"]
    variables = flags.variables(argparse.Namespace(**vars(options), master_addr=hosts[0].address())) | carried
    steps += [f"export {name}={shlex.quote(value)}" for name, value in variables.items()]
    return " && ".join([*steps, f"exec {shlex.join(launch)}"])


def hosts_of(text: str, port: int) -> list[Host]:
    """The hosts of "host0,user@host1:2222,[::1]:22"; `port` where a name has none. ValueError names a bad one."""
    found = []
    for part in (part.strip() for part in text.split(",")):
        match = _HOST.fullmatch(part)
        if match is None or part.startswith("-"):
            raise ValueError(f"--host_list: {part!r} is not HOST or HOST:PORT" if text else "--host_list is missing")
        own = port if match["port"] is None else int(match["port"])
        if not 1 <= own <= 65535:
            raise ValueError(f"the ssh port of {part!r} is {own}; it must be from 1 to 65535")
        found.append(Host((match["user"] or "") + (match["six"] or match["name"]), own))
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
    both = flags.both
    parser.add_argument(*both("host_list"), metavar="HOST[:PORT],...", help="or the variable BAGUA_NODE_DOMAIN_NAMES")
    parser.add_argument(*both("ssh_port"), type=int, metavar="PORT", help="or the variable BAGUA_SSH_PORT (22)")
    parser.add_argument(*both("nproc_per_node"), required=True, metavar="N", help="ranks on each host")
    parser.add_argument(*both("master_port"), type=int, default=29500, metavar="PORT", help="on the first host (29500)")
    parser.add_argument("-x", action="append", default=[], metavar="NAME[=VALUE]", help="a variable for every rank")
    parser.add_argument("-m", "--module", action="store_true", help="the script is the name of a module")
    parser.add_argument(*both("no_python"), action="store_true", help="the script is a program of its own")
    parser.add_argument(*both("set_additional_flag"), action="store_true", help="append --local_rank=N")
    parser.add_argument("--logdir", help="directory for the output of the ranks, on each host")
    flags.add(parser)
    parser.add_argument("script", help="the program that every rank runs")
    # argparse would name it among the arguments that are missing.
    parser.add_argument("args", nargs=argparse.REMAINDER, help="its arguments").required = False
    return parser


if __name__ == "__main__":
    sys.exit(main())
