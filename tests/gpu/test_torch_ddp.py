"""torch's own DistributedDataParallel and ours on a GPU, with the backend "bagua" and with hooks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

import bagua.c10d  # noqa: F401
from bagua import torch_api
from tests.cuda.ranks import Ranks

STEPS = 10
SAMPLES = 32


class Net(nn.Module):
    """With two heads; a step may use one of them only."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(64, 48), nn.Tanh())
        self.one, self.two = nn.Linear(48, 10), nn.Linear(48, 10)

    def forward(self, x: torch.Tensor, head: int | None) -> torch.Tensor:
        x = self.body(x)
        found: torch.Tensor = self.one(x) + self.two(x) if head is None else (self.one, self.two)[head](x)
        return found


class Variant(NamedTuple):
    """How a model is wrapped."""

    hook: Any = None
    options: dict[str, Any] = {}  # noqa: RUF012
    #: Steps use one head or the other.
    branches: bool = False
    #: How far a weight may be from that of plain torch.
    close: float = 2e-5


def with_then(state, bucket):  # type: ignore[no-untyped-def]
    # torch compares annotations, which are texts in this module.
    future: torch.futures.Future[Any] = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
    return future.then(lambda done: done.value()[0] / dist.get_world_size())


VARIANTS = {
    "plain": Variant(options={"bucket_cap_mb": 0.004}),
    "views": Variant(options={"gradient_as_bucket_view": True, "bucket_cap_mb": 0.004}),
    "unused": Variant(options={"find_unused_parameters": True}, branches=True),
    "allreduce_hook": Variant(default_hooks.allreduce_hook, {"bucket_cap_mb": 0.004}),
    "fp16_compress_hook": Variant(default_hooks.fp16_compress_hook, close=3e-4),
    "bf16_compress_hook": Variant(default_hooks.bf16_compress_hook, close=2e-3),
    "then": Variant(with_then, {"bucket_cap_mb": 0.004}),
}


def batch(step: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(step)
    return torch.randn(size * SAMPLES, 64, generator=random), torch.randint(0, 10, (size * SAMPLES,), generator=random)


def trained(wrap: Callable[[nn.Module], nn.Module], part: slice, size: int, branches: bool) -> list[torch.Tensor]:
    """The weights after some steps, each with a part of a batch for all ranks."""
    torch.manual_seed(1)
    model = wrap(Net().cuda())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step in range(STEPS):
        x, y = (each[part].cuda() for each in batch(step, size))
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x, step % 2 if branches else None), y).backward()
        optimizer.step()
    return [each.detach().cpu() for each in model.parameters()]


def as_plain_torch(rank: int, size: int, names: list[str], wrapper: str) -> list[tuple[str, float]]:
    """Per variant: the largest difference of a weight from plain torch's, which trains on the whole batches."""
    torch.set_float32_matmul_precision("highest")
    torch.cuda.set_device(0)
    dist.init_process_group("bagua")
    torch_api.init_process_group()
    makes: Any = (
        nn.parallel.DistributedDataParallel if wrapper == "torch" else torch_api.data_parallel.DistributedDataParallel
    )
    found = []
    for name in names:
        variant = VARIANTS[name]

        def wrap(model: nn.Module, variant: Variant = variant) -> nn.Module:
            wrapped: nn.Module = makes(model, device_ids=[0], **variant.options)
            if variant.hook is not None:
                wrapped.register_comm_hook(None, variant.hook)
            return wrapped

        mine = trained(wrap, slice(rank * SAMPLES, (rank + 1) * SAMPLES), size, variant.branches)
        alone = trained(lambda model: model, slice(None), size, variant.branches)
        found.append((name, max(float((one - two).abs().max()) for one, two in zip(mine, alone, strict=True))))
    torch_api.destroy_process_group()
    dist.destroy_process_group()
    return found


@pytest.mark.parametrize("wrapper", ["torch", "bagua"])
@pytest.mark.parametrize(("size", "by"), [(1, "staged"), (1, "nccl"), (2, "staged")])
def test_a_wrapped_model_is_trained_as_by_plain_torch(ranks: Ranks, size: int, by: str, wrapper: str) -> None:
    for found in ranks(size, as_plain_torch, size, list(VARIANTS), wrapper, BAGUA_CUDA_COLLECTIVE=by):
        assert len(found) == len(VARIANTS)
        for name, far in found:
            assert far <= VARIANTS[name].close, (name, far)
