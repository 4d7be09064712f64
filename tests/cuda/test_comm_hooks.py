"""Communication hooks of models on the simulated driver, torch's own among them: the weights of the CPU, and the order.

All cases run in one world, because every rank that starts imports torch for seconds.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

import bagua
import bagua.c10d
import bagua.torch_api as api
from bagua.torch_api.data_parallel import DistributedDataParallel
from tests.cases import attempt
from tests.cuda.ranks import Ended, ended
from tests.cuda.test_cuda_training import Net, batch, same_bits, sgd, tensors_in
from tests.cuda.torch_on_sim import install

pytestmark = pytest.mark.slow

STEPS = 4
#: By `nccl` each rank has a device of its own, by `staged` both have one.
COLLECTIVES = ("staged", "nccl")


def with_then(state: Any, bucket: Any) -> torch.futures.Future[torch.Tensor]:
    """A new tensor becomes the gradient."""
    future: torch.futures.Future[Any] = dist.all_reduce(bucket.buffer(), group=state, async_op=True).get_future()
    return future.then(lambda done: done.value()[0] * 0.25).then(lambda done: done.value() + 0.001)


def blocking(state: Any, bucket: Any) -> torch.futures.Future[torch.Tensor]:
    """Its future orders nothing."""
    dist.all_reduce(bucket.buffer(), group=state)
    future: torch.futures.Future[Any] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def layers() -> nn.Module:
    return nn.Sequential(nn.Linear(12, 16), nn.GELU(), nn.Linear(16, 5))


class Variant(NamedTuple):
    """How gradients are communicated."""

    hook: Any
    #: Of the hook, by the group that it communicates in; None is that of all.
    state: Callable[[Any], Any] = lambda group: group
    #: Of the wrapper.
    options: dict[str, Any] = {"bucket_cap_mb": 0.001}  # noqa: RUF012
    model: Callable[[], nn.Module] = Net


VARIANTS = {
    "allreduce_hook": Variant(default_hooks.allreduce_hook),
    "allreduce_hook with an unused parameter": Variant(
        default_hooks.allreduce_hook, options={"find_unused_parameters": True}, model=lambda: Net(unused=True)
    ),
    "allreduce_hook, no views": Variant(default_hooks.allreduce_hook, options={"gradient_as_bucket_view": False}),
    "fp16_compress_hook": Variant(default_hooks.fp16_compress_hook),
    "bf16_compress_hook": Variant(default_hooks.bf16_compress_hook),
    "fp16_compress_wrapper": Variant(default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook)),
    "a hook with then": Variant(with_then),
    "a hook that blocks": Variant(blocking),
}

#: It waits for the device itself, and its continuations start operations: with several buckets their order among those
#: of the next bucket's hook would be another one on each rank.
POWER = {
    "powerSGD_hook": Variant(
        powerSGD_hook.powerSGD_hook,
        # With error feedback it frees memory of the caller's stream while that of a continuation may read it.
        lambda group: powerSGD_hook.PowerSGDState(
            group, start_powerSGD_iter=2, min_compression_rate=0.5, use_error_feedback=False
        ),
        {},
        layers,
    ),
}


def train(rank: int, variant: Variant, place: str, group: Any = None) -> list[torch.Tensor]:
    """Weights, buffers and the state of the optimizer after some steps, of which every second one accumulates."""
    torch.manual_seed(1 + rank)
    model = variant.model().to(place)
    optimizer = sgd(model)
    wrapper = DistributedDataParallel(model, optimizers=[optimizer], **variant.options)
    wrapper.register_comm_hook(variant.state(group), variant.hook)
    data = [batch(rank, step, place) for step in range(2 * STEPS)]
    reads = install().reads_to_the_host if place == "cuda" else 0
    for step in range(STEPS):
        optimizer.zero_grad()
        if step % 2:
            with wrapper.no_sync():
                x, y = data[2 * step + 1]
                nn.functional.cross_entropy(wrapper(x), y).backward()
        x, y = data[2 * step]
        nn.functional.cross_entropy(wrapper(x), y).backward()
        optimizer.step()
    if place == "cuda" and variant.hook is not powerSGD_hook.powerSGD_hook:
        assert install().reads_to_the_host == reads
    found = tensors_in([model.state_dict(), optimizer.state_dict()])
    assert all(each.isfinite().all() for each in found)
    wrapper.bagua_ddp.close()
    return found


# --- streams ----------------------------------------------------------------------------------------------------------


class Aside(torch.autograd.Function):
    """Its backward goes on on another stream, as that of an operation whose forward was there."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, side: Any, kept: list[torch.Tensor]) -> torch.Tensor:
        ctx.side, ctx.kept = side, kept
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        if ctx.side is not None:
            # Read on the other stream: it is freed when that has ended.
            ctx.kept.append(grad)
            ctx.side.wait_stream(torch.cuda.current_stream())
            torch.cuda.set_stream(ctx.side)
        return grad.clone(), None, None


class Branches(nn.Module):
    """The gradient of `one` comes on a stream of its own, before that of `other`, or behind it."""

    def __init__(self, one_is_last: bool) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(12, 3, bias=False), nn.Linear(12, 3, bias=False)
        self.one_is_last = one_is_last
        self.kept: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor, side: Any) -> torch.Tensor:
        # What comes last in the forward comes first in the backward.
        if self.one_is_last:
            first = Aside.apply(self.one(x), side, self.kept)
            return first + self.other(x)
        first = self.other(x)
        return first + Aside.apply(self.one(x), side, self.kept)


def back_to(stream: torch.cuda.Stream, engine: Any, name: str) -> None:
    """Behind the wrapper's hook of a parameter, as autograd ends a node, the stream is that of before."""
    communicate = engine.on_gradient

    def on_gradient(arrived: str, *args: Any, **options: Any) -> None:
        communicate(arrived, *args, **options)
        if arrived == name:
            torch.cuda.set_stream(stream)

    engine.on_gradient = on_gradient


def several_streams(rank: int, place: str) -> list[torch.Tensor]:
    found = []
    for one_is_last, hook in ((False, default_hooks.allreduce_hook), (True, with_then), (True, blocking)):
        torch.manual_seed(1 + rank)
        model = Branches(one_is_last).to(place)
        wrapper = DistributedDataParallel(model)
        wrapper.register_comm_hook(None, hook)
        main, side = (torch.cuda.current_stream(), torch.cuda.Stream()) if place == "cuda" else (None, None)
        if main is not None:
            back_to(main, wrapper.bagua_ddp, "one.weight")
        optimizer = sgd(model)
        for step in range(STEPS):
            optimizer.zero_grad()
            x = batch(rank, step, place)[0]
            wrapper(x, side).sum().backward()
            optimizer.step()
            if main is not None:
                main.wait_stream(side)
                model.kept.clear()
        found += tensors_in(model.state_dict())
        wrapper.bagua_ddp.close()
    return found


# --- failures ---------------------------------------------------------------------------------------------------------


def a_hook_that_fails(rank: int) -> None:
    def late(state: Any, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        tries.append(1)

        def check(done: Any) -> torch.Tensor:
            if len(tries) == 1:
                raise ZeroDivisionError("in the continuation")
            found: torch.Tensor = done.value()
            return found

        return default_hooks.allreduce_hook(state, bucket).then(check)

    tries: list[int] = []
    model = nn.Linear(4, 2).cuda()
    wrapper = DistributedDataParallel(model)
    wrapper.register_comm_hook(None, late)
    x = torch.ones(2, 4, device="cuda") * (rank + 1)
    with pytest.raises(RuntimeError, match="ZeroDivisionError: in the continuation"):
        wrapper(x).sum().backward()
    # No stream is ordered behind what the hook began.
    torch.cuda.synchronize()
    model.zero_grad()
    wrapper(x).sum().backward()
    assert model.weight.grad.tolist() == [[3.0] * 4] * 2
    wrapper.bagua_ddp.close()


# --- worlds -----------------------------------------------------------------------------------------------------------


def run(rank: int, variants: str) -> dict[str, str]:
    """Runs all cases on this rank; by name, what each raised ("" when nothing)."""
    torch.set_num_threads(1)
    dist.init_process_group("bagua")
    api.init_process_group()
    # Before torch has devices: torch's PowerSGD would look for the CPU among them.
    named = globals()[variants]
    here = {name: train(rank, variant, "cpu") for name, variant in named.items()}
    branches = several_streams(rank, "cpu")
    install()

    groups: dict[str, Any] = {}

    def alike(name: str) -> None:
        for collective in COLLECTIVES:
            # The lanes of each model and of a new group choose anew.
            os.environ["BAGUA_CUDA_COLLECTIVE"] = collective
            torch.cuda.set_device(rank if collective == "nccl" else 0)
            if collective not in groups:
                groups[collective] = dist.new_group()
            there = train(rank, named[name], "cuda", groups[collective])
            assert same_bits(here[name], there), collective
            used = [each["cuda"]["collective"] for each in bagua.stats()["groups"].values() if each["cuda"]]
            assert collective in used, used

    cases: dict[str, Callable[[], None]] = {name: lambda name=name: alike(name) for name in named}
    if variants == "VARIANTS":

        def on_streams() -> None:
            assert same_bits(branches, several_streams(rank, "cuda"))

        cases |= {"streams": on_streams, "fails": lambda: a_hook_that_fails(rank)}
    outcome = attempt(cases, api.barrier)
    api.destroy_process_group()
    dist.destroy_process_group()
    return outcome


@pytest.fixture(scope="module")
def two(_driver_of_ranks: Path) -> Ended:
    return ended(_driver_of_ranks, 2, run, "VARIANTS", timeout=180.0)


@pytest.fixture(scope="module")
def power(_driver_of_ranks: Path) -> Ended:
    return ended(_driver_of_ranks, 2, run, "POWER", timeout=180.0)


@pytest.mark.parametrize("name", VARIANTS)
def test_training_by_a_hook_ends_with_the_weights_and_states_of_the_cpu(two: Ended, name: str) -> None:
    two.check(name)


def test_gradients_of_a_bucket_may_come_on_several_streams(two: Ended) -> None:
    two.check("streams")


def test_a_hook_whose_continuation_raises_ends_the_backward_and_the_next_one_works(two: Ended) -> None:
    two.check("fails")


def test_hooks_make_no_fault_leave_nothing_and_do_not_wait_for_the_device(two: Ended) -> None:
    two.ranks.check()


def test_training_by_the_powersgd_of_torch_ends_with_the_weights_and_states_of_the_cpu(power: Ended) -> None:
    power.check("powerSGD_hook")
    for report in power.ranks.reports:
        # torch's hook waits for the device in its last continuation.
        assert (report["faults"], report["leaked"]) == ([], 0)
