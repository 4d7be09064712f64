"""A part of the matrix of `make chaos`: each fault, each kind of action and each transport at least once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

pytest.importorskip("torch", reason="torch is not installed: make setup")

from tests.chaos import network
from tests.chaos.cell import Cell, run
from tests.chaos.network import Network
from tests.chaos.rank import nothing, work
from tests.world import World

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
    Cell("reduce", "a corrupt byte, checksum changed too", 2, "tcp"),
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
