"""Ranks share the cache servers that their job starts."""

from __future__ import annotations

import shutil
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: make setup")
for package in ("redis", "hiredis", "msgpack", "xxhash"):
    pytest.importorskip(package, reason=f"{package} is not installed: make setup")

import bagua.torch_api as bagua  # noqa: E402
from bagua.torch_api.contrib import CachedDataset, CacheLoader  # noqa: E402
from tests.world import make_world  # noqa: E402


class Squares(torch.utils.data.Dataset):  # type: ignore[type-arg, name-defined]
    """Counts how often a sample was computed here."""

    computed = 0

    def __len__(self) -> int:
        return 60

    def __getitem__(self, index: int) -> Any:
        self.computed += 1
        return torch.tensor([index, index * index]), f"sample {index}"


def share_servers(rank: int) -> tuple[int, int, str]:
    bagua.init_process_group()
    inner = Squares()
    cached = CachedDataset(inner, "redis", "d", capacity_per_node=1 << 25)
    for index in range(rank, 60, 3):
        cached[index]
    cached.cache_loader.flush()
    bagua.barrier()
    for index in range(60):
        numbers, name = cached[index]
        assert numbers.tolist() == [index, index * index]
        assert name == f"sample {index}"
    assert inner.computed == 20
    keys = cached.cache_loader.num_keys()
    # All have counted before one more key comes.
    bagua.barrier()
    servers = cached.cache_loader.store.stores  # type: ignore[attr-defined]
    names = " ".join(server.name for server in servers)
    # Values signed with the secret that only this job's ranks know.
    other = CacheLoader("redis", "pickles", allow_pickle=True)
    if rank == 0:
        other.get("k", lambda key: complex)
    bagua.barrier()
    assert other.get("k", lambda key: None) is complex
    bagua.barrier()
    bagua.destroy_process_group()
    return keys, len(servers), names


@pytest.mark.skipif(
    shutil.which("redis-server") is None, reason="redis-server is not installed: tools/system_packages test"
)
def test_each_host_starts_one_server_and_all_ranks_use_all_of_them() -> None:
    results = make_world(3, hosts=[[0, 1], [2]]).run(share_servers)
    keys, counts, names = zip(*results, strict=True)
    assert keys == (60, 60, 60)
    assert counts == (2, 2, 2)
    assert len(set(names)) == 1


def no_server(rank: int) -> str:
    bagua.init_process_group()
    shutil.which = lambda name: None  # type: ignore[assignment]
    with pytest.raises(RuntimeError) as raised:
        CacheLoader("redis")
    bagua.destroy_process_group()
    return str(raised.value)


def test_where_a_server_cannot_start_every_rank_gets_the_reason() -> None:
    texts = make_world(2).run(no_server)
    assert texts[0] == texts[1]
    assert "rank 0: redis-server was not found" in texts[0]
