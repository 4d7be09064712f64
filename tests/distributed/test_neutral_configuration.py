"""Settings of the environment for traffic between hosts reach the group: streams per peer, algorithm."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import bagua


def between_hosts(rank: int, differing: str = "", values: Sequence[str] = ()) -> dict[str, int]:
    """An all_reduce of 4 MiB: what it sent, and how many TCP connections this rank has."""
    if differing:
        os.environ[differing] = values[rank]
    group = bagua.init(timeout=60)
    total = group.all_reduce(np.full(1 << 20, rank + 1, np.float32))
    assert (total == group.size * (group.size + 1) / 2).all()
    sent = bagua.stats()["groups"]["world"]["ops"]["all_reduce"]["wire_bytes_sent"]
    lines = [line.split() for line in Path("/proc/self/net/tcp").read_text().splitlines()[1:]]
    established = {inode for _, _, _, state, *_, inode in (line[:10] for line in lines) if state == "01"}
    links = [os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if fd_is_open(fd)]
    group.barrier()
    bagua.shutdown()
    return {"sent": sent, "connections": sum(link[8:-1] in established for link in links)}


def fd_is_open(fd: str) -> bool:
    """False for the descriptor that listing the folder needed."""
    return os.path.lexists(f"/proc/self/fd/{fd}")


def test_the_environment_says_how_many_streams_join_two_hosts(world: Callable[..., Any]) -> None:
    def connections(*values: str) -> list[int]:
        results = world(2, env={"BAGUA_TRANSPORT": "tcp"}).run(between_hosts, "BAGUA_STREAMS_PER_PEER", values)
        return [result["connections"] for result in results]

    one = connections("1", "1")
    assert connections("3", "3") == [count + 2 for count in one]
    # The smaller number counts.
    assert connections("3", "1") == one


def test_the_environment_forces_the_algorithm_between_hosts(world: Callable[..., Any]) -> None:
    sent = {}
    for algorithm in ("auto", "direct", "doubling"):
        results = world(4, env={"BAGUA_TRANSPORT": "tcp", "BAGUA_ALGORITHM": algorithm}).run(between_hosts)
        sent[algorithm] = results[0]["sent"] / (4 << 20)
    # Of four ranks: a share to and from each of three, against everything in each of two rounds.
    assert sent["direct"] == pytest.approx(1.5, rel=0.01)
    assert sent["auto"] == sent["direct"]
    assert sent["doubling"] == pytest.approx(2, rel=0.01)


def other_algorithms(rank: int) -> str:
    os.environ["BAGUA_ALGORITHM"] = ["ring", "direct"][rank]
    with pytest.raises(bagua.MismatchError) as refused:
        bagua.init(timeout=60)
    return str(refused.value)


def test_ranks_with_different_algorithms_refuse_to_join_and_name_both(world: Callable[..., Any]) -> None:
    for text in world(2).run(other_algorithms):
        assert "ring" in text
        assert "direct" in text
