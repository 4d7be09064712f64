"""The wrapper trains bit for bit as torch's DistributedDataParallel on gloo, with two ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

from tests.distributed.parity_ranks import Net, as_torch
from tests.distributed.torch_ranks import Case, check, run_cases


def sgd_and_adam_with_any_buckets(rank: int) -> None:
    as_torch(rank)
    as_torch(rank, optimizer=torch.optim.SGD, bucket_cap_mb=0.001)
    as_torch(rank, bucket_cap_mb=0.001, gradient_as_bucket_view=False)


def unused_parameters(rank: int) -> None:
    as_torch(rank, make=lambda: Net(branches=True), find_unused_parameters=True)


def no_sync_with_clipping(rank: int) -> None:
    def step(model: Any, optimizer: Any, loss: Any, number: int) -> None:
        if number % 2 == 0:
            with model.no_sync():
                loss().backward()
            return
        loss().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()

    as_torch(rank, step=step)


def join_with_uneven_inputs(rank: int) -> None:
    as_torch(rank, uneven={})
    as_torch(rank, uneven={"divide_by_initial_world_size": False})


def fp16_hook(rank: int) -> None:
    as_torch(rank, prepare=lambda model: model.register_comm_hook(None, default_hooks.fp16_compress_hook))


def power_sgd_hook(rank: int) -> None:
    def register(model: Any) -> None:
        state = powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2, min_compression_rate=0.5)
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)

    as_torch(rank, prepare=register, bucket_cap_mb=0.002)
    as_torch(rank, prepare=register)


CASES: list[Case] = [
    sgd_and_adam_with_any_buckets,
    unused_parameters,
    no_sync_with_clipping,
    join_with_uneven_inputs,
    fp16_hook,
    power_sgd_hook,
]


def on_two_ranks(rank: int) -> dict[str, str]:
    return run_cases(rank, CASES)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_the_wrapper_is_bitwise_torchs_on_gloo(case: Case) -> None:
    check(on_two_ranks, 2, case)
