"""The limit of file descriptors: a rank raises the soft limit to the hard one. An error names one that is too low."""

from __future__ import annotations

import contextlib
import os
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import bagua
from tests.waits import meet, until

World = Callable[..., Any]

RANKS = 24

#: Fewer than the control connections of `RANKS` ranks and what is open need.
FEW = 18

TCP = {"BAGUA_TRANSPORT": "tcp"}


def limits() -> tuple[int, int]:
    return resource.getrlimit(resource.RLIMIT_NOFILE)


def joins_with_a_low_soft_limit(rank: int) -> tuple[int, int]:
    hard = limits()[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))
    bagua.init(timeout=50).barrier()
    bagua.shutdown()
    assert limits()[1] == hard
    return limits()


def test_joining_raises_the_soft_limit_to_the_hard_limit(world: World) -> None:
    for soft, hard in world(2, env=TCP).run(joins_with_a_low_soft_limit):
        assert soft == hard


def joins_with_a_low_hard_limit(rank: int) -> str:
    # However long the processes took to start.
    meet("have started", rank, range(RANKS))
    resource.setrlimit(resource.RLIMIT_NOFILE, (FEW, FEW))
    with pytest.raises(bagua.BaguaError) as raised:
        bagua.init(timeout=50)
    # The process goes on: it can still build a group that the limit allows.
    alone = bagua.init(0, 1)
    alone.all_reduce(np.ones(3))
    bagua.shutdown()
    return str(raised.value)


@pytest.mark.slow
def test_a_hard_limit_that_is_too_low_is_an_error_on_every_rank_at_once(world: World) -> None:
    for rank, text in enumerate(world(RANKS, env=TCP).run(joins_with_a_low_hard_limit)):
        assert f"rank {rank} of {RANKS}" in text
        assert "file descriptors" in text
        assert f"may have {FEW}" in text
        assert "ulimit" in text


def allow(more: int) -> None:
    """Lets this process have so many more descriptors than are open."""
    allowed = len(os.listdir("/proc/self/fd")) - 1 + more
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, allowed))


def take_all_descriptors() -> list[int]:
    files = []
    with contextlib.suppress(OSError):
        while True:
            files.append(os.open(os.devnull, os.O_RDONLY))
    return files


def has_no_descriptor_when_its_peer_connects(rank: int, folder: str) -> tuple[float, float]:
    world = bagua.init(timeout=50)
    taken, x = Path(folder, "taken"), np.full(10, rank, np.float32)
    used = 0.0
    if rank == 1:
        until(taken.exists)
    else:
        allow(8)
        files = take_all_descriptors()
        # Needs no descriptor.
        taken.mkdir()
        before = time.process_time()
        time.sleep(1.0)
        used = time.process_time() - before
        for file in files:
            os.close(file)
    world.all_reduce(x, op="sum")
    bagua.shutdown()
    return used, float(x[0])


def test_a_rank_without_a_free_descriptor_does_not_spin_and_its_peer_connects_later(
    world: World, tmp_path: Path
) -> None:
    for used, total in world(2, env=TCP).run(has_no_descriptor_when_its_peer_connects, str(tmp_path)):
        assert used < 0.5
        assert total == 1.0
