"""Cached values come back as they were, whoever reads them, and a cache that fails costs only speed."""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: make setup")
pytest.importorskip("msgpack", reason="msgpack is not installed: make setup")
pytest.importorskip("redis", reason="redis is not installed: make setup")
pytest.importorskip("xxhash", reason="xxhash is not installed: make setup")

from torch.utils.data import DataLoader, Dataset  # noqa: E402

from bagua.torch_api.contrib import CachedDataset, CacheLoader  # noqa: E402
from bagua.torch_api.contrib.utils.memory_store import MemoryStore  # noqa: E402
from bagua.torch_api.contrib.utils.redis_server import RedisServer  # noqa: E402
from bagua.torch_api.contrib.utils.store import ClusterStore, LossyStore  # noqa: E402
from tests.unit.cached_values import Point, same  # noqa: E402


class Squares(Dataset):  # type: ignore[type-arg]
    """Samples that count how often they were computed."""

    def __init__(self, length: int = 102) -> None:
        self.length = length
        self.computed: list[int] = []

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        if not 0 <= index < self.length:
            raise IndexError(index)
        self.computed.append(index)
        return torch.full((index % 7, 2), float(index)), {"square": index * index, "name": f"sample {index}"}


@pytest.fixture
def hosts() -> Iterator[list[dict[str, Any]]]:
    """A Redis server, for the tests in which several processes or loaders share a store."""
    server = RedisServer("127.0.0.1", 1 << 30)
    yield [{"host": server.host, "port": server.port}]
    server.stop()


@pytest.fixture(params=["memory", "redis"])
def options(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Arguments of a loader for each backend."""
    return {"backend": request.param} | (
        {"hosts": request.getfixturevalue("hosts")} if request.param == "redis" else {}
    )


# --- stores ----------------------------------------------------------------------------------------------------------


def test_a_full_memory_store_takes_no_new_values() -> None:
    store = MemoryStore(capacity=1000)
    for number in range(50):
        store.set(str(number), bytes(100))
    assert store.num_keys() == 10
    assert (store.get("9"), store.get("10")) == (bytes(100), None)
    store.set("9", b"smaller")
    store.set("new", bytes(93))
    assert (store.get("9"), store.get("new")) == (b"smaller", bytes(93))
    store.clear()
    store.set("large", bytes(1000))
    assert store.num_keys() == 1


def test_a_cluster_spreads_keys_by_xxh64_and_keeps_the_order() -> None:
    import xxhash

    parts = [MemoryStore() for _ in range(3)]
    cluster = ClusterStore(parts)
    names = [f"key {number}" for number in range(30)]
    cluster.mset({name: name.upper() for name in names})
    assert cluster.mget([*names[::-1], "absent"]) == [*(name.upper().encode() for name in names[::-1]), None]
    for name in names:
        assert parts[xxhash.xxh64(name.encode()).intdigest() % 3].get(name) == name.upper().encode()
    assert all(part.num_keys() for part in parts)
    assert cluster.num_keys() == 30
    cluster.clear()
    assert cluster.num_keys() == 0
    with pytest.raises(ValueError, match="at least one"):
        ClusterStore([])


_numbers = itertools.count()


class Failing(LossyStore):
    """A store whose server is away when `away` says so, on a clock that the test moves."""

    def __init__(self) -> None:
        self.now = 0.0
        # A name of its own: what has one name is warned of once.
        super().__init__(f"failing {next(_numbers)}", clock=lambda: self.now)
        self.inner = MemoryStore()
        self.away = False
        self.asked = 0

    def _ask(self) -> None:
        self.asked += 1
        if self.away:
            raise ConnectionError("no server there")

    def mset(self, dictionary: Any) -> None:
        self._attempt(lambda: (self._ask(), self.inner.mset(dictionary)), None)

    def mget(self, keys: Any) -> list[bytes | None]:
        return self._attempt(lambda: (self._ask(), self.inner.mget(keys))[1], [None] * len(keys))

    def num_keys(self) -> int:
        return self.inner.num_keys()

    def clear(self) -> None:
        self.inner.clear()


def test_a_lost_store_is_asked_again_ever_more_rarely_and_is_used_when_it_returns() -> None:
    store = Failing()
    store.set("a", b"1")
    store.away = True
    tries = []
    for second in range(200):
        store.now, before = float(second), store.asked
        assert store.get("a") is None
        if store.asked > before:
            tries.append(second)
    assert tries == [0, 1, 3, 7, 15, 31, 63, 123, 183]
    assert store.lost
    store.away, store.now = False, 300.0
    assert store.get("a") == b"1"
    assert not store.lost


def test_a_lost_store_costs_no_sample_and_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    loader = CacheLoader("memory", "d")
    loader.store = store = Failing()
    with caplog.at_level(logging.WARNING):
        for epoch in range(3):
            store.away = epoch > 0
            assert [loader.get(key, lambda key: key * 2) for key in range(20)] == [key * 2 for key in range(20)]
    assert len(caplog.records) == 1
    assert f"{store.name} is lost" in caplog.text


# --- the loader ------------------------------------------------------------------------------------------------------


def test_a_value_is_computed_once(options: dict[str, Any]) -> None:
    loader = CacheLoader(dataset_name="d", **options)
    asked = []

    def load(key: str) -> Any:
        asked.append(key)
        return (key, torch.ones(2))

    for _ in range(3):
        for key in ("a", "b"):
            assert same(loader.get(key, load), (key, torch.ones(2)))
    assert asked == ["a", "b"]
    loader.close()


def test_buffered_values_are_read_and_written_at_the_limit(options: dict[str, Any]) -> None:
    loader = CacheLoader(dataset_name="d", writer_buffer_size=10, **options)
    for key in range(9):
        loader.get(key, lambda key: key)
    assert loader.store.num_keys() == 0
    assert loader.get(3, lambda key: -1) == 3
    assert loader.get_many([8, 0], lambda key: -1) == [8, 0]
    loader.get(9, lambda key: key)
    assert loader.store.num_keys() == 10
    loader.get(10, lambda key: key)
    assert loader.num_keys() == 11
    loader.close()


def test_many_keys_are_read_in_one_round_trip() -> None:
    loader = CacheLoader("memory", "d")
    loader.store = store = Failing()
    asked = []
    assert loader.get_many(list(range(50)), lambda key: asked.append(key) or key) == list(range(50))
    assert store.asked == 2  # one read, one write
    assert loader.get_many([*range(40, 60), 40], lambda key: asked.append(key) or key) == [*range(40, 60), 40]
    assert asked == list(range(60))
    assert store.asked == 4
    assert loader.get_many([], lambda key: key) == []


def test_what_the_load_function_raises_comes_through_and_is_not_cached(options: dict[str, Any]) -> None:
    loader = CacheLoader(dataset_name="d", **options)
    with pytest.raises(IndexError, match="beyond"):
        loader.get("k", lambda key: (_ for _ in ()).throw(IndexError("beyond")))
    with pytest.raises(TypeError, match="Point cannot be cached"):
        loader.get("k", lambda key: Point(1, 2))
    assert loader.get("k", lambda key: 5) == 5
    loader.close()


def test_pickles_need_a_secret_where_others_may_write(
    monkeypatch: pytest.MonkeyPatch, hosts: list[dict[str, Any]]
) -> None:
    monkeypatch.delenv("BAGUA_JOB_SECRET", raising=False)
    with pytest.raises(ValueError, match="BAGUA_JOB_SECRET"):
        CacheLoader("redis", "d", allow_pickle=True, hosts=hosts)
    monkeypatch.setenv("BAGUA_JOB_SECRET", "ours")
    loader = CacheLoader("redis", "d", allow_pickle=True, hosts=hosts)
    assert loader.get("k", lambda key: Point(1, 2)) == Point(1, 2)
    assert loader.get("k", lambda key: None) == Point(1, 2)
    loader.close()
    monkeypatch.setenv("BAGUA_JOB_SECRET", "theirs")
    loader = CacheLoader("redis", "d", allow_pickle=True, hosts=hosts)
    assert loader.get("k", lambda key: Point(3, 4)) == Point(3, 4)
    loader.close()


def test_bad_arguments_are_refused() -> None:
    for error, text, arguments in (
        (ValueError, "must be one of redis, memory; got 'disk'", {"backend": "disk"}),
        (ValueError, "writer_buffer_size is 0", {"backend": "memory", "writer_buffer_size": 0}),
        (ValueError, "capacity is 0", {"backend": "memory", "capacity_per_node": 0}),
        (TypeError, "does not know hosts", {"backend": "memory", "hosts": []}),
    ):
        with pytest.raises(error, match=text):
            CacheLoader(**arguments)


# --- processes -------------------------------------------------------------------------------------------------------


def in_a_fork(work: Any) -> int:
    """The exit code of a forked child that runs this and ends as a script does."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_fork_flushes_and_the_child_reads_what_the_parent_wrote(hosts: list[dict[str, Any]]) -> None:
    loader = CacheLoader("redis", "d", 100, hosts=hosts)
    loader.get("parent", lambda key: 1)

    def child() -> None:
        assert loader.get("parent", lambda key: 2) == 1
        loader.get("child", lambda key: 3)
        loader.flush()

    assert in_a_fork(child) == 0
    assert loader.get("child", lambda key: 4) == 3
    loader.close()


# --- the data set ----------------------------------------------------------------------------------------------------


def test_every_sample_is_the_data_sets_and_computed_once(options: dict[str, Any]) -> None:
    plain, inner = Squares(), Squares()
    cached = CachedDataset(inner, dataset_name="d", **options)
    assert len(cached) == 102
    for _ in range(2):
        seen = 0
        # As a sequence: until the data set raises IndexError.
        for index, sample in enumerate(cached):  # type: ignore[arg-type]
            assert same(sample, plain[index])
            seen += 1
        assert seen == 102
    assert inner.computed == list(range(102))
    assert cached.cache_loader.num_keys() == 102
    cached.cache_loader.close()


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fork", "spawn"])
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_data_loader_workers_fill_the_cache_and_flush_their_buffers(hosts: list[dict[str, Any]], method: str) -> None:
    cached = CachedDataset(Squares(), "redis", "d", 1000, hosts=hosts)
    workers = {"num_workers": 1 if method == "spawn" else 2, "multiprocessing_context": method}
    batches = DataLoader(cached, batch_size=8, collate_fn=squares_of, **workers)  # type: ignore[arg-type]
    assert [square for batch in batches for square in batch] == [index**2 for index in range(102)]
    assert cached.cache_loader.num_keys() == 102
    cached.cache_loader.close()


def squares_of(samples: list[Any]) -> list[int]:
    return [sample[1]["square"] for sample in samples]
