"""`with bagua.init()` and `with bagua.torch_api.init_process_group()`: what the end of the block leaves behind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import bagua as neutral
import bagua.torch_api as bagua
from bagua.errors import PeerLostError, PeerRaisedError
from tests.distributed.torch_ranks import ENVIRONMENT
from tests.waits import for_ever
from tests.world import make_world

Step = Callable[[], object]


def of_arrays(group: neutral.Group) -> Step:
    x = np.ones(1000, np.float32)
    return lambda: group.all_reduce(x, "max")


def of_a_model(algorithm: str) -> Callable[[object], Step]:
    def begin(group: object) -> Step:
        model = torch.nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        bagua.with_bagua(model, [optimizer], algorithm)

        def step() -> None:
            optimizer.zero_grad()
            model(torch.ones(2, 3)).sum().backward()
            optimizer.step()

        return step

    return begin


#: How a job is joined, and what its ranks do together.
JOBS: dict[str, tuple[Callable[[], Any], Callable[[Any], Step]]] = {
    "arrays": (neutral.init, of_arrays),
    "gradients": (bagua.init_process_group, of_a_model("gradient_allreduce")),
    "weights": (bagua.init_process_group, of_a_model("decentralized")),
}


def nothing_is_left() -> bool:
    return neutral.group.default() is None and not neutral.stats()["groups"] and not dist.is_initialized()


def works_in_a_block(rank: int, job: str) -> bool:
    join, begin = JOBS[job]
    with join() as group:
        begin(group)()
    return nothing_is_left()


@pytest.mark.parametrize("job", JOBS)
def test_the_end_of_the_block_leaves_the_job(job: str) -> None:
    assert make_world(2, env=ENVIRONMENT, timeout=150.0).run(works_in_a_block, job) == [True, True]


def raises_in_a_block(rank: int, job: str) -> tuple[str, bool]:
    join, begin = JOBS[job]

    def work() -> None:
        with join() as group:
            step = begin(group)
            step()
            if rank == 1:
                raise ValueError("my bug")
            for_ever(step)

    with pytest.raises((ValueError, PeerRaisedError)) as caught:
        work()
    return str(caught.value), nothing_is_left()


@pytest.mark.parametrize("job", JOBS)
def test_a_rank_that_raises_in_its_block_ends_that_of_the_others(job: str) -> None:
    (text, left), own = make_world(2, env=ENVIRONMENT, timeout=150.0).run(raises_in_a_block, job)
    assert own == ("my bug", True)
    assert "rank 1" in text
    assert "ValueError: my bug" in text
    assert left


def shrinks_in_a_block(rank: int) -> bool:
    with neutral.init() as group:
        group.barrier()
        if rank == 1:
            return True
        with pytest.raises(PeerLostError):
            for_ever(group.barrier)
        assert group.shrink() is neutral.group.default()
    return nothing_is_left()


def test_the_block_of_a_group_also_leaves_the_group_that_it_was_shrunk_to() -> None:
    assert make_world(2).run(shrinks_in_a_block) == [True, True]
