"""`bagua top`: shows live metrics of ranks, one row per rank and op."""

from __future__ import annotations

import argparse
import concurrent.futures
import http.client
import re
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from bagua.commands import tables

__all__ = ["add", "read", "rows"]

# Seconds between two readings, and timeout of a reading.
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

_SAMPLE = re.compile(r"(?P<name>[a-zA-Z_:][\w:]*)(?:\{(?P<labels>.*)\})?\s+(?P<value>\S+)(?:\s+-?[0-9]+)?\s*")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_ESCAPED = re.compile(r"\\(.)")


class Reading(NamedTuple):
    """The metrics of one endpoint at one time."""

    #: Time of the reading, by time.monotonic.
    at: float
    rank: str
    #: (group, op) -> values in the order of `_SAMPLES`.
    ops: Mapping[tuple[str, str], Sequence[float]]
    #: The reason why the endpoint gave no metrics; "" if it did.
    trouble: str


def add(commands: Any) -> None:
    parser = commands.add_parser(
        "top",
        help="show live metrics of running ranks",
        description="Shows the counters and rates of ranks that serve metrics (BAGUA_METRICS_PORT). With --once the "
        "exit code is 1 when none answers.",
        epilog="example: bagua top host0:9400 host0:9401 host1:9400",
    )
    parser.add_argument(
        "--once", action="store_true", help="take two readings a second apart, print one table, and exit"
    )
    parser.add_argument("endpoints", nargs="+", metavar="HOST:PORT", help="address at which a rank serves its metrics")
    parser.set_defaults(run=_run_top)


def _run_top(options: argparse.Namespace) -> int:
    endpoints = options.endpoints
    for endpoint in endpoints:
        host, _, port = endpoint.rpartition(":")
        if not (host and port.isascii() and port.isdigit() and 0 < int(port) < 65536):
            raise ValueError(f"{endpoint!r} is not HOST:PORT")
    before = _read_all(endpoints)
    try:
        while True:
            time.sleep(_INTERVAL)
            now = _read_all(endpoints)
            # On a terminal, each table replaces the previous one.
            clear = "" if options.once or not sys.stdout.isatty() else "\x1b[H\x1b[J"
            if not tables.show(clear + _table(endpoints, before, now)) or options.once:
                return 1 if all(reading.trouble for reading in now) else 0
            before = now
    except KeyboardInterrupt:
        return 0


def _read_all(endpoints: Sequence[str]) -> list[Reading]:
    with concurrent.futures.ThreadPoolExecutor(max_workers=min(64, len(endpoints))) as pool:
        return list(pool.map(read, endpoints))


def read(endpoint: str) -> Reading:
    """Reads one endpoint. If that fails, the reading's `trouble` says why."""
    try:
        # Bypass proxies, because the ranks are in this network.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(f"http://{endpoint}/metrics", timeout=_PATIENCE) as answer:
            samples = list(_samples(answer.read().decode()))
    except (OSError, ValueError, http.client.HTTPException) as error:
        reason = error.reason if isinstance(error, urllib.error.URLError) else error
        return Reading(time.monotonic(), "", {}, f"does not answer: {reason}")
    rank: str | None = None
    ops: dict[tuple[str, str], list[float]] = {}
    for name, labels, value in samples:
        if name == "bagua_info":
            rank = labels.get("rank", "")
        elif name in _SAMPLES:
            key = labels["group"], labels["op"]
            ops.setdefault(key, [0.0] * len(_SAMPLES))[_SAMPLES.index(name)] = value
    if rank is None:
        return Reading(time.monotonic(), "", {}, "does not serve Bagua's metrics")
    return Reading(time.monotonic(), rank, ops, "")


def _samples(text: str) -> Iterator[tuple[str, dict[str, str], float]]:
    """Yields name, labels and value of each sample in Prometheus's text format. Raises ValueError for other text.

    Source: https://prometheus.io/docs/instrumenting/exposition_formats/
    """
    for line in text.splitlines():
        if not line.strip() or line.startswith("#"):
            continue
        sample = _SAMPLE.fullmatch(line)
        if sample is None:
            raise ValueError(f"{line[:40]!r} is not a sample of Prometheus")
        labels = {name: _ESCAPED.sub(_unescaped, value) for name, value in _LABEL.findall(sample["labels"] or "")}
        yield sample["name"], labels, float(sample["value"])


def _unescaped(escaped: re.Match[str]) -> str:
    return "\n" if escaped[1] == "n" else escaped[1]


def _rates(key: tuple[str, str], before: Reading, now: Reading) -> list[float] | None:
    """Returns the growth per second of each counter of a group and op; None if unknown."""
    span, old, values = now.at - before.at, before.ops.get(key), now.ops[key]
    # A counter that decreased belongs to a new group of the same name.
    if span <= 0 or before.trouble or (old is not None and old[0] > values[0]):
        return None
    return [(value - (old[i] if old else 0)) / span for i, value in enumerate(values)]


def rows(endpoint: str, before: Reading, now: Reading) -> list[tuple[str, ...]]:
    """Returns the rows of one endpoint: one per op, or a single row that says why there are none."""
    if now.trouble or not now.ops:
        return [(endpoint, now.rank, "", now.trouble or "no operation yet", *[""] * 10)]
    found = []
    for (group, op), values in sorted(now.ops.items()):
        rates = _rates((group, op), before, now)
        found.append(
            (
                endpoint,
                now.rank,
                group,
                op,
                f"{values[0]:,.0f}",
                *(tables.amount(value) for value in values[1:4]),
                *(f"{value:,.3f}" for value in values[4:]),
                *(
                    ("", "", "", "")
                    if rates is None
                    else (f"{rates[0]:,.1f}", tables.amount(rates[1]), tables.amount(rates[2]), f"{100 * rates[4]:.1f}")
                ),
            )
        )
    return found


def _table(endpoints: Sequence[str], before: Sequence[Reading], now: Sequence[Reading]) -> str:
    found = [row for each in zip(endpoints, before, now, strict=True) for row in rows(*each)]
    # A line longer than the terminal would wrap, and the table would not replace the previous one.
    return tables.table((*_COLUMNS, *_RATES), found, left=4, within=tables.width())
