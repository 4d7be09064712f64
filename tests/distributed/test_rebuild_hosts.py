"""Hosts that are cut off: of two the one with the lowest rank goes on, of four the others do until one is left."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.distributed.test_network_namespaces import DEADLINE_S, Hosts, built, hosts, next_line  # noqa: F401
from tests.distributed.test_rebuild import plain

pytestmark = pytest.mark.slow

RANK = "tests.distributed.rebuild_in_a_namespace"


class Switched(Hosts):
    """Four namespaces, each joined by a veth pair to a bridge in a fifth."""

    COUNT = 4

    def __init__(self, ip: str) -> None:
        super().__init__(ip)
        pid = os.getpid()
        self.names = tuple(f"bagua-{pid}-{host}" for host in (*range(self.COUNT), "switch"))
        self.links = tuple(f"bg{pid % 10**8}h{host}" for host in range(self.COUNT))
        self.ports = tuple(f"bg{pid % 10**8}p{host}" for host in range(self.COUNT))
        self.addresses = tuple(f"10.78.{pid % 250}.{host + 1}" for host in range(self.COUNT))

    def build(self) -> None:
        for name in self.names:
            self.run("netns", "add", name)
        switch = self.names[-1]
        self.run("-n", switch, "link", "add", "bridge", "type", "bridge")
        self.run("-n", switch, "link", "set", "bridge", "up")
        for name, link, port, address in zip(self.names, self.links, self.ports, self.addresses, strict=False):
            self.run("link", "add", link, "netns", name, "type", "veth", "peer", "name", port, "netns", switch)
            self.run("-n", switch, "link", "set", port, "master", "bridge")
            self.run("-n", switch, "link", "set", port, "up")
            self.run("-n", name, "addr", "add", f"{address}/24", "dev", link)
            self.run("-n", name, "link", "set", link, "up")
            self.run("-n", name, "link", "set", "lo", "up")

    def pull(self, host: int) -> None:
        """Cuts a host off, which keeps its address, as when a cable is pulled."""
        self.run("-n", self.names[-1], "link", "set", self.ports[host], "down")


@pytest.fixture
def switched() -> Iterator[Hosts]:
    yield from built(Switched)


def check_weights(words: dict[str, Any], optimizer: str) -> None:
    """As plain torch computes them with as many ranks in each step."""
    for ours, theirs in zip(words["params"], plain(optimizer, words["sizes"]), strict=True):
        torch.testing.assert_close(torch.tensor(ours), theirs, rtol=1e-3, atol=1e-4)


def test_after_a_cut_of_two_and_two_ranks_those_with_rank_0_go_on_and_the_others_are_refused(
    hosts: Hosts,  # noqa: F811
) -> None:
    for rank in range(4):
        hosts.fork(RANK, "momentum", "2", rank=rank, world=4, host=rank // 2)
    with hosts.killed_after(2 * DEADLINE_S):
        assert [next_line(process)["trains"] for process in hosts.ranks] == [4] * 4
        # At the other end, so that the interface of the first host keeps its address, as when a cable is pulled.
        hosts.run("-n", hosts.names[1], "link", "set", hosts.links[1], "down")
        assert [next_line(process)["trains"] for process in hosts.ranks[:2]] == [2] * 2
        first, second, *others = (next_line(process) for process in hosts.ranks)
        assert [process.wait() for process in hosts.ranks] == [0, 0, 0, 0]
    assert first["lost"][0] in (2, 3)
    assert first["names"] == second["names"] == [0, 1]
    assert (first["digest"], first["sizes"]) == (second["digest"], second["sizes"])
    check_weights(first, "momentum")
    for words in others:
        assert "quorum" in words["refused"], words
        assert "ranks 0, 1 may live on" in words["refused"]


@pytest.mark.parametrize("optimizer", ["momentum", "adam"])
def test_four_hosts_of_which_one_after_the_other_is_cut_off_go_on_until_one_is_left(
    switched: Switched, optimizer: str
) -> None:
    for rank in range(4):
        switched.fork(RANK, optimizer, "1", rank=rank, world=4, host=rank, per_host=1)
    refused = []
    with switched.killed_after(4 * DEADLINE_S):
        # First one in the middle, so that the ranks behind it get other numbers.
        for left, cut in (([0, 1, 2, 3], 1), ([0, 2, 3], 2), ([0, 3], 3), ([0], None)):
            words = [next_line(switched.ranks[rank]) for rank in left]
            assert words == [{"trains": len(left), "names": left, "digest": words[0]["digest"]}] * len(left)
            if cut is not None:
                switched.pull(cut)
                refused.append(next_line(switched.ranks[cut]))
        last = next_line(switched.ranks[0])
        assert [process.wait() for process in switched.ranks] == [0, 0, 0, 0]
    for each in refused:
        assert "quorum" in each["refused"], each
    assert last["sizes"] == sorted(last["sizes"], reverse=True)
    assert set(last["sizes"]) == {4, 3, 2, 1}
    check_weights(last, optimizer)
