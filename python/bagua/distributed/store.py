"""Serves the address book of elastic jobs: `python -m bagua.distributed.store --listen HOST:PORT`.

The server is torch's TCPStore, which has no password: let it listen where only the job's hosts can connect, and set
BAGUA_JOB_SECRET, without which a token in the book admits to the job.
"""

from __future__ import annotations

import argparse
import errno
import signal
import socket
import sys
from collections.abc import Sequence
from typing import Any

from bagua.distributed.signals import Signals

__all__ = ["listen", "main", "parse", "serve", "url"]

# Connections that may wait to be accepted: the ranks of a job start at once.
_BACKLOG = 4096


def main(arguments: Sequence[str] | None = None) -> int:
    """Serves until SIGTERM (0) or Ctrl-C (130); 1 when it cannot listen, 2 for arguments that cannot be used."""
    parser = argparse.ArgumentParser(
        prog="python -m bagua.distributed.store",
        description="Serves the address book of elastic jobs.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--listen",
        required=True,
        metavar="HOST:PORT",
        help="an address of this machine, with port 0 for any free port; without HOST every address",
    )
    try:
        host, port = parse(parser.parse_args(arguments).listen)
    except ValueError as error:
        parser.error(str(error))
    with Signals(signal.SIGINT, signal.SIGTERM) as signals:
        try:
            listener = listen(host, port)
        except OSError as error:
            print(f"{parser.prog}: cannot listen on {host}:{port}: {error.strerror}", file=sys.stderr)
            return 1
        # The port as the kernel chose it, if it was 0.
        where = url(host or socket.gethostname(), listener.getsockname()[1])
        try:
            server = serve(listener)
        except ImportError as error:
            print(f'{parser.prog}: needs torch, pip install "bagua[torch]": {error}', file=sys.stderr)
            return 1
        # Who has ended it while torch was imported does not read any more.
        arrived = signals.wait(0)
        if not arrived:
            print(where, flush=True)
            arrived = signals.wait()
        # The server lives as long as this name.
        del server
    return 130 if arrived[0] is signal.SIGINT else 0


def parse(address: str) -> tuple[str, int]:
    """Host and port of HOST:PORT, [IPv6 address]:PORT or :PORT. ValueError for anything else."""
    host, colon, port = address.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    if not colon or not (port.isascii() and port.isdigit()) or int(port) > 65535:
        raise ValueError(f"{address!r} is not HOST:PORT with a port from 0 to 65535")
    if ":" in host and not bracketed:
        raise ValueError(f"{address!r}: an IPv6 address stands in brackets, as in [::1]:29400")
    return host[1:-1] if bracketed else host, int(port)


def url(host: str, port: int) -> str:
    """The book's name for BAGUA_ELASTIC."""
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens on that address only, or on all addresses for "". OSError says why it cannot."""
    if host:
        family, _, _, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server((str(where[0]), port), family=family, backlog=_BACKLOG)
    if socket.has_dualstack_ipv6():
        try:
            return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=_BACKLOG)
        except OSError as error:
            # IPv6 may be switched off for all interfaces although the kernel has it; any other reason holds for IPv4.
            if error.errno != errno.EADDRNOTAVAIL:
                raise
    return socket.create_server(("", port), backlog=_BACKLOG)


def serve(listener: socket.socket) -> Any:
    """A TCPStore that serves on the socket, which is its own from here on. It ends with the last reference to it."""
    import torch.distributed

    address, port = listener.getsockname()[:2]
    # The server connects to itself.
    own = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(address, address)
    return torch.distributed.TCPStore(  # type: ignore[attr-defined, unused-ignore]
        own, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
    )


if __name__ == "__main__":
    sys.exit(main())
