"""The logger `bagua`: what it says of joining, when, and what BAGUA_LOG does."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import pytest
from torch._C._distributed_c10d import HashStore

from bagua import config, extension, log, store_rendezvous
from tests.waits import until
from tests.world import free_port

LIMIT = 60.0


def test_a_waiting_rank_warns_after_ten_seconds_and_then_less_and_less_often(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    waiting = log.Waiting(0, 6)
    heard = []
    for second in range(100):
        now = 1000.0 + second
        waiting([] if second == 20 else [3, 5])
        if caplog.messages:
            heard.append((second, caplog.messages[0]))
            caplog.clear()
    text = "rank 0 of 6 has waited {} s to join: waiting for ranks 3, 5"
    assert heard == [(second, text.format(second)) for second in (10, 21, 42, 84)]


Exchange = Callable[[int, Callable[[Sequence[int]], object]], object]


def by_tcp(port: int, rank: int, waiting: Callable[[Sequence[int]], object]) -> object:
    return extension.rendezvous_tcp("127.0.0.1", port, rank, 3, b"address", b"", LIMIT, waiting=waiting)


def by_file(path: Path, rank: int, waiting: Callable[[Sequence[int]], object]) -> object:
    return extension.rendezvous_file(path, rank, 3, b"address", LIMIT, waiting=waiting)


@pytest.mark.parametrize("how", ["tcp", "file"])
def test_rank_0_reports_who_is_missing_and_the_others_that_rank_0_is(how: str, tmp_path: Path) -> None:
    with free_port() as port:
        exchange: Exchange = partial(by_tcp, port) if how == "tcp" else partial(by_file, tmp_path / "ranks")
        heard: list[list[list[int]]] = [[], [], []]

        def begin(rank: int) -> threading.Thread:
            thread = threading.Thread(target=exchange, args=(rank, heard[rank].append), daemon=True)
            thread.start()
            return thread

        threads = [begin(2)]
        until(lambda: [0] in heard[2], "rank 2 waits for rank 0")
        threads.append(begin(0))
        until(lambda: [1] in heard[0], "rank 0 waits for rank 1")
        threads.append(begin(1))
        for thread in threads:
            thread.join(LIMIT)
    assert set(map(tuple, heard[2])) == {(0,)}


def test_ranks_that_join_by_a_store_warn_of_the_missing_ones(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(log, "PATIENCE", 0.0)
    caplog.set_level(logging.DEBUG, "bagua")
    store = HashStore()

    def join(rank: int) -> None:
        options = {"local_rank": rank, "local_world_size": 2, "secret": b"", "timeout": LIMIT}
        one, _ = store_rendezvous.join(store, rank, 2, what="init", towards=None, **options)  # type: ignore[arg-type]
        one.barrier()
        one.leave()

    def heard(text: str) -> bool:
        return any(text in message for message in caplog.messages)

    ranks = [threading.Thread(target=join, args=(rank,), daemon=True) for rank in range(2)]
    ranks[1].start()
    until(lambda: heard("rank 1 of 2 has waited 0 s to join: waiting for rank 0"), "rank 1 warns")
    ranks[0].start()
    for each in ranks:
        each.join(LIMIT)
    for rank in range(2):
        assert heard(f"rank {rank} of 2 joined group 'world' in ")
        assert heard(f"rank {rank} of 2: view 1, ranks by host [[0, 1]], transport to each rank [")
    assert heard(": address 127.0.0.1 (lo), transport shm to 1 rank, collective shm")


ALONE = """
import logging, sys
if sys.argv[1:]:
    logging.basicConfig(format="own %(message)s")
import bagua
bagua.init()
"""


@pytest.mark.parametrize(
    ("level", "options", "lines"),
    [
        ("INFO", (), 1),
        ("INFO", ("own",), 1),
        ("DEBUG", (), 2),
        ("WARNING", (), 0),
        ("", (), 0),
    ],
)
def test_bagua_log_sets_the_level_and_writes_to_stderr(level: str, options: Sequence[str], lines: int) -> None:
    command = [sys.executable, "-c", ALONE, *options]
    environment = config.environment({"BAGUA_LOG": level})
    found = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=LIMIT)
    written = found.stderr.splitlines()
    assert (len(written), found.stdout) == (lines, ""), found.stderr
    if lines:
        first = written[0]
        assert first.startswith("own rank 0") if options else " bagua INFO: rank 0" in first
        assert first.endswith("address 127.0.0.1 (lo), transport none, collective solo")
