"""Training beside a busy Python thread, which delays the moment at which a wait gets the GIL back."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch

import bagua.torch_api as bagua
from bagua.errors import PeerLostError
from tests.distributed.test_neutral_waits import busy_thread

World = Callable[..., Any]


def wrapped_model() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(3)
    # Running mean and variance are buffers: rank 0's are broadcast before each forward.
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model.with_bagua([optimizer], bagua.algorithms.GradientAllReduceAlgorithm())
    return model, optimizer


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.randn(6, 4)).sum().backward()
    optimizer.step()


def trains_until_a_peer_freezes(rank: int) -> str:
    torch.set_num_threads(1)
    bagua.init_process_group()
    model, optimizer = wrapped_model()
    pids = torch.zeros(2, dtype=torch.int64)
    bagua.allgather(torch.tensor([os.getpid()]), pids)
    text = ""
    with busy_thread():
        for step in range(100):
            if rank == 1 and step == 3:
                os.kill(os.getpid(), signal.SIGSTOP)
            try:
                train(model, optimizer)
            except PeerLostError as error:
                text = str(error)
                break
    os.kill(int(pids[1]), signal.SIGKILL)
    return text


@pytest.mark.slow
def test_a_peer_that_freezes_during_backward_is_a_lost_peer_beside_a_busy_thread(world: World) -> None:
    run = world(2, env={"BAGUA_HEARTBEAT_TIMEOUT": "1"}, expect_exit={1: -signal.SIGKILL})
    text, _ = run.run(trains_until_a_peer_freezes)
    assert "lost rank 1" in text
    assert "no heartbeat" in text
