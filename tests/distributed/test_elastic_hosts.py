"""Two hosts of an elastic job that are cut off from each other both go on, and come together again."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.distributed.test_elastic import Job, Rank, set_all
from tests.distributed.test_network_namespaces import Hosts, hosts  # noqa: F401

pytestmark = pytest.mark.slow

PORT = 29741


def test_parts_that_are_cut_off_go_on_apart_and_meet_again(hosts: Hosts) -> None:  # noqa: F811
    book = f"tcp://{hosts.addresses[0]}:{PORT}"
    listen = [sys.executable, "-m", "bagua.distributed.store", "--listen", f"{hosts.addresses[0]}:{PORT}"]
    server = subprocess.Popen([*hosts.inside(0), *listen], stdout=subprocess.PIPE, text=True)
    job = Job(4, book)
    try:
        assert server.stdout is not None
        assert server.stdout.readline().strip() == book
        for rank in range(4):
            local = {"LOCAL_RANK": str(rank % 2), "LOCAL_WORLD_SIZE": "2"}
            job.ranks.append(Rank(rank, 4, book, hosts.namespace(rank // 2), **local))
        ranks = job.ranks
        assert [rank.answer() for rank in ranks] == [{"rank": r, "rejoined": False} for r in range(4)]
        for rank in ranks:
            rank.send("wrap 1 4")
        assert [rank.answer() for rank in ranks] == ["wrapped"] * 4
        for rank in ranks:
            rank.is_in([0, 1, 2, 3])
        # At the other end, so that the interface of the first host keeps its address, as when a cable is pulled.
        hosts.run("-n", hosts.names[1], "link", "set", hosts.links[1], "down")
        for rank in ranks:
            part = [0, 1] if rank.rank < 2 else [2, 3]
            assert sorted(rank.is_in(part)["lost"]) == [str(other) for other in range(4) if other not in part]
        set_all(ranks[:2], [0.0, 4.0])
        set_all(ranks[2:], [10.0, 20.0])
        for rank, value in zip(ranks, (2, 2, 15, 15), strict=True):
            rank.until(lambda state, value=value: state["weights"] == [value] * 4)
        hosts.run("-n", hosts.names[1], "link", "set", hosts.links[1], "up")
        for rank in ranks:
            assert rank.is_in([0, 1, 2, 3])["lost"] == {}
        # Their weights counted as they were, so the sum is kept.
        for rank in ranks:
            rank.until(lambda state: state["weights"] == pytest.approx([8.5] * 4, rel=1e-5))
        joined = [rank.ask("state")["joined"] for rank in ranks]
        assert joined[:2] == [0, 0]
        assert min(joined[2:]) >= 1
        for rank in ranks:
            assert rank.ask("train 0") == "trained"
    finally:
        job.end()
        server.kill()
        server.communicate()
