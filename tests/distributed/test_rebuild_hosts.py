"""Of two hosts that are cut off from each other, the one with the lowest rank goes on."""

from __future__ import annotations

import threading
from pathlib import Path

import torch

from tests.distributed.rebuild_in_a_namespace import MORE_STEPS
from tests.distributed.test_network_namespaces import DEADLINE_S, Hosts, hosts, next_line  # noqa: F401
from tests.distributed.test_rebuild import plain

RANK = Path(__file__).with_name("rebuild_in_a_namespace.py")


def test_after_a_cut_of_two_and_two_ranks_those_with_rank_0_go_on_and_the_others_are_refused(
    hosts: Hosts,  # noqa: F811
) -> None:
    for rank in range(4):
        hosts.start(rank, 4, host=rank // 2, script=RANK)
    # A rank that hangs would block readline: the deadline ends the ranks, and readline with them.
    deadline = threading.Timer(2 * DEADLINE_S, lambda: [process.kill() for process in hosts.ranks])
    deadline.start()
    try:
        assert all(next_line(process)["trains"] for process in hosts.ranks)
        # At the other end, so that the interface of the first host keeps its address, as when a cable is pulled.
        hosts.run("-n", hosts.names[1], "link", "set", hosts.links[1], "down")
        ended = [next_line(process) for process in hosts.ranks]
        codes = [process.wait() for process in hosts.ranks]
    finally:
        deadline.cancel()
    assert codes == [0, 0, 0, 0]
    first, second, *others = ended
    assert first["lost"] in (2, 3)
    assert first["ranks"] == second["ranks"] == [0, 1]
    assert (first["digest"], first["done"]) == (second["digest"], second["done"])
    expected = plain("momentum", [4] * first["done"] + [2] * MORE_STEPS)
    for ours, theirs in zip(first["params"], expected, strict=True):
        torch.testing.assert_close(torch.tensor(ours), theirs, rtol=1e-3, atol=1e-4)
    for words in others:
        assert "quorum" in words["refused"], words
        assert "ranks 0, 1 may live on" in words["refused"]
