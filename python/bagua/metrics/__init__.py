"""Exports the counters of `bagua.stats()` to Prometheus, and answers probes of a supervisor.

`serve()`, or BAGUA_METRICS_PORT, starts an HTTP server for Prometheus and the probes. It needs `prometheus_client`.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from bagua import config, extension, group
from bagua.metrics.server import start, why_not_local
from bagua.process_state import process

__all__ = ["begin", "serve"]

_log = logging.getLogger(__name__)


def serve(port: int = 0, addr: str = "127.0.0.1") -> int:
    """Starts threads that answer `GET /metrics`, `/healthz` and `/readyz` until the process ends. Returns the port.

    `port` 0 chooses a free port. `addr` is the address to listen on.

    `/metrics` has every counter of `stats()["groups"][group]["ops"][op]`, by group and op: `calls` as
    `bagua_op_calls_total`, `wait_s` as `bagua_op_wait_seconds_total`, and so on. By group, it has
    `bagua_connections_refused_total`, `bagua_connections` (by kind: "control" and "data") and `bagua_group_size`. It
    also has `bagua_info`. A group disappears when it is left.

    `/healthz` is always 200. An answer shows that the interpreter runs threads.

    `/readyz` is 200 while this process is a member of a default group (or of torch.distributed's world of the backend
    "bagua") that has not failed, and 503 otherwise. Both probes answer with one line of text.

    Every process that can connect can read the counters, the host, process and version in `bagua_info`, and the error
    of a failed group. Raises ImportError without prometheus_client, and OSError if the address cannot be used.
    """
    client = _client()
    registry = client.CollectorRegistry(auto_describe=False)
    registry.register(_Collector())
    server = start(port, addr, client.make_wsgi_app(registry))
    process.metrics_servers.append(server)
    return int(server.server_port)


def begin(local_rank: int | None) -> None:
    """Starts the server if BAGUA_METRICS_PORT is set and this process does not serve yet.

    Called before a group is joined, so that a supervisor can ask a rank that waits for others. If `local_rank` is None
    because it is not known yet, only checks the setting; the caller calls again after joining.

    Raises ValueError for an invalid port, and ImportError without prometheus_client. Only warns if the address cannot
    be used.
    """
    address = config.metrics_address()
    if address is None or process.metrics_servers:
        return
    _client()
    if local_rank is None:
        return
    host, port = address
    try:
        serve(port + local_rank, host)
    except (OSError, OverflowError, UnicodeError) as error:
        name = "BAGUA_METRICS_PORT" if why_not_local(host) is None else "BAGUA_METRICS_ADDR"
        _log.warning("%s: no metrics at %s:%d: %s", name, host, port + local_rank, error)


class _Collector:
    def collect(self) -> Iterator[Any]:
        from prometheus_client import core

        groups = group.stats()["groups"]
        families: dict[str, Any] = {}
        for group_name, counters in groups.items():
            for op, values in counters["ops"].items():
                for key, value in values.items():
                    if key not in families:
                        what = f"{key} in bagua.stats(), by group and kind of operation."
                        families[key] = core.CounterMetricFamily(_metric(key), what, labels=["group", "op"])
                    families[key].add_metric([group_name, op], value)
        yield from families.values()
        refused = core.CounterMetricFamily(
            "bagua_connections_refused", "Connections that failed the handshake.", labels=["group"]
        )
        size = core.GaugeMetricFamily("bagua_group_size", "Ranks of the group.", labels=["group"])
        open_now = core.GaugeMetricFamily("bagua_connections", "Open connections.", labels=["group", "kind"])
        for group_name, counters in groups.items():
            for kind in ("control", "data"):
                open_now.add_metric([group_name, kind], counters["connections"][kind])
            refused.add_metric([group_name], counters["connections_refused"])
            size.add_metric([group_name], counters["size"])
        yield refused
        yield open_now
        yield size
        # The world is the largest group.
        world: dict[str, Any] = max(groups.values(), key=lambda counters: int(counters["size"]), default={})
        about = {
            "version": extension.version(),
            "rank": str(world.get("rank", "")),
            "world_size": str(world.get("size", "")),
            "host": socket.gethostname(),
            "pid": str(os.getpid()),
        }
        yield core.InfoMetricFamily("bagua", "This rank.", value=about)


def _client() -> ModuleType:
    try:
        import prometheus_client
    except ImportError as error:
        install = 'pip install "prometheus_client>=0.20"'
        raise ImportError(f"bagua.metrics needs prometheus_client: {install} ({error})") from None
    return prometheus_client


def _metric(key: str) -> str:
    """Returns the metric name of a counter in `stats()`, without Prometheus's suffix `_total`."""
    return f"bagua_op_{key.removesuffix('_s')}_seconds" if key.endswith("_s") else f"bagua_op_{key}"
