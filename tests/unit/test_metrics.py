"""The figures for Prometheus and a training loop, against `bagua.stats()`."""

from __future__ import annotations

import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import bagua
from bagua import config, metrics
from tests.world import World, free_port

ROOT = Path(__file__).resolve().parents[2]

# Some of the metrics, whose names jobs watch.
KEYS = {
    "bagua_op_calls_total": "calls",
    "bagua_op_payload_bytes_total": "payload_bytes",
    "bagua_op_wire_bytes_sent_total": "wire_bytes_sent",
    "bagua_op_wire_bytes_received_total": "wire_bytes_received",
    "bagua_op_wait_seconds_total": "wait_s",
    "bagua_op_reduce_seconds_total": "reduce_s",
    "bagua_op_encode_seconds_total": "encode_s",
    "bagua_op_zero_copy_total": "zero_copy",
    "bagua_op_hierarchical_total": "hierarchical",
    "bagua_op_nonfinite_records_total": "nonfinite_records",
}

needs_client = pytest.mark.skipif(
    subprocess.run([sys.executable, "-c", "import prometheus_client"], capture_output=True, check=False).returncode
    != 0,
    reason="prometheus_client is not installed: make setup",
)


def scrape(port: int) -> dict[str, dict[tuple[tuple[str, str], ...], float]]:
    """Name of a sample -> its labels -> value."""
    from prometheus_client.parser import text_string_to_metric_families

    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
        text = answer.read().decode()
    found: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, {})[tuple(sorted(sample.labels.items()))] = sample.value
    return found


def equals_stats(port: int) -> dict[str, Any]:
    """Asserts that the endpoint says what `bagua.stats()` says, which it returns."""
    shown, groups = scrape(port), bagua.stats()["groups"]
    ops = [values for counters in groups.values() for values in counters["ops"].values()]
    # None is missing.
    assert all(set(values) == set(KEYS.values()) for values in ops)
    assert {name for name in shown if name.startswith("bagua_op_") and name.endswith("_total")} == set(KEYS)
    for name, key in KEYS.items():
        assert shown[name] == {
            (("group", group), ("op", op)): values[key]
            for group, counters in groups.items()
            for op, values in counters["ops"].items()
        }
    assert shown["bagua_group_size"] == {(("group", name),): counters["size"] for name, counters in groups.items()}
    assert shown["bagua_connections_refused_total"] == {
        (("group", name),): counters["connections_refused"] for name, counters in groups.items()
    }
    # A control connection ends with the other rank, which may leave now.
    for name, counters in groups.items():
        assert shown["bagua_connections"][("group", name), ("kind", "data")] == counters["connections"]["data"]
        assert shown["bagua_connections"][("group", name), ("kind", "control")] in (0, 1)
    return dict(groups)


def works_and_is_watched(rank: int, port: int) -> list[str]:
    group = bagua.init()
    x = np.ones(100_000, dtype=np.float32)
    for _ in range(3):
        bagua.all_reduce(x)
    sub = group.new_group([0, 1])
    assert sub is not None
    sub.broadcast(x, 0)
    # The counters of no rank change until all have read.
    bagua.barrier()
    groups = equals_stats(port + rank)
    (about,) = scrape(port + rank)["bagua_info"]
    assert {("rank", str(rank)), ("world_size", "2"), ("version", bagua.__version__)} < set(about)
    assert groups["world"]["ops"]["all_reduce"]["wire_bytes_sent"] > 0
    bagua.shutdown()
    # A second group of the process is served by the same server.
    bagua.init()
    bagua.all_reduce(x)
    bagua.barrier()
    equals_stats(port + rank)
    bagua.shutdown()
    return sorted(groups)


@needs_client
def test_each_rank_serves_its_stats_from_init_on() -> None:
    with free_port(count=2) as port:
        variables = {"BAGUA_METRICS_PORT": str(port), "BAGUA_TRANSPORT": "tcp"}
        assert World(2, env=variables).run(works_and_is_watched, port) == [["world", "world/0,1"]] * 2


def inits_without_metrics(rank: int) -> float:
    x = np.ones(1, dtype=np.float32)
    bagua.init()
    bagua.all_reduce(x)
    bagua.shutdown()
    return float(x[0])


@needs_client
def test_a_port_that_is_taken_costs_the_metrics_and_not_the_job() -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        world = World(1, env={"BAGUA_METRICS_PORT": str(port)})
        assert world.run(inits_without_metrics) == [1.0]
    assert f"BAGUA_METRICS_PORT: no metrics at 127.0.0.1:{port}: " in world.output[0]


@needs_client
@pytest.mark.parametrize("address", ["no-such-host.invalid", "192.0.2.1", "a" * 64])
def test_an_address_that_is_not_this_hosts_costs_the_metrics_and_not_the_job(address: str) -> None:
    with free_port() as port:
        world = World(1, env={"BAGUA_METRICS_PORT": str(port), "BAGUA_METRICS_ADDR": address})
        assert world.run(inits_without_metrics) == [1.0]
    assert f"BAGUA_METRICS_ADDR: no metrics at {address}:{port}: " in world.output[0]


@pytest.mark.parametrize("port", ["0", "-1", "65536", "http"])
def test_a_port_that_cannot_be_one_is_refused_before_joining(port: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BAGUA_METRICS_PORT", port)
    with pytest.raises(ValueError, match="BAGUA_METRICS_PORT"):
        bagua.init(0, 1)
    assert bagua.group.default() is None


def test_the_address_of_the_metrics_is_loopback_unless_it_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BAGUA_METRICS_PORT", raising=False)
    assert config.metrics_address() is None
    monkeypatch.setenv("BAGUA_METRICS_PORT", "9400")
    assert config.metrics_address() == ("127.0.0.1", 9400)
    monkeypatch.setenv("BAGUA_METRICS_ADDR", "0.0.0.0")
    assert config.metrics_address() == ("0.0.0.0", 9400)


def test_without_the_client_an_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(ImportError, match=r'pip install "prometheus_client>=0\.20"'):
        metrics.serve()
    monkeypatch.setenv("BAGUA_METRICS_PORT", "9400")
    with pytest.raises(ImportError, match=r'pip install "prometheus_client>=0\.20"'):
        bagua.init(0, 1)
    assert bagua.group.default() is None
