"""Ranks that join by a store of torch.distributed read one small thing in it, however many they are, and are not misled
by what an earlier group left there.

The ranks are threads of this process.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch._C._distributed_c10d import FileStore, HashStore, PrefixStore, Store, TCPStore

from bagua import extension, group, store_rendezvous
from bagua.errors import BaguaError, BaguaTimeoutError
from tests.waits import until

PATIENCE = 30.0


def serving() -> TCPStore:
    return TCPStore("127.0.0.1", 0, 1, True, timedelta(seconds=10), wait_for_workers=False)


def client(server: TCPStore) -> TCPStore:
    return TCPStore("127.0.0.1", server.port, 1, False, timedelta(seconds=10))


def clients(ranks: int) -> list[Store]:
    """A client of one server for each rank, as processes have. A client sends one request at a time."""
    server = serving()
    return [server, *(client(server) for _ in range(ranks - 1))]


def our_clients(ranks: int) -> list[Any]:
    """The same for a server of our own, which ends with the last client."""

    class Client:
        server = extension.StoreServer("127.0.0.1", 0, b"")

        def __init__(self) -> None:
            self._store = extension.Store.tcp("127.0.0.1", self.server.port, b"", PATIENCE)

        def __getattr__(self, name: str) -> Any:
            return getattr(self._store, name)

    return [Client() for _ in range(ranks)]


#: The store of each rank.
KINDS: dict[str, Callable[[Path, int], list[Any]]] = {
    "tcp": lambda _, ranks: clients(ranks),
    "file": lambda folder, ranks: [FileStore(str(folder / "store"), 1)] * ranks,
    "hash": lambda _, ranks: [HashStore()] * ranks,
    "our server": lambda _, ranks: our_clients(ranks),
    "our files": lambda folder, ranks: [extension.Store.files(folder)] * ranks,
}


def join(store: Any, rank: int, size: int, *, secret: bytes = b"", limit: float = PATIENCE) -> tuple[group.Group, int]:
    return store_rendezvous.join(
        store,
        rank,
        size,
        what="init",
        towards=None,
        local_rank=rank,
        local_world_size=size,
        secret=secret,
        timeout=limit,
    )


def begin(of: Callable[..., Any], *arguments: Any, **options: Any) -> Future[Any]:
    """Runs a rank on a thread of its own."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(of(*arguments, **options))
        except BaseException as failure:
            future.set_exception(failure)

    threading.Thread(target=run, daemon=True).start()
    return future


def joined(stores_of_ranks: list[Any]) -> list[tuple[group.Group, int]]:
    size = len(stores_of_ranks)
    ranks = [begin(join, store, rank, size) for rank, store in enumerate(stores_of_ranks)]
    return [rank.result(PATIENCE) for rank in ranks]


def work_and_leave(groups: list[group.Group]) -> None:
    def work(one: group.Group) -> None:
        assert one.all_gather(np.array([one.rank])).ravel().tolist() == list(range(len(groups)))
        one.leave()

    with ThreadPoolExecutor(len(groups)) as pool:
        list(pool.map(work, groups))


def announced(store: Any, host: str, port: int) -> None:
    """Writes to the store what a rank 0 would leave there."""
    store_rendezvous._Entries(store, "init", PATIENCE).announce(
        store_rendezvous._Server(host, port, f"token of {port}")
    )


def abandoned(store: Any) -> None:
    """A rank 0 came, said so, and died."""
    announced(store, *extension.RendezvousServer("127.0.0.1", 0).address())


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_join_by_any_store_and_again_and_again(kind: str, tmp_path: Path) -> None:
    stores = KINDS[kind](tmp_path, 3)
    if isinstance(stores[0], Store):
        stores = [PrefixStore("job", PrefixStore("try", store)) for store in stores]
    numbers = []
    for _ in range(3):
        found = joined(stores)
        assert len({number for _, number in found}) == 1
        numbers.append(found[0][1])
        work_and_leave([one for one, _ in found])
    assert len(set(numbers)) == 3


def test_an_entry_that_an_earlier_group_left_in_the_store_is_passed_over() -> None:
    store = HashStore()
    abandoned(store)
    abandoned(store)
    last = begin(join, store, 2, 3)
    first, second = begin(join, store, 0, 3), begin(join, store, 1, 3)
    found = [rank.result(PATIENCE) for rank in (first, second, last)]
    assert {number for _, number in found} == {3}
    work_and_leave([one for one, _ in found])


@pytest.mark.parametrize("before", [0, 1])
def test_a_first_rank_that_does_not_come_is_named(before: int) -> None:
    store = HashStore()
    for _ in range(before):
        abandoned(store)
    with pytest.raises(BaguaTimeoutError, match=r"init: timed out after 2\.0 s waiting for rank\(s\) 0") as caught:
        join(store, 1, 2, limit=2.0)
    assert (caught.value.missing, caught.value.noticed_by) == ((0,), 1)
    assert ("the rendezvous at 127.0.0.1:" in str(caught.value)) == bool(before)


def control_threads() -> set[str]:
    found = set()
    for task in Path("/proc/self/task").iterdir():
        # A thread may end meanwhile.
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            if (task / "comm").read_text().strip() == "bagua-control":
                found.add(task.name)
    return found


def test_a_join_that_failed_leaves_no_thread_although_its_error_is_kept() -> None:
    before = control_threads()
    with pytest.raises(BaguaTimeoutError) as caught:
        join(HashStore(), 0, 2, limit=0.3)
    # A thread that was joined is listed for a moment more.
    until(lambda: control_threads() <= before, f"no thread is left of: {caught.value}")


def test_a_rank_that_gave_up_joins_when_it_tries_again_with_the_others() -> None:
    store = HashStore()
    with pytest.raises(BaguaTimeoutError):
        join(store, 1, 2, limit=0.1)
    work_and_leave([one for one, _ in joined([store] * 2)])


def test_ranks_with_another_secret_do_not_join() -> None:
    store = HashStore()
    first = begin(join, store, 0, 2, secret=b"one", limit=3.0)
    with pytest.raises(BaguaError, match="wrong secret"):
        join(store, 1, 2, secret=b"another")
    with pytest.raises(BaguaTimeoutError, match="it does not have this rank's secret") as caught:
        first.result(PATIENCE)
    assert caught.value.missing == (1,)


def test_a_store_that_ended_is_named_at_once() -> None:
    server = serving()
    store = client(server)
    store.set("something", "is there")
    del server
    for rank in (0, 1):
        with pytest.raises(BaguaError, match="init: the store does not answer") as caught:
            join(store, rank, 2)
        assert not isinstance(caught.value, BaguaTimeoutError)


def test_a_rendezvous_can_be_served_once() -> None:
    server = extension.RendezvousServer("127.0.0.1", 0)
    assert server.serve(1, b"alone", b"", 1.0) == [b"alone"]
    with pytest.raises(BaguaError, match="served already"):
        server.serve(1, b"alone", b"", 1.0)
    with pytest.raises(ValueError, match="'localhost' is not an IP address"):
        extension.RendezvousServer("localhost", 0)
