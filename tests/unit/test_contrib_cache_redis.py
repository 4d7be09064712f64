"""The cache on real Redis servers: one or several; and servers that die, hang or are strangers."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: make setup")
redis = pytest.importorskip("redis", reason="the package redis is not installed: make setup")
pytest.importorskip("msgpack", reason="msgpack is not installed: make setup")
pytest.importorskip("xxhash", reason="xxhash is not installed: make setup")

import shutil  # noqa: E402

from redis.backoff import NoBackoff  # noqa: E402
from redis.retry import Retry  # noqa: E402
from torch.utils.data import DataLoader, Dataset  # noqa: E402

from bagua.torch_api.contrib import CachedDataset, CacheLoader  # noqa: E402
from bagua.torch_api.contrib.utils.redis_server import RedisServer  # noqa: E402
from bagua.torch_api.contrib.utils.redis_store import RedisStore, start_redis_server_cli  # noqa: E402
from tests.processes import is_running  # noqa: E402
from tests.world import free_port  # noqa: E402

pytestmark = [
    pytest.mark.skipif(
        shutil.which("redis-server") is None, reason="redis-server is not installed: tools/system_packages test"
    ),
    # DataLoader forks its workers although pytest-timeout has a thread.
    pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning"),
]

MIB = 1 << 20


@pytest.fixture
def servers() -> Iterator[Callable[..., list[RedisServer]]]:
    """`servers(n)` starts that many; all are ended after the test."""
    started: list[RedisServer] = []

    def start(count: int = 1, capacity: int = 64 * MIB, **options: Any) -> list[RedisServer]:
        new = [RedisServer("127.0.0.1", capacity, **options) for _ in range(count)]
        started.extend(new)
        return new

    yield start
    for server in started:
        server.stop()


def hosts(servers: list[RedisServer]) -> list[dict[str, Any]]:
    return [
        {"host": server.host, "port": str(server.port), **({"password": server.password} if server.password else {})}
        for server in servers
    ]


def gone(pid: int, within: float = 20.0) -> bool:
    """True when the process is no more, or is dead and waits to be collected, within so many seconds."""
    deadline = time.monotonic() + within
    while is_running(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not is_running(pid)


class Numbers(Dataset):  # type: ignore[type-arg]
    """Index i is an array of i, its number, and a name."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        if index >= self.length:
            raise IndexError(index)
        return np.full(5, index), index, f"number {index}"


def correct(sample: Any, index: int) -> bool:
    return type(sample) is tuple and sample[0].tolist() == [index] * 5 and sample[1:] == (index, f"number {index}")


# --- stores ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 3])
def test_a_store_gives_back_what_it_was_given(servers: Callable[..., Any], count: int) -> None:
    running = servers(count, password="secret")
    store = RedisStore(hosts(running))
    store.set("a", b"1")
    store.mset({"b": "two", "c": b"\x00\xff"})
    store.mset({f"n{number}": str(number) for number in range(50)})
    assert store.get("a") == b"1"
    assert store.get("absent") is None
    assert store.mget(["c", "absent", "b", "a"]) == [b"\x00\xff", None, b"two", b"1"]
    assert store.mget([f"n{number}" for number in range(50)]) == [str(number).encode() for number in range(50)]
    assert store.num_keys() == 53
    assert store.status()
    parts = [part.num_keys() for part in store.stores]
    assert sum(parts) == 53
    assert all(parts)
    store.clear()
    assert store.num_keys() == 0
    store.shutdown()
    running[-1].stop()
    assert not RedisStore(hosts(running), timeout=2.0).status() if count > 1 else True


# --- the round trip --------------------------------------------------------------------------------------------------


def test_a_full_server_costs_only_computing(servers: Callable[..., Any]) -> None:
    cached = CachedDataset(Large(), "redis", "d", hosts=hosts(servers(capacity=4 * MIB)))
    for _ in range(2):
        assert all(sample[0] == index for index, sample in enumerate(cached))  # type: ignore[arg-type]
    assert 0 < cached.cache_loader.num_keys() < 100


class Large(Dataset):  # type: ignore[type-arg]
    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> Any:
        if index >= 100:
            raise IndexError(index)
        return np.full(10_000, index)


# --- servers that fail -----------------------------------------------------------------------------------------------


@pytest.fixture
def warned(tmp_path: Path) -> Iterator[Callable[[], list[str]]]:
    """Lines that this process and its DataLoader workers logged as warnings: forked ones write into the same file."""
    path = tmp_path / "warnings"
    handler = logging.FileHandler(path)
    logger = logging.getLogger("bagua")
    logger.addHandler(handler)
    yield lambda: path.read_text().splitlines()
    logger.removeHandler(handler)
    handler.close()


@pytest.mark.parametrize("workers", [0, 2])
def test_a_server_killed_in_mid_epoch_costs_no_sample_and_one_warning_per_process(
    servers: Callable[..., Any], warned: Callable[[], list[str]], workers: int
) -> None:
    running = servers(3, password="secret")
    cached = CachedDataset(Numbers(300), "redis", "d", hosts=hosts(running), timeout=30.0)
    assert all(correct(sample, index) for index, sample in enumerate(cached.__getitems__(range(300))))
    other = CachedDataset(Numbers(300), "redis", "other", hosts=hosts(running), timeout=30.0)
    batches = DataLoader(cached, batch_size=10, num_workers=workers, collate_fn=list)
    seen = 0
    for number, batch in enumerate(batches):
        if number == 5:
            os.kill(running[1].pid, signal.SIGKILL)
        assert all(correct(sample, seen + place) for place, sample in enumerate(batch))
        seen += len(batch)
    assert seen == 300
    # Another loader loses the same server, and so do the workers of another epoch.
    assert all(correct(sample, index) for index, sample in enumerate(other.__getitems__(range(300))))
    assert sum(map(len, batches)) == 300
    # Each process warns once: this one, and with workers those of two epochs.
    lines = warned()
    assert 1 <= len(lines) <= 1 + 2 * workers
    assert all(f"127.0.0.1:{running[1].port} is lost" in line for line in lines)
    cached.cache_loader.close()
    other.cache_loader.close()


def test_a_server_that_hangs_counts_as_lost_after_its_timeout(
    servers: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    (server,) = servers(1)
    loader = CacheLoader("redis", "d", hosts=hosts([server]), timeout=2.0)
    assert loader.get(0, lambda key: key) == 0
    os.kill(server.pid, signal.SIGSTOP)
    try:
        assert [loader.get(key, lambda key: key * 3) for key in range(50)] == [key * 3 for key in range(50)]
    finally:
        os.kill(server.pid, signal.SIGCONT)
    # Most of them did not wait for it, or the test would last as long as its timeout for each.
    assert len([message for message in caplog.messages if "is lost" in message]) == 1
    assert f"127.0.0.1:{server.port}" in caplog.text


def test_construction_says_which_servers_do_not_answer(servers: Callable[..., Any]) -> None:
    with socket.socket() as reserved:
        # Bound and not listening: refused, and no other process gets the port.
        reserved.bind(("127.0.0.1", 0))
        dead = {"host": "127.0.0.1", "port": reserved.getsockname()[1]}
        with pytest.raises(ConnectionError, match=str(dead["port"])):
            RedisStore([dead], timeout=0.3)
        # One of several is only lost.
        store = RedisStore([*hosts(servers(1)), dead], timeout=2.0)
        assert not store.status()
        store.mset({f"k{number}": b"x" for number in range(20)})
        assert 0 < store.num_keys() < 20


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ("must have a host and a port; got .*host", {"hosts": [{"host": "127.0.0.1"}]}),
        ("must have a host and a port; got .*port", {"hosts": [{"port": 1}]}),
        ("'x', not a number", {"hosts": [{"host": "127.0.0.1", "port": "x"}]}),
        ("hosts is empty", {"hosts": []}),
        ("timeout is 0", {"timeout": 0}),
    ],
)
def test_bad_arguments_are_refused_before_anything_is_started(text: str, arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=text):
        CacheLoader("redis", **arguments)


# --- servers of the job ----------------------------------------------------------------------------------------------


def test_hosts_none_starts_one_server_that_strangers_cannot_use() -> None:
    first = CacheLoader("redis", "one", capacity_per_node=32 * MIB)
    second = CacheLoader("redis", "two", capacity_per_node=32 * MIB)
    assert first.get("k", lambda key: 1) == 1
    assert second.get("k", lambda key: 2) == 2
    assert first.num_keys() == second.num_keys() == 2
    (node,) = first.store.stores  # type: ignore[attr-defined]
    address = {"host": node._options["host"], "port": node._options["port"]}
    assert address["host"] == "127.0.0.1"
    info = node.client().config_get("maxmemory*")
    assert info["maxmemory"] == str(32 * MIB)
    stranger = redis.Redis(**address, retry=Retry(NoBackoff(), 0))
    for act in (stranger.ping, lambda: stranger.get("one_k"), lambda: stranger.set("one_k", b"x"), stranger.flushall):
        with pytest.raises(redis.exceptions.AuthenticationError):
            act()
    stranger.close()
    with pytest.raises(ConnectionError, match="refuses the password"):
        RedisStore([{**address, "password": "guess"}])
    with pytest.raises(ConnectionError, match="refuses"):
        RedisStore([address])
    # The password is on no command line.
    (pid,) = pids_of_port(address["port"])
    assert node._options["password"].encode() not in Path(f"/proc/{pid}/cmdline").read_bytes()
    pickled = CacheLoader("redis", "three", allow_pickle=True, capacity_per_node=32 * MIB)
    assert pickled.get("k", lambda key: Path("/a")) == pickled.get("k", lambda key: None) == Path("/a")
    for loader in (first, second, pickled):
        loader.close()
    assert gone(pid)


def pids_of_port(port: int) -> list[int]:
    """redis-server shows its port in its title."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                title = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if b"redis-server" in title and f":{port}".encode() in title:
                found.append(int(entry.name))
    return found


def own_a_server(sender: Any, wait: Any, end: str) -> None:
    """A process that starts a server and ends as `end` says when it gets a message."""
    loader = CacheLoader("redis", "d", 100, capacity_per_node=32 * MIB)
    loader.get("k", lambda key: 1)
    (node,) = loader.store.stores  # type: ignore[attr-defined]
    outlives = os.fork() if end == "killed with a child" else 1
    if outlives == 0:
        # As DataLoader workers may: it must not keep the server. The test ends it.
        signal.pause()
    sender.send((node._options["port"], outlives))
    wait.recv()
    if end != "exit":
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("end", ["exit", "killed", "killed with a child"])
def test_the_jobs_server_ends_with_its_owner_however_that_ends(end: str) -> None:
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    wait, say = context.Pipe(duplex=False)
    owner = context.Process(target=own_a_server, args=(sender, wait, end))
    owner.start()
    child = 1
    try:
        assert receiver.poll(60)
        port, child = receiver.recv()
        (pid,) = pids_of_port(port)
        say.send("end")
        # Not join with a deadline: that waits for a pipe which the child holds.
        assert gone(owner.pid or 0)
        owner.join()
        assert owner.exitcode == (0 if end == "exit" else -signal.SIGKILL)
        assert gone(pid)
        assert child == 1 or not gone(child, within=0), "the child should have outlived its parent"
    finally:
        if child != 1:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        owner.kill()
        owner.join()


def test_the_command_of_the_original_starts_a_server_on_loopback() -> None:
    with free_port() as port:
        server = start_redis_server_cli(port, 10_000_000, "--maxclients", "17")
        try:
            store = RedisStore([{"host": "127.0.0.1", "port": port}])
            store.set("a", b"1")
            assert store.get("a") == b"1"
            assert store.stores[0].client().config_get("maxclients")["maxclients"] == "17"  # type: ignore[attr-defined]
            store.shutdown()
            # A server that was given, not started by the store, goes on.
            assert RedisStore([{"host": "127.0.0.1", "port": port}]).get("a") == b"1"
        finally:
            server.stop()
    with pytest.raises(ValueError, match="does not follow a setting"):
        start_redis_server_cli(port, 10_000_000, "17")
