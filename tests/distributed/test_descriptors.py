"""The limit of file descriptors: a rank raises the soft limit to the hard one. An error names one that is too low."""

from __future__ import annotations

import resource
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import bagua
from tests.waits import meet

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
