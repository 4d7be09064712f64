"""`/healthz` and `/readyz`, as a supervisor asks them over HTTP."""

from __future__ import annotations

import os
import signal
import socket
import urllib.error
import urllib.request
from collections.abc import Callable

import numpy as np
import pytest

import bagua
from bagua import metrics
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
    bagua.shutdown()
    return [*found, ask(port, "/readyz"), ask(port, "/healthz")]


def test_a_rank_is_ready_while_it_is_in_a_group() -> None:
    for rank, found in enumerate(World(2).run(is_asked_all_along)):
        statuses = [status for status, _ in found]
        assert statuses == [503, 200, 200, 200, 503, 200]
        texts = [text for _, text in found]
        assert texts[0] == texts[4] == "not joined: there is no default group now\n"
        assert texts[1] == texts[3] == texts[5] == "this process answers\n"
        assert texts[2] == f"joined: rank {rank} of 2\n"


def loses_its_peer(rank: int) -> tuple[tuple[int, str], int] | None:
    bagua.init()
    x = np.ones(1, dtype=np.float32)
    bagua.all_reduce(x)
    meet("before it dies", rank, range(2))
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(bagua.PeerLostError):
        bagua.all_reduce(x)
    port = metrics.serve()
    return ask(port, "/readyz"), ask(port, "/healthz")[0]


def test_a_rank_whose_group_has_failed_is_not_ready_and_says_why() -> None:
    found, _ = World(2, expect_exit={1: -signal.SIGKILL}).run(loses_its_peer)
    (ready, why), health = found
    assert ready == 503
    assert why.startswith("the group 'world' has failed: ")
    assert "rank 1" in why
    # The process itself works.
    assert health == 200


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
