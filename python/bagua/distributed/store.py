"""Serves the address book of elastic jobs: `python -m bagua.distributed.store --listen HOST:PORT`.

Only a process with the job's secret (BAGUA_JOB_SECRET) can read and write the book. Without a secret every process can
that reaches the server, and a token in the book admits to the job: then let it listen where only the job's hosts can
connect. With BAGUA_TLS=1 its connections are encrypted.
"""

from __future__ import annotations

import signal
import socket
import sys
from collections.abc import Sequence

from bagua import config, engine
from bagua.commands.parser import Parser
from bagua.distributed.signals import Signals
from bagua.errors import BaguaError

__all__ = ["main", "parse", "serve", "url"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Serves until SIGTERM (0) or Ctrl-C (130); 1 when it cannot listen, 2 for arguments that cannot be used."""
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
    parser.add_argument("--keep", metavar="FILE", help="a file that keeps the entries for a later start")
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
        # The port as the kernel chose it, if it was 0.
        print(url(host or socket.gethostname(), server.port), flush=True)
        arrived = signals.wait()
        server.stop()
    return 130 if arrived[0] is signal.SIGINT else 0


def serve(host: str, port: int, chosen: config.Settings, kept_in: str | None = None) -> engine.StoreServer:
    """Starts a server on threads of this process. Raises OSError if it cannot listen there or use the file."""
    try:
        return engine.StoreServer(host, port, chosen.secret, chosen.tls, kept_in)
    except BaguaError as error:
        cause = error.__cause__
        why = cause.strerror if isinstance(cause, OSError) and cause.strerror else error
        raise OSError(f"cannot listen on {host}:{port}: {why}") from error


def parse(address: str) -> tuple[str, int]:
    """Host and port of HOST:PORT, [IPv6 address]:PORT or :PORT. ValueError for anything else."""
    host, colon, port = address.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    if not colon or not (port.isascii() and port.isdigit()) or int(port) > 65535:
        raise ValueError(f"{address!r} is not HOST:PORT with a port from 0 to 65535")
    if ":" in host and not bracketed:
        raise ValueError(f"{address!r}: an IPv6 address is written in brackets, as in [::1]:29400")
    return host[1:-1] if bracketed else host, int(port)


def url(host: str, port: int) -> str:
    """The book's name for BAGUA_ELASTIC."""
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


if __name__ == "__main__":
    sys.exit(main())
