"""torch's FSDP2, pipelines, tensor parallelism and compiled programs on the backend "bagua": bit for bit as on gloo,
with two ranks.

Its DistributedDataParallel is a column of test_front_ends.py.
"""

import shutil
import tempfile
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from tests.distributed.c10d_ranks import Pair, cases_in, each_case, run_cases
from tests.distributed.left_out import needs_backend_class, needs_torch

try:
    from torch.distributed.fsdp import fully_shard
except ImportError:  # torch 2.5 has it under the name that it had as a prototype.
    from torch.distributed._composable.fsdp import fully_shard  # type: ignore[no-redef,assignment]

STEPS = 4


@needs_backend_class("its fully_shard is for CUDA alone, or averages by other means than on gloo")
def fully_sharded(pair: Pair) -> None:
    def weights(group: dist.ProcessGroup) -> list[torch.Tensor]:
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
        fully_shard(model, mesh=DeviceMesh.from_group(group, "cpu"))
        optimizer = torch.optim.Adam(model.parameters())
        for step in range(STEPS):
            model(torch.full((3, 8), 1.0 + step + pair.rank)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return [param.full_tensor().detach() for param in model.parameters()]

    for found, expected in zip(weights(pair.ours), weights(pair.gloo), strict=True):
        assert torch.equal(found, expected)


@needs_torch((2, 15), "its replicate takes other arguments")
def replicated(pair: Pair) -> None:
    from torch.distributed._composable.replicate_with_fsdp import replicate

    def weights(group: dist.ProcessGroup) -> list[torch.Tensor]:
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
        replicate(model, mesh=DeviceMesh.from_group(group, "cpu"))
        optimizer = torch.optim.Adam(model.parameters())
        for step in range(STEPS):
            model(torch.full((3, 8), 1.0 + step + pair.rank)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return [param.full_tensor().detach() for param in model.parameters()]  # type: ignore[operator]

    for found, expected in zip(weights(pair.ours), weights(pair.gloo), strict=True):
        assert torch.equal(found, expected)


@pytest.mark.slow
@needs_backend_class("its fully_shard is for CUDA alone, or averages by other means than on gloo")
def sharded_checkpoint(pair: Pair) -> None:
    def begun(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
        fully_shard(model, mesh=DeviceMesh.from_group(pair.ours, "cpu"))
        return model, torch.optim.Adam(model.parameters())

    def train(model: nn.Module, optimizer: torch.optim.Optimizer, first: int) -> None:
        for step in range(first, first + STEPS):
            model(torch.full((3, 8), 1.0 + step + pair.rank)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    def state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        weights, moments = get_state_dict(model, optimizer)
        return {"model": weights, "optimizer": moments}

    folder = [tempfile.mkdtemp() if pair.rank == 0 else ""]
    dist.broadcast_object_list(folder, pair.world_rank(0), group=pair.ours)
    kept = begun(3)
    train(*kept, 0)
    checkpoint.save(state(*kept), checkpoint_id=f"{folder[0]}/saved", process_group=pair.ours)
    train(*kept, STEPS)
    # Other weights, and no moments of Adam yet.
    loaded = begun(4)
    found = state(*loaded)
    checkpoint.load(found, checkpoint_id=f"{folder[0]}/saved", process_group=pair.ours)
    set_state_dict(*loaded, model_state_dict=found["model"], optim_state_dict=found["optimizer"])
    train(*loaded, STEPS)
    for one, other in zip(kept[0].parameters(), loaded[0].parameters(), strict=True):
        assert torch.equal(one.full_tensor(), other.full_tensor())
    dist.barrier(pair.ours)
    if pair.rank == 0:
        shutil.rmtree(folder[0])


@needs_torch((2, 6), "a stage of its pipelines does not find out the shapes, and gloo's hangs where it is given them")
def pipelined(pair: Pair) -> None:
    def trained(group: dist.ProcessGroup) -> list[torch.Tensor]:
        torch.manual_seed(3)
        parts = [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(pair.size)]
        x, target = torch.randn(8, 8), torch.randn(8, 8)
        stage = PipelineStage(parts[pair.rank], pair.rank, pair.size, torch.device("cpu"), group=group)
        first, last = pair.rank == 0, pair.rank == pair.size - 1
        losses: list[torch.Tensor] = []
        for schedule in (ScheduleGPipe, Schedule1F1B):
            kept = {"target": target, "losses": losses} if last else {}
            schedule(stage, n_microbatches=4, loss_fn=nn.functional.mse_loss).step(*([x] if first else []), **kept)
        if last:
            whole = nn.functional.mse_loss(nn.Sequential(*parts)(x), target)
            assert torch.allclose(torch.stack(losses[:4]).mean(), whole)
        return [*losses, *(parameter.grad for parameter in parts[pair.rank].parameters())]

    pair.both(trained)


@pytest.mark.slow
def tensor_parallel(pair: Pair) -> None:
    def trained(group: dist.ProcessGroup) -> list[torch.Tensor]:
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
        parallelize_module(model, DeviceMesh.from_group(group, "cpu"), {"0": ColwiseParallel(), "2": RowwiseParallel()})
        optimizer = torch.optim.AdamW(model.parameters())
        for step in range(STEPS):
            model(torch.full((3, 8), 1.0 + step)).square().sum().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        return [parameter.full_tensor().detach() for parameter in model.parameters()]

    pair.both(trained)


@pytest.mark.slow
def compiled(pair: Pair) -> None:
    @torch.compile(fullgraph=True, backend="aot_eager")
    def doubled(x: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(x)
        return x * 2

    assert torch.equal(doubled(torch.ones(3)), torch.full((3,), 4.0))
    torch.manual_seed(3)
    model = torch.compile(DistributedDataParallel(nn.Linear(4, 4), process_group=pair.ours), backend="aot_eager")
    model(torch.full((2, 4), 1.0 + pair.rank)).sum().backward()
    (weight, _) = model.parameters()
    assert torch.equal(weight.grad, torch.full((4, 4), 3.0))


CASES = cases_in(globals())


def on_two_ranks(rank: int) -> dict[str, str]:
    return run_cases(rank, CASES)


test_a_training_is_bitwise_that_on_gloo = each_case(CASES, 2, run=on_two_ranks)
