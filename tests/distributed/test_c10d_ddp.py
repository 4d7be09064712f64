"""torch's DistributedDataParallel on the backend "bagua" trains bit for bit as on gloo, with two ranks."""

import contextlib
import shutil
import tempfile
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import checkpoint
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from tests.distributed.c10d_ranks import Case, Pair, cases_in, check, run_cases
from tests.distributed.left_out import needs_backend_class

try:
    from torch.distributed.fsdp import fully_shard
except ImportError:  # torch 2.5 has it under the name that it had as a prototype.
    from torch.distributed._composable.fsdp import fully_shard  # type: ignore[no-redef,assignment]

STEPS = 4


class Net(nn.Module):
    """Layers of several sizes, a buffer, and a branch that only some samples take."""

    def __init__(self, branches: bool = False) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 8))
        self.one, self.other = nn.Linear(8, 4), nn.Linear(8, 4)
        self.branches = branches

    def forward(self, x: torch.Tensor, step: int) -> torch.Tensor:
        x = self.body(x)
        if not self.branches:
            return self.one(x) + self.other(x)
        return self.one(x) if step % 2 else self.other(x)


Step = Callable[[DistributedDataParallel, torch.optim.Optimizer, Callable[[], torch.Tensor], int], None]


def plain(model: DistributedDataParallel, optimizer: torch.optim.Optimizer, loss: Any, step: int) -> None:
    optimizer.zero_grad()
    loss().backward()
    optimizer.step()


def trained(
    pair: Pair,
    group: dist.ProcessGroup,
    *,
    step: Step = plain,
    hook: Callable[[DistributedDataParallel, dist.ProcessGroup], None] | None = None,
    branches: bool = False,
    dtype: torch.dtype = torch.float32,
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.Adam,
    uneven: bool = False,
    **options: Any,
) -> list[torch.Tensor]:
    """Weights and buffers of this rank after some steps."""
    torch.manual_seed(5 + pair.rank)
    model = DistributedDataParallel(Net(branches).to(dtype), process_group=group, **options)
    if hook is not None:
        hook(model, group)
    chosen = optimizer(model.parameters(), lr=0.01)
    context = model.join() if uneven else contextlib.nullcontext()
    with context:
        for number in range(STEPS + (pair.rank if uneven else 0)):
            samples = torch.randn(6, 8, dtype=dtype)
            step(model, chosen, lambda samples=samples, number=number: model(samples, number).square().mean(), number)
    return [tensor.detach().clone() for tensor in model.module.state_dict().values()]


def as_on_gloo(pair: Pair, **options: Any) -> None:
    begun = [trained(pair, group, **options) for group in (pair.ours, pair.gloo)]
    for found, expected in zip(*begun, strict=True):
        assert torch.equal(found, expected)


def adam_with_small_buckets(pair: Pair) -> None:
    as_on_gloo(pair, bucket_cap_mb=0.001)


def bucket_views(pair: Pair) -> None:
    as_on_gloo(pair, bucket_cap_mb=0.001, gradient_as_bucket_view=True)


def static_graph(pair: Pair) -> None:
    as_on_gloo(pair, static_graph=True, bucket_cap_mb=0.001)


def unused_parameters(pair: Pair) -> None:
    as_on_gloo(pair, branches=True, find_unused_parameters=True)


def no_buffers(pair: Pair) -> None:
    as_on_gloo(pair, broadcast_buffers=False)


def float64(pair: Pair) -> None:
    as_on_gloo(pair, dtype=torch.float64)


def no_sync_with_clipping(pair: Pair) -> None:
    def step(model: DistributedDataParallel, optimizer: Any, loss: Any, number: int) -> None:
        if number % 2 == 0:
            with model.no_sync():
                loss().backward()
            return
        loss().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()

    as_on_gloo(pair, step=step)


def join_with_uneven_inputs(pair: Pair) -> None:
    as_on_gloo(pair, uneven=True)


def fp16_hook(pair: Pair) -> None:
    as_on_gloo(pair, hook=lambda model, group: model.register_comm_hook(group, default_hooks.fp16_compress_hook))


def bf16_hook(pair: Pair) -> None:
    as_on_gloo(pair, hook=lambda model, group: model.register_comm_hook(group, default_hooks.bf16_compress_hook))


def power_sgd_hook(pair: Pair) -> None:
    def register(model: DistributedDataParallel, group: dist.ProcessGroup) -> None:
        state = powerSGD_hook.PowerSGDState(group, start_powerSGD_iter=2, min_compression_rate=0.5)
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)

    # One bucket: the continuations of several would start operations between those of the backward, in any order.
    as_on_gloo(pair, hook=register)


def a_hook_with_then(pair: Pair) -> None:
    def hook(group: dist.ProcessGroup, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:  # type: ignore[name-defined]
        future = dist.all_reduce(bucket.buffer(), group=group, async_op=True).get_future()
        return future.then(lambda done: done.value()[0].mul_(0.25))

    as_on_gloo(pair, hook=lambda model, group: model.register_comm_hook(group, hook), bucket_cap_mb=0.001)


def zero_redundancy_optimizer(pair: Pair) -> None:
    def begun(group: dist.ProcessGroup) -> Callable[..., torch.optim.Optimizer]:
        return lambda parameters, lr: ZeroRedundancyOptimizer(
            parameters, optimizer_class=torch.optim.Adam, process_group=group, lr=lr
        )

    found = trained(pair, pair.ours, optimizer=begun(pair.ours))
    expected = trained(pair, pair.gloo, optimizer=begun(pair.gloo))
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


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


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_ddp_is_bitwise_that_on_gloo(case: Case) -> None:
    check(on_two_ranks, 2, case)
