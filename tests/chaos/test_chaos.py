"""A part of the matrix of `make chaos`: each fault, each kind of action and each transport at least once."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="torch is not installed: make setup")

# The ranks of a module that has torch are forks, as a network namespace needs.
import torch  # noqa: F401

import bagua
from bagua import torch_api
from tests.chaos import network
from tests.chaos.cell import Cell, run
from tests.chaos.network import Network
from tests.chaos.rank import nothing, work
from tests.waits import meet
from tests.world import World

pytestmark = pytest.mark.slow

CELLS = [
    Cell("all_reduce", "SIGKILL", 4, "shm"),
    Cell("all_to_all_v", "SIGSTOP, SIGCONT", 2, "shm"),
    Cell("broadcast", "a stream closed", 4, "shm"),
    Cell("training", "SIGKILL", 4, "hier"),
    Cell("new_group", "SIGSTOP, SIGCONT", 4, "tcp"),
    Cell("init", "SIGKILL", 4, "shm"),
    Cell("all_gather", "link down", 4, "hier"),
    Cell("reduce_scatter", "one-way loss", 4, "tcp"),
    Cell("exchange", "a stream closed", 2, "tcp"),
    Cell("gather", "a corrupt byte", 4, "tcp"),
    Cell("send and recv", "200 ms delay", 2, "tcp"),
    Cell("all_to_all", "slow line", 4, "tcp"),
    Cell("rebuild", "link down", 4, "tcp"),
    Cell("averaging", "SIGKILL", 4, "tcp"),
    Cell("join", "SIGKILL", 2, "shm"),
]


@pytest.fixture(scope="module", autouse=True)
def _torch_is_imported() -> None:
    """Before the time of the first cell begins."""
    World(2, timeout=250.0).run(nothing)


@pytest.fixture(scope="module")
def hosts() -> Iterator[Network]:
    if reason := network.why_not():
        pytest.skip(reason)
    made = Network(4)
    yield made
    made.close()


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_no_rank_hangs_or_names_a_healthy_rank_and_nothing_is_left(cell: Cell, request: pytest.FixtureRequest) -> None:
    row = run(cell, None if cell.transport == "shm" else request.getfixturevalue("hosts"), work)
    assert not row.wrong, "\n".join(row.wrong)
    assert not row.left


@pytest.mark.parametrize("action", ["reduce", "send and recv"])
def test_a_header_that_is_changed_on_the_line_is_noticed(action: str, hosts: Network) -> None:
    # It may be that of a packet that has come before: then the next try shows it.
    for _ in range(5):
        row = run(Cell(action, "a corrupt byte, checksum changed too", 2, "tcp"), hosts, work)
        assert not row.wrong, "\n".join(row.wrong)
        if row.kinds:
            return
    raise AssertionError("five times no rank noticed it")


def shrinks(rank: int, folder: str) -> str:
    """The class of the error of `Group.shrink` on this rank, "" for none."""
    group = bagua.init()
    group.barrier()
    return _outcome(lambda: bagua.Group.shrink(group, timeout=5.0), rank, folder)


def rebuilds(rank: int, folder: str) -> str:
    """The class of the error of `rebuild` on this rank, "" for none."""
    torch_api.init_process_group()
    torch_api.barrier()
    return _outcome(lambda: torch_api.rebuild(timeout=5.0), rank, folder)


def _outcome(act: Callable[[], object], rank: int, folder: str) -> str:
    Path(folder, f"ready{rank}").touch()
    while not Path(folder, "go").exists():
        time.sleep(0.005)
    outcome = ""
    try:
        act()
    except bagua.BaguaError as error:
        outcome = type(error).__name__
    # A rank that gives up later must not find that the others have left: it would rightly go on alone.
    meet("given up", rank, range(3))
    return outcome


@pytest.mark.parametrize("goes_on", [shrinks, rebuilds])
def test_no_rank_goes_on_in_a_smaller_group_whose_line_loses_full_packets(
    hosts: Network, tmp_path: Path, goes_on: Callable[[int, str], str]
) -> None:
    hosts.set({})
    env = {"MASTER_ADDR": hosts.addresses[0], "BAGUA_TIMEOUT": "60", "GLOO_SOCKET_IFNAME": "line"}
    world = World(3, env=env, hosts=[[0], [1], [2]], namespaces=hosts.namespaces[:3], timeout=150.0)
    with world.running(goes_on, str(tmp_path)) as started:
        until = time.monotonic() + 60
        while not all((tmp_path / f"ready{rank}").exists() for rank in range(3)):
            assert time.monotonic() < until, "the ranks never came to the group"
            time.sleep(0.005)
        # Hellos, addresses and barriers pass.
        hosts.set({(0, 1): {"longest": 800}})
        (tmp_path / "go").touch()
        outcomes = started.results()
    hosts.set({})
    assert all(outcomes), outcomes
