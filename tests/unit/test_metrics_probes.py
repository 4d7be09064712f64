"""`/healthz` and `/readyz`, as a supervisor asks them over HTTP."""

from __future__ import annotations

import itertools
import os
import signal
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import bagua
from bagua import metrics
from bagua.metrics import probes
from bagua.process_state import process
from tests.unit.test_metrics import needs_client
from tests.waits import meet, until
from tests.world import World, free_port

pytestmark = needs_client


def ask(port: int, path: str, host: str = "127.0.0.1") -> tuple[int, str]:
    """Status and text."""
    try:
        with urllib.request.urlopen(f"http://{host}:{port}{path}", timeout=30) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def is_asked_all_along(rank: int) -> list[tuple[int, str]]:
    port = metrics.serve()
    found = [ask(port, "/readyz"), ask(port, "/healthz")]
    bagua.init()
    found += [ask(port, "/readyz"), ask(port, "/healthz")]
    assert b"bagua_group_size" in urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30).read()
    # The control threads end with the group; no rank leaves before both have asked.
    bagua.barrier()
    bagua.shutdown()
    return [*found, ask(port, "/readyz"), ask(port, "/healthz")]


def test_a_rank_is_ready_while_it_is_in_a_group_and_its_control_thread_is_looked_at() -> None:
    for rank, found in enumerate(World(2).run(is_asked_all_along)):
        statuses = [status for status, _ in found]
        assert statuses == [503, 200, 200, 200, 503, 200]
        texts = [text for _, text in found]
        assert texts[0] == texts[4] == "not joined: there is no default group now\n"
        assert texts[1] == texts[5]
        assert "no control thread was checked: no group has been joined" in texts[1]
        assert texts[2] == f"joined: rank {rank} of 2\n"
        assert texts[3].startswith("control thread runs: ")


def is_alone(rank: int) -> list[str]:
    port = metrics.serve()
    bagua.init()
    return [ask(port, path)[1] for path in ("/healthz", "/readyz")]


def test_a_world_of_one_has_no_control_thread_and_says_so() -> None:
    ((health, ready),) = World(1).run(is_alone)
    assert "no control thread was checked: a world of one rank has none" in health
    assert ready == "joined: rank 0 of 1\n"


def loses_its_peer(rank: int) -> tuple[tuple[int, str], tuple[int, str]] | None:
    bagua.init()
    x = np.ones(1, dtype=np.float32)
    bagua.all_reduce(x)
    meet("before it dies", rank, range(2))
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(bagua.PeerLostError):
        bagua.all_reduce(x)
    port = metrics.serve()
    return ask(port, "/readyz"), ask(port, "/healthz")


def test_a_rank_whose_group_has_failed_is_not_ready_and_says_why() -> None:
    found, _ = World(2, expect_exit={1: -signal.SIGKILL}).run(loses_its_peer)
    (ready, why), (health, what) = found
    assert ready == 503
    assert why.startswith("the group 'world' has failed: ")
    assert "rank 1" in why
    # The process itself works.
    assert health == 200
    assert what.startswith("control thread runs: ")


def by_neutral_api() -> None:
    bagua.init()


def by_torch_api() -> None:
    import bagua.torch_api

    bagua.torch_api.init_process_group()


def alone_in_a_pod() -> None:
    # LOCAL_WORLD_SIZE is 1.
    del os.environ["LOCAL_RANK"]
    bagua.init()


def waits_for_rank_1(rank: int, join: Callable[[], None], port: int) -> list[tuple[int, str]]:
    found = []
    if rank == 1:
        # Rank 0 cannot have joined, because this rank has not called it yet.
        until(lambda: is_open(port), "rank 0 serves no probes while it joins")
        found = [ask(port, "/healthz"), ask(port, "/readyz")]
    join()
    bagua.barrier()
    return found


def is_open(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port)).close()
    except ConnectionRefusedError:
        return False
    return True


@pytest.mark.parametrize("join", [by_neutral_api, alone_in_a_pod, pytest.param(by_torch_api, marks=pytest.mark.slow)])
def test_a_rank_that_waits_for_others_to_join_answers_already(join: Callable[[], None]) -> None:
    with free_port(count=2) as port:
        variables = {"BAGUA_METRICS_PORT": str(port)}
        world = World(
            2, env=variables, torch=join is by_torch_api, hosts=[[0], [1]] if join is alone_in_a_pod else None
        )
        _, found = world.run(waits_for_rank_1, join, port)
    (health, _), (ready, why) = found
    assert (health, ready) == (200, 503)
    assert why == "not joined: there is no default group now\n"


class Folder:
    """In place of /proc/self/task."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def write(self, thread: str, name: str, switches: int) -> None:
        (self.root / thread).mkdir(exist_ok=True)
        (self.root / thread / "comm").write_text(f"{name}\n")
        text = f"Name:\t{name}\nvoluntary_ctxt_switches:\t{switches}\nnonvoluntary_ctxt_switches:\t0\n"
        # Renamed, because a reader must not see an empty file.
        (self.root / thread / "new").write_text(text)
        (self.root / thread / "new").rename(self.root / thread / "status")


class OfTwo:
    size = 2
    name = "world"
    rank = 0

    class _communicator:
        @staticmethod
        def cause() -> None:
            """Raises nothing, as that of a group that has not failed."""


class Clock:
    """In place of the module `time`: the time passes while `sleep` is called, which also does `meanwhile`."""

    def __init__(self, meanwhile: Callable[[], None]) -> None:
        self.now, self.meanwhile = 0.0, meanwhile

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.meanwhile()


@pytest.fixture
def tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Folder:
    monkeypatch.setattr(probes, "_TASKS", tmp_path)
    monkeypatch.setattr(process, "default_group", OfTwo())
    return Folder(tmp_path)


def test_every_control_thread_has_to_run(tasks: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    tasks.write("7", "bagua-control", 5)
    tasks.write("9", "bagua-control", 5)
    counts = itertools.count(6)
    monkeypatch.setattr(probes, "time", Clock(lambda: tasks.write("7", "bagua-control", next(counts))))
    assert probes.alive(0.2) == (False, "control thread 9 did not run for 0.2 s")
    (tasks.root / "9" / "comm").write_text("another\n")
    assert probes.alive(30) == (True, "control thread runs: 7")


def test_a_probe_that_waits_holds_up_no_other(tasks: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    tasks.write("7", "bagua-control", 5)
    looked, answered = threading.Event(), threading.Event()

    def meanwhile() -> None:
        looked.set()
        assert answered.wait(30)

    monkeypatch.setattr(probes, "time", Clock(meanwhile))
    port = metrics.serve()
    try:
        slow: list[tuple[int, str]] = []
        thread = threading.Thread(target=lambda: slow.append(ask(port, "/healthz")))
        thread.start()
        assert looked.wait(30)
        assert ask(port, "/readyz") == (200, "joined: rank 0 of 2\n")
        assert slow == []
        answered.set()
        thread.join()
        assert slow == [(503, "control thread 7 did not run for 3.0 s\n")]
    finally:
        server = process.metrics_servers.pop()
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize("path", ["/ready", "/healthz/", "/live", "/metrics/readyz"])
def test_a_misspelt_path_is_no_answer(path: str) -> None:
    port = metrics.serve()
    try:
        assert ask(port, path) == (404, "not found; try /metrics, /healthz or /readyz\n")
        assert [ask(port, known)[0] for known in ("/", "/metrics", "/healthz")] == [200] * 3
    finally:
        server = process.metrics_servers.pop()
        server.shutdown()
        server.server_close()
