"""`bagua top`: what the ranks that serve their metrics are doing, a row per rank and op."""

from __future__ import annotations

import argparse
import concurrent.futures
import http.client
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from bagua.commands import tables

__all__ = ["add", "read", "rows"]

# Seconds between two readings, and until an endpoint counts as one that does not answer.
_INTERVAL, _PATIENCE = 1.0, 3.0

_COLUMNS = ("endpoint", "rank", "group", "op", "calls", "payload", "sent", "received", "wait s", "reduce s")
_RATES = ("calls/s", "payload/s", "sent/s", "wait %")

# Samples of one group and op, in the order of the columns.
_SAMPLES = (
    "bagua_op_calls_total",
    "bagua_op_payload_bytes_total",
    "bagua_op_wire_bytes_sent_total",
    "bagua_op_wire_bytes_received_total",
    "bagua_op_wait_seconds_total",
    "bagua_op_reduce_seconds_total",
)


class Reading(NamedTuple):
    """What one endpoint said."""

    #: When, in seconds of time.monotonic.
    at: float
    rank: str
    #: (group, op) -> values in the order of `_SAMPLES`.
    ops: Mapping[tuple[str, str], Sequence[float]]
    #: Why there are none; "" where it answered.
    trouble: str


def add(commands: Any) -> None:
    """Adds the command to the command line."""
    parser = commands.add_parser(
        "top",
        help="what running ranks are doing",
        description="Shows the counters and rates of ranks that serve metrics (BAGUA_METRICS_PORT).",
    )
    parser.add_argument("--once", action="store_true", help="print one table, of two readings a second apart, and end")
    parser.add_argument("endpoints", nargs="+", metavar="HOST:PORT", help="where a rank serves its metrics")
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    tables.need_rich("bagua top")
    try:
        import prometheus_client.parser  # noqa: F401
    except ImportError as error:
        raise ImportError(f'bagua top needs prometheus_client: pip install "bagua[metrics]" ({error})') from None
    endpoints = options.endpoints
    for endpoint in endpoints:
        host, _, port = endpoint.rpartition(":")
        if not (host and port.isascii() and port.isdigit() and 0 < int(port) < 65536):
            raise ValueError(f"{endpoint!r} is not HOST:PORT")
    before = _read_all(endpoints)
    try:
        if options.once:
            time.sleep(_INTERVAL)
            tables.console().print(_table(endpoints, before, _read_all(endpoints)))
            return 0
        _watch(endpoints, before)
    except KeyboardInterrupt:
        pass
    return 0


def _watch(endpoints: Sequence[str], before: Sequence[Reading]) -> None:
    """Shows a new table every second until Ctrl-C."""
    from rich.live import Live

    with Live(_table(endpoints, before, before), console=tables.console(), auto_refresh=False) as live:
        while True:
            time.sleep(_INTERVAL)
            now = _read_all(endpoints)
            live.update(_table(endpoints, before, now), refresh=True)
            before = now


def _read_all(endpoints: Sequence[str]) -> list[Reading]:
    """Readings of all endpoints, taken at the same time."""
    with concurrent.futures.ThreadPoolExecutor(max_workers=min(64, len(endpoints))) as pool:
        return list(pool.map(read, endpoints))


def read(endpoint: str) -> Reading:
    """What one endpoint says; why it says nothing, if it does not."""
    from prometheus_client.parser import text_string_to_metric_families

    try:
        # No proxy: the ranks are in this network.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(f"http://{endpoint}/metrics", timeout=_PATIENCE) as answer:
            families = list(text_string_to_metric_families(answer.read().decode()))
    except (OSError, ValueError, http.client.HTTPException) as error:
        reason = error.reason if isinstance(error, urllib.error.URLError) else error
        return Reading(time.monotonic(), "", {}, f"does not answer: {reason}")
    rank: str | None = None
    ops: dict[tuple[str, str], list[float]] = {}
    for family in families:
        for sample in family.samples:
            if sample.name == "bagua_info":
                rank = sample.labels.get("rank", "")
            elif sample.name in _SAMPLES:
                key = sample.labels["group"], sample.labels["op"]
                ops.setdefault(key, [0.0] * len(_SAMPLES))[_SAMPLES.index(sample.name)] = sample.value
    if rank is None:
        return Reading(time.monotonic(), "", {}, "does not serve Bagua's metrics")
    return Reading(time.monotonic(), rank, ops, "")


def rows(endpoint: str, before: Reading, now: Reading) -> list[tuple[str, ...]]:
    """The rows of one endpoint: one per op, or one that says why there is none."""
    if now.trouble or not now.ops:
        return [(endpoint, now.rank, "", now.trouble or "no operation yet", *[""] * 10)]
    span = now.at - before.at
    found = []
    for (group, op), values in sorted(now.ops.items()):
        old = before.ops.get((group, op))
        # Counters that went back are those of another group with this name.
        known = span > 0 and not before.trouble and (old is None or old[0] <= values[0])
        rates = [(value - (old[i] if old else 0)) / span for i, value in enumerate(values)] if known else None
        found.append(
            (
                endpoint,
                now.rank,
                group,
                op,
                f"{values[0]:,.0f}",
                *(_bytes(value) for value in values[1:4]),
                *(f"{value:,.3f}" for value in values[4:]),
                *(
                    ("", "", "", "")
                    if rates is None
                    else (f"{rates[0]:,.1f}", _bytes(rates[1]), _bytes(rates[2]), f"{100 * rates[4]:.1f}")
                ),
            )
        )
    return found


def _bytes(value: float) -> str:
    """A number of bytes with a decimal unit."""
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:,.1f} TB"


def _table(endpoints: Sequence[str], before: Sequence[Reading], now: Sequence[Reading]) -> Any:
    found = [row for each in zip(endpoints, before, now, strict=True) for row in rows(*each)]
    return tables.table((*_COLUMNS, *_RATES), found, left=4)
