"""The lock of weights that are averaged: what holds it, and that rounds go on whatever a training does."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

import bagua.torch_api as bagua
from bagua.torch_api.algorithms.async_model_average import AsyncModelAverageAlgorithm
from tests.distributed.async_ranks import (
    SHORT,
    Slopes,
    fill,
    rest,
    rounds,
    rounds_pass,
    same_bits,
    step,
    until,
    wrapped,
)
from tests.distributed.torch_ranks import cases_in, each_case

#: Seconds: many intervals.
WHILE = 0.03


def raw(model: torch.nn.Module) -> list[torch.Tensor]:
    """Copies of the weights, with or without the lock."""
    return [param.detach().clone() for param in model.parameters()]


def equal(mine: list[torch.Tensor], theirs: list[torch.Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(mine, theirs, strict=True))


def no_round_changes_weights_inside_the_users_lock(rank: int) -> None:
    model, _, impl = wrapped()
    operation = model.bagua_buckets[0]._async_op
    # The algorithm's, and that of the operation, are one.
    for lock, unlock in ((impl.lock(model).__enter__, None), (operation.lock_weight, operation.unlock_weight)):
        if unlock is None:
            context = impl.lock(model)
            lock, unlock = context.__enter__, lambda context=context: context.__exit__(None, None, None)
        fill(model, float(rank))
        bagua.barrier()
        lock()
        # Nesting counts.
        operation.lock_weight()
        fill(model, 100.0 * rank)
        before, done = raw(model), rounds(model)
        time.sleep(WHILE)
        operation.unlock_weight()
        time.sleep(WHILE)
        assert equal(before, raw(model))
        # One that had taken its snapshot before may still have counted elsewhere.
        assert rounds(model) <= done + 1
        unlock()
        assert same_bits(*rest(model))


class Watched(Slopes):
    """Compares its weights at the beginning of a forward with those that the backward finds, which come late."""

    before: list[torch.Tensor]

    def __init__(self) -> None:
        super().__init__()
        self.checked = 0

    def compare(self) -> None:
        time.sleep(3 * SHORT / 1000)
        assert equal(self.before, raw(self))
        self.checked += 1

    def forward(self, slope: float) -> torch.Tensor:
        self.before = raw(self)
        total = super().forward(slope)
        self.compare()
        if total.requires_grad:
            total.register_hook(lambda _: self.compare())
            self.weight0.register_hook(lambda _: self.compare())
        return total


class WatchedSGD(torch.optim.SGD):
    """Compares the weights before and after a pause in its step."""

    def step(self, closure: Any = None) -> Any:
        (param,) = self.param_groups[0]["params"]
        before = param.detach().clone()
        time.sleep(3 * SHORT / 1000)
        assert torch.equal(before, param)
        return super().step(closure)


def training_holds_the_lock_in_forward_backward_and_step(rank: int) -> None:
    model = Watched()
    optimizer = WatchedSGD(model.parameters(), lr=2**-6)
    model.with_bagua([optimizer], AsyncModelAverageAlgorithm(sync_interval_ms=SHORT))
    changed, last = 0, raw(model)[0]

    def trains_until_rounds_passed() -> bool:
        nonlocal changed, last
        model.eval()
        model(1.0)
        model.train()
        step(model, optimizer, float(rank + 1))
        own, last = last - (rank + 1) * 2**-6, raw(model)[0]
        changed += not torch.equal(last, own)
        return rounds(model) >= 8 and changed >= 2

    until("rounds that change the weights of a rank that trains", trains_until_rounds_passed)
    assert model.checked >= 8
    assert same_bits(*rest(model))


def rounds_go_on_after_a_backward_that_never_comes(rank: int) -> None:
    model, optimizer, _impl = wrapped()
    if rank == 0:
        output = model(1.0)
    bagua.barrier()
    rounds_pass(model, 3)
    fill(model, float(rank))
    bagua.barrier()
    if rank == 0:
        # It comes after all.
        output.backward()
        optimizer.step()
    assert same_bits(*rest(model))


def fails(*_: Any) -> None:
    raise KeyError("on purpose")


class FailingSGD(torch.optim.SGD):
    fail = True

    def step(self, closure: Any = None) -> Any:
        if self.fail:
            fails()
        return super().step(closure)


def exceptions_anywhere_in_a_step_stop_no_rounds(rank: int) -> None:
    model = Slopes()
    optimizer = FailingSGD(model.parameters(), lr=2**-6)
    model.with_bagua([optimizer], AsyncModelAverageAlgorithm(sync_interval_ms=SHORT))

    def forward_raises() -> None:
        model("no number")

    def hook_raises() -> None:
        handle = model.register_forward_pre_hook(fails)
        try:
            model(1.0)
        finally:
            handle.remove()

    def backward_raises() -> None:
        total = model(1.0)
        handle = model.weight0.register_hook(fails)
        try:
            total.backward()
        finally:
            handle.remove()

    def backward_raises_first() -> None:
        total = model(1.0)
        total.register_hook(fails)
        total.backward()

    def optimizer_raises() -> None:
        model(1.0).backward()
        optimizer.step()

    def raises_in_no_sync() -> None:
        with bagua.distributed.no_sync(model):
            backward_raises()

    for broken in (
        forward_raises,
        hook_raises,
        backward_raises,
        backward_raises_first,
        optimizer_raises,
        raises_in_no_sync,
    ):
        if rank == 0:
            try:
                broken()
            except (KeyError, TypeError):
                pass
            else:
                pytest.fail(f"{broken.__name__} raised nothing")
        bagua.barrier()
        # Not after the time that a backward may take.
        rounds_pass(model, 3, seconds=20.0)
        bagua.barrier()
    optimizer.fail = False
    step(model, optimizer, 1.0)
    assert same_bits(*rest(model))


def a_parameter_with_new_memory_is_averaged_from_the_next_forward_on(rank: int) -> None:
    model, optimizer, impl = wrapped()
    bagua.barrier()
    with impl.lock(model):
        # No round mixes what some ranks have set with what others will replace.
        bagua.barrier()
        model.weight0.data = torch.full((37,), float(rank))
        step(model, optimizer, 0.0)
        bagua.barrier()
    found = rest(model)
    assert same_bits(*found)
    size = bagua.get_world_size()
    assert torch.allclose(found[0], torch.tensor(sum(range(size)) / size))
    # Weights whose memory has gaps count as well.
    gaps = torch.nn.Module()
    gaps.register_parameter("weight", torch.nn.Parameter(torch.zeros(4, 6)[:, ::2]))
    gaps.forward = lambda slope: (gaps.weight * slope).sum()
    other = torch.optim.SGD(gaps.parameters(), lr=1.0)
    gaps.with_bagua([other], AsyncModelAverageAlgorithm(sync_interval_ms=SHORT))
    # The others have averaged before the first forward here.
    for steps in (rank != 0, rank == 0):
        if steps:
            step(gaps, other, -float(rank))
        bagua.barrier()
        rounds_pass(gaps)
        bagua.barrier()
    found = rest(gaps)
    assert torch.allclose(found[0], torch.full((4, 3), sum(range(size)) / size))


CASES = cases_in(globals())

test = each_case(CASES, 2, 3)
