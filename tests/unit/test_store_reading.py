"""What ranks wrote into a store of torch.distributed is read with few requests, however many they are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from torch._C._distributed_c10d import FileStore, HashStore, PrefixStore, Store, TCPStore

from bagua.errors import BaguaTimeoutError
from bagua.starting import read_store

KINDS: dict[str, Callable[[Path], Store]] = {
    "tcp": lambda _: TCPStore("127.0.0.1", 0, 1, True, timedelta(seconds=10), wait_for_workers=False),
    "file": lambda folder: FileStore(str(folder / "store"), 1),
    "hash": lambda _: HashStore(),
}


class Counting:
    """A store that counts how often it is asked."""

    def __init__(self, store: Store) -> None:
        self.store, self.requests = store, Counter[str]()

    def __getattr__(self, name: str) -> Any:
        self.requests[name] += 1
        return getattr(self.store, name)


def read(store: Any, size: int, limit: float = 10) -> list[bytes]:
    everybody = range(size)
    return read_store(store, [f"r{n}" for n in everybody], everybody, noticed_by=1, limit=limit, what="init")


@pytest.mark.parametrize("kind", KINDS)
def test_any_store_gives_what_every_rank_wrote(kind: str, tmp_path: Path) -> None:
    store = PrefixStore("job", PrefixStore("try", KINDS[kind](tmp_path)))
    expected = [bytes([n, 0, 255]) for n in range(5)]
    for rank, address in enumerate(expected):
        store.set(f"r{rank}", address)  # type: ignore[arg-type, unused-ignore]
    assert read(store, 5) == expected


def test_a_tcp_store_is_asked_as_often_by_a_rank_of_many_as_by_one_of_few(tmp_path: Path) -> None:
    store = PrefixStore("job", KINDS["tcp"](tmp_path))
    for rank in range(100):
        store.set(f"r{rank}", "here")
    few, many = Counting(store), Counting(store)
    assert read(few, 2) == [b"here"] * 2
    assert read(many, 100) == [b"here"] * 100
    assert many.requests == few.requests


@pytest.mark.parametrize("missing", [(3,), (0, 7), tuple(range(9))])
def test_those_who_wrote_nothing_are_named(missing: tuple[int, ...]) -> None:
    store = HashStore()
    for rank in set(range(9)) - set(missing):
        store.set(f"r{rank}", "here")
    with pytest.raises(BaguaTimeoutError, match=f"init: no word from rank\\(s\\) {missing[0]}") as caught:
        read(store, 9, limit=0.05)
    assert (caught.value.missing, caught.value.noticed_by) == (missing, 1)


def test_one_missing_rank_of_many_is_found_with_few_requests() -> None:
    store = Counting(HashStore())
    for rank in range(999):
        store.store.set(f"r{rank}", "here")
    with pytest.raises(BaguaTimeoutError) as caught:
        read(store, 1000, limit=0.05)
    assert caught.value.missing == (999,)
    assert store.requests["check"] <= 25
