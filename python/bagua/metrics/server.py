"""The HTTP server of a rank for `/metrics`, `/healthz` and `/readyz`."""

from __future__ import annotations

import socket
import socketserver
import threading
from collections.abc import Callable, Iterable
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from bagua.metrics import probes

__all__ = ["Server", "start", "why_not_local"]

_PROBES: dict[str, Callable[[], probes.Answer]] = {"/healthz": probes.alive, "/readyz": probes.ready}


class Server(socketserver.ThreadingMixIn, WSGIServer):
    """An HTTP server with one thread per connection, so that a slow probe does not delay other requests."""

    daemon_threads = True

    def server_bind(self) -> None:
        """Binds as `WSGIServer` does, but does not ask a name server for this host's name."""
        socketserver.TCPServer.server_bind(self)
        host, port, *_ = self.server_address
        self.server_name, self.server_port = str(host), int(port)
        self.setup_environ()


class _Silent(WSGIRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        """Does nothing."""

    def address_string(self) -> str:
        return str(self.client_address[0])


def why_not_local(addr: str) -> Exception | None:
    """Returns the error of listening at an address of this host, on any port; None if that works."""
    try:
        family = _family(addr, 0)
        with socket.create_server((addr, 0), family=family):
            return None
    except (OSError, UnicodeError) as error:
        return error


def _family(addr: str, port: int) -> socket.AddressFamily:
    return socket.getaddrinfo(addr, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]


def start(port: int, addr: str, metrics: Callable[..., Iterable[bytes]]) -> Server:
    """Starts a thread that serves the probes, and `metrics` (a WSGI application) at / and /metrics. Returns the server.

    Other paths get status 404, because a misspelt probe path would otherwise always succeed. Raises OSError if the
    address cannot be used, and OverflowError for an invalid port.
    """

    def answer(environ: dict[str, Any], begin: Callable[..., Any]) -> Iterable[bytes]:
        path = environ["PATH_INFO"]
        probe = _PROBES.get(path)
        if probe is None and path in ("", "/", "/metrics", "/metrics/"):
            return metrics(environ, begin)
        if probe is None:
            begin("404 Not Found", [("Content-Type", "text/plain; charset=utf-8")])
            return [f"not found; try /metrics, {' or '.join(_PROBES)}\n".encode()]
        found = probe()
        begin(
            "200 OK" if found.ok else "503 Service Unavailable",
            [("Content-Type", "text/plain; charset=utf-8"), ("Cache-Control", "no-store")],
        )
        return [f"{found.text}\n".encode()]

    class Family(Server):
        address_family = _family(addr, port)

    server = Family((addr, port), _Silent)
    server.set_app(answer)
    threading.Thread(target=server.serve_forever, name="bagua-metrics", daemon=True).start()
    return server
