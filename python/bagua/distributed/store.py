"""Serves the address book of elastic jobs: `python -m bagua.distributed.store --listen HOST:PORT`.

Only processes with the job's secret (BAGUA_JOB_SECRET) can read and write the book. Without a secret, every process
that can reach the server can read the token in the book, and join the job with it. Then listen only on an address that
no host outside the job can reach. BAGUA_TLS=1 encrypts the connections.
"""

from __future__ import annotations

import signal
import socket
import sys
from collections.abc import Sequence

from bagua import config, extension
from bagua.commands.parser import Parser
from bagua.distributed.signals import Signals
from bagua.errors import BaguaError

__all__ = ["main", "parse", "serve", "url"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Serves until a signal arrives. Returns the exit code: 0 after SIGTERM, 130 after Ctrl-C, 1 if it cannot listen.

    Exits with code 2 for bad arguments.
    """
    parser = Parser(
        prog="python -m bagua.distributed.store",
        description="Serves the address book of elastic jobs.",
        epilog="example: python -m bagua.distributed.store --listen 10.0.0.1:29400",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--listen",
        required=True,
        metavar="HOST:PORT",
        help="an address of this machine, with port 0 for any free port; without HOST every address",
    )
    parser.add_argument("--keep", metavar="FILE", help="file that keeps the entries across restarts of the store")
    given = parser.parse_args(arguments)
    try:
        host, port = parse(given.listen)
        chosen = config.settings()
    except ValueError as error:
        parser.error(str(error))
    with Signals(signal.SIGINT, signal.SIGTERM) as signals:
        try:
            server = serve(host, port, chosen, given.keep)
        except OSError as error:
            print(f"{parser.prog}: {error}", file=sys.stderr)
            return 1
        # Port 0 means that the kernel chose the port.
        print(url(host or socket.gethostname(), server.port), flush=True)
        arrived = signals.wait()
        server.stop()
    return 130 if arrived[0] is signal.SIGINT else 0


def serve(host: str, port: int, chosen: config.Settings, kept_in: str | None = None) -> extension.StoreServer:
    """Starts a server on threads of this process. Raises OSError if it cannot listen there or use the file."""
    try:
        return extension.StoreServer(host, port, chosen.secret, chosen.tls, kept_in)
    except BaguaError as error:
        cause = error.__cause__
        why = cause.strerror if isinstance(cause, OSError) and cause.strerror else error
        raise OSError(f"cannot listen on {host}:{port}: {why}") from error


def parse(address: str) -> tuple[str, int]:
    """Returns the host and port of HOST:PORT, [IPv6 address]:PORT or :PORT. Raises ValueError for anything else."""
    host, colon, port = address.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    if not colon or not (port.isascii() and port.isdigit()) or int(port) > 65535:
        raise ValueError(f"{address!r} is not HOST:PORT with a port from 0 to 65535")
    if ":" in host and not bracketed:
        raise ValueError(f"{address!r}: an IPv6 address is written in brackets, as in [::1]:29400")
    return host[1:-1] if bracketed else host, int(port)


def url(host: str, port: int) -> str:
    """Returns the book's URL, for BAGUA_ELASTIC."""
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


if __name__ == "__main__":
    sys.exit(main())
