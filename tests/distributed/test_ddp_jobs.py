"""Wrappers in jobs that torch.distributed began, that fail, and that lose a rank."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel as Torchs

import bagua.c10d  # noqa: F401  registers the backend
import bagua.torch_api as bagua_torch
from bagua.errors import PeerLostError
from bagua.torch_api.data_parallel import DistributedDataParallel
from tests.distributed.training_models import Net
from tests.waits import meet
from tests.world import make_world

pytestmark = pytest.mark.slow

ENVIRONMENT = {"BAGUA_TIMEOUT": "30"}


def trained_with_join(rank: int, prepare: Any = None) -> None:
    """By the wrapper on the world of torch.distributed, and by torch's on gloo beside it."""
    found = []
    for wrapper, group in ((DistributedDataParallel, None), (Torchs, dist.new_group(backend="gloo"))):
        torch.manual_seed(rank)
        model: Any = wrapper(Net(), process_group=group)
        if prepare is not None:
            prepare(model, group)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with model.join():
            for _ in range(2 + rank):
                optimizer.zero_grad()
                model(torch.randn(4, 8)).square().mean().backward()
                optimizer.step()
        found.append(dict(model.state_dict()))
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*(each.values() for each in found), strict=True))


def on_the_backend_bagua(rank: int) -> bool:
    torch.set_num_threads(1)
    dist.init_process_group("bagua")
    # Without init_process_group of bagua.
    trained_with_join(rank)
    trained_with_join(rank, lambda model, group: model.register_comm_hook(group, default_hooks.fp16_compress_hook))
    adopted = bagua_torch.is_initialized()
    bagua_torch.destroy_process_group()
    dist.destroy_process_group()
    return adopted


def test_a_wrapper_adopts_the_world_of_the_backend_bagua() -> None:
    assert make_world(2, env=ENVIRONMENT).run(on_the_backend_bagua) == [True, True]


def lose_rank_2(rank: int) -> list[Any]:
    torch.set_num_threads(1)
    bagua_torch.init_process_group()
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    model = DistributedDataParallel(net, optimizers=[optimizer], static_graph=True)
    model.register_comm_hook(None, default_hooks.allreduce_hook)
    algorithm, number = model.bagua_algorithm, 0
    while number < 4:
        if number == 2:
            meet("after two steps", rank, range(3))
        if (rank, number) == (2, 2):
            os.kill(os.getpid(), signal.SIGKILL)
        x = torch.full((1, 8), 1.0 + number + bagua_torch.get_rank())
        try:
            optimizer.zero_grad()
            model(x).sum().backward()
            # The hook's own communication may have ended without the lost rank's part.
            bagua_torch.barrier()
        except (PeerLostError, RuntimeError):
            number = bagua_torch.rebuild().steps[model.bagua_module_name]
            continue
        optimizer.step()
        number += 1
    assert type(model.bagua_algorithm) is type(algorithm)
    assert model.bagua_algorithm is not algorithm
    return [tensor.detach().tolist() for tensor in model.state_dict().values()]


def test_a_wrapper_goes_on_with_its_hook_after_the_loss_of_a_rank() -> None:
    found = make_world(3, env=ENVIRONMENT, expect_exit={2: -signal.SIGKILL}).run(lose_rank_2)
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for number, size in enumerate((3, 3, 2, 2)):
        optimizer.zero_grad()
        (sum(net(torch.full((1, 8), 1.0 + number + rank)).sum() for rank in range(size)) / size).backward()
        optimizer.step()
    assert found[0] == found[1]
    for expected, values in zip(net.state_dict().values(), found[0], strict=True):
        torch.testing.assert_close(torch.tensor(values), expected)
