"""Algorithms that exchange weights: optimizers they wait for, backwards that raise, and models that are collected."""

from __future__ import annotations

import copy
import gc
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch

import bagua.torch_api as bagua
from bagua.errors import BaguaError
from bagua.torch_api.algorithms import (
    Algorithm,
    DecentralizedAlgorithm,
    DiLoCoAlgorithm,
    LocalSGDAlgorithm,
    LowPrecisionDecentralizedAlgorithm,
)
from tests.distributed.local_sgd_simulation import data, equal, net, rounds
from tests.distributed.torch_ranks import cases_in, each_case, same_everywhere
from tests.distributed.training_models import Breaks
from tests.world import make_world

Optimizers = Callable[[Any], list[torch.optim.Optimizer]]


class Entry(NamedTuple):
    """An algorithm whose weights travel after the optimizers of a step."""

    name: str
    make: Callable[[], Algorithm]
    #: Communicates at the end of every so many steps.
    interval: int
    takes_no_optimizer: bool = True


AFTER_OPTIMIZERS = [
    Entry("local_sgd", lambda: LocalSGDAlgorithm(1), 1),
    Entry("local_sgd every other step", lambda: LocalSGDAlgorithm(2), 2),
    Entry("diloco", lambda: DiLoCoAlgorithm(2), 2),
    Entry("low_precision_decentralized", lambda: LowPrecisionDecentralizedAlgorithm(False), 1, False),
]

ALL = [*AFTER_OPTIMIZERS, Entry("decentralized", lambda: DecentralizedAlgorithm(False), 1)]


class Lookahead(torch.optim.Optimizer):
    """Changes the parameters after another optimizer, which steps inside its step."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner
        super().__init__(inner.param_groups, {})

    def step(self, closure: Any = None) -> None:
        self.inner.step()
        with torch.no_grad():
            for group in self.param_groups:
                for param in group["params"]:
                    param.mul_(0.5)


def whole(model: Any) -> list[torch.optim.Optimizer]:
    return [torch.optim.SGD(model.parameters(), lr=0.1)]


def halves(model: Any) -> list[torch.optim.Optimizer]:
    return [torch.optim.SGD(model[0].parameters(), lr=0.1), torch.optim.Adam(model[2].parameters(), lr=0.01)]


def nested(model: Any) -> list[torch.optim.Optimizer]:
    return [Lookahead(torch.optim.SGD(model.parameters(), lr=0.1))]


def nothing(model: Any) -> list[torch.optim.Optimizer]:
    return []


#: Given to with_bagua, and then stepping.
OTHERS: list[tuple[str, Optimizers, Optimizers]] = [
    ("another with the same parameters", whole, whole),
    ("two for one", whole, halves),
    ("one for two", halves, whole),
    ("one inside another", whole, nested),
    ("one, none given", nothing, whole),
    ("two, none given", nothing, halves),
]


def backward(model: Any, rank: int, step: int) -> None:
    model.zero_grad()
    model(data(rank, step)).square().mean().backward()


def is_communicated(model: Any) -> bool:
    """Returns True if nothing has changed the weights since the last exchange."""
    weights = model.bagua_algorithm.state_dict().get("weight")
    if weights is None:
        return same_everywhere(*model.parameters())
    return all(torch.equal(param, weights[name]) for name, param in model.named_parameters())


def an_optimizer_that_was_not_given_is_followed(rank: int) -> None:
    for entry in AFTER_OPTIMIZERS:
        for name, given, stepping in OTHERS:
            if given is nothing and not entry.takes_no_optimizer:
                continue
            model = net()
            first = given(model)
            model.with_bagua(first, entry.make())
            for step in range(2):
                backward(model, rank, step)
                for optimizer in first or stepping(model):
                    optimizer.step()
            second = stepping(model)
            for step in range(2, 6):
                backward(model, rank, step)
                for optimizer in second:
                    optimizer.step()
                done = (step + 1) // entry.interval
                assert rounds(model) == done, f"{entry.name}, {name}, step {step}"
                assert (step + 1) % entry.interval or is_communicated(model), f"{entry.name}, {name}, step {step}"


def an_optimizer_of_another_model_is_not_awaited(rank: int) -> None:
    for entry in AFTER_OPTIMIZERS:
        model, other = net(), net()
        (optimizer,), (foreign,) = whole(model), whole(other)
        model.with_bagua([optimizer], entry.make())
        for step in range(4):
            backward(model, rank, step)
            backward(other, rank, step)
            foreign.step()
            assert rounds(model) == step // entry.interval
            optimizer.step()
            assert rounds(model) == (step + 1) // entry.interval


def an_optimizer_that_first_steps_after_the_exchange_is_refused(rank: int) -> None:
    model = net()
    first, second = halves(model)
    model.with_bagua([first], LocalSGDAlgorithm(1))
    backward(model, rank, 0)
    first.step()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(BaguaError, match=r"first step of a Adam with parameters of model .*give with_bagua all"):
        second.step()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    # Seen in a step without a round, it is awaited in those that have one.
    model.with_bagua([first], LocalSGDAlgorithm(2))
    for step in range(4):
        backward(model, rank, step)
        first.step()
        second.step()
        assert rounds(model) == (step + 1) // 2
        assert step % 2 == 0 or same_everywhere(*model.parameters())


def an_overflow_of_an_optimizer_that_was_not_given_delays_no_rank(rank: int) -> None:
    for entry in AFTER_OPTIMIZERS:
        model = net()
        model.with_bagua(whole(model), entry.make())
        (optimizer,) = whole(model)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1000)
        for step in range(6):
            model.zero_grad()
            factor = float("inf") if step in (1, 5) and rank == 0 else 1.0
            scaler.scale(model(data(rank, step)).square().mean() * factor).backward()
            scaler.step(optimizer)
            scaler.update(4.0)
            bagua.barrier()
            assert rounds(model) == (step + 1) // entry.interval, entry.name


def weights_that_no_optimizer_changes_are_communicated_at_the_next_forward_and_by_state_dict(rank: int) -> None:
    for entry in AFTER_OPTIMIZERS:
        model = net()
        model.with_bagua(whole(model), entry.make())
        for step in range(4):
            backward(model, rank, step)
            assert rounds(model) == step // entry.interval
            with torch.no_grad():
                for param in model.parameters():
                    param.sub_(param.grad, alpha=0.1)
        model.bagua_algorithm.state_dict()
        assert rounds(model) == 4 // entry.interval
        assert is_communicated(model), entry.name


def a_batch_is_tried_again_where_its_backward_raised_in_between(rank: int) -> None:
    for entry in ALL:
        torch.manual_seed(rank)
        models = [net()]
        models += [copy.deepcopy(models[0]) for _ in range(2)]
        # On no rank, on rank 0, and on all.
        for model, breaking in zip(models, map(range, (0, 1, bagua.get_world_size())), strict=True):
            (optimizer,) = whole(model)
            model.with_bagua([optimizer], entry.make())
            for step in range(6):
                for _ in range(step if rank in breaking else 0):
                    x = Breaks.apply(data(rank, step).requires_grad_())
                    with pytest.raises(ArithmeticError):
                        model(x).square().mean().backward()
                    assert model[2].weight.grad is not None
                backward(model, rank, step)
                optimizer.step()
            assert rounds(model) == 6 // entry.interval, entry.name
            assert model.bagua_ddp.step == 5
        assert all(equal(models[0], other) for other in models[1:]), entry.name


def collected_in_turn(model: list[Any], order: Sequence[int], rank: int) -> list[str]:
    """The warnings of this rank; the ranks drop their models one after the other."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for turn in order:
            if turn == rank:
                model.clear()
                gc.collect()
            bagua.barrier()
    return [str(each.message) for each in caught if "was collected before" in str(each.message)]


def a_model_that_is_collected_with_a_due_exchange_begins_none_and_says_so(rank: int) -> None:
    size = bagua.get_world_size()
    for entry in AFTER_OPTIMIZERS:
        for order in (range(size), range(size - 1, -1, -1)):
            model = net()
            optimizers = halves(model)
            model.with_bagua(optimizers, entry.make())
            for step in range(2):
                backward(model, rank, step)
                # The last step waits for its second optimizer.
                for optimizer in optimizers[: 2 - step]:
                    optimizer.step()
            left = [model]
            del model, optimizer, optimizers
            found = collected_in_turn(left, order, rank)
            assert len(found) == 1, f"{entry.name}: {found}"
            assert "state_dict()" in found[0]
    for entry in ALL:
        model = net()
        (optimizer,) = whole(model)
        model.with_bagua([optimizer], entry.make())
        for step in range(2):
            backward(model, rank, step)
            optimizer.step()
        left = [model]
        del model, optimizer
        assert collected_in_turn(left, range(size), rank) == [], entry.name


CASES = cases_in(globals())


test = each_case(CASES, 2, 3, "2+1")


def trains_outside_of_steps(rank: int, name: str, how: str) -> str:
    bagua.init_process_group()
    model = net()
    (optimizer,) = whole(model)
    model.with_bagua([optimizer], next(entry for entry in ALL if entry.name == name).make())
    forward = model if how == "eval" else model.forward
    for _ in range(2):
        model.train()
        backward(model, rank, 0)
        optimizer.step()
        optimizer.zero_grad()
        # One between two steps that communicate is allowed.
        model.train(how != "eval")
        forward(data(rank, 1)).square().mean().backward()
        optimizer.step()
    forward(data(rank, 1)).square().mean().backward()
    with pytest.raises(BaguaError) as caught:
        optimizer.step()
    return str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["eval", "forward"])
@pytest.mark.parametrize("name", ["local_sgd", "low_precision_decentralized", "decentralized"])
def test_a_step_without_a_training_forward_is_an_error(name: str, how: str) -> None:
    # Its weights would never be communicated.
    for said in make_world(2, timeout=120.0).run(trains_outside_of_steps, name, how):
        assert f"without a training forward: with {name} a step begins with a call of the model itself" in said


def ends_inside_a_step(rank: int, name: str, half: str, ranks: int) -> float:
    torch.set_num_threads(1)
    bagua.init_process_group()
    model = net()
    (optimizer,) = whole(model)
    model.with_bagua([optimizer], next(entry for entry in ALL if entry.name == name).make())
    backward(model, rank, 0)
    optimizer.step()
    if rank < ranks:
        loss = model(data(rank, 1)).square().mean()
        if half == "backward":
            loss.backward()
    start = time.monotonic()
    bagua.destroy_process_group()
    seconds = time.monotonic() - start
    if half == "forward":
        # Trains alone now.
        backward(model, rank, 1)
        optimizer.step()
    return seconds


@pytest.mark.parametrize(
    ("name", "half", "ranks"),
    [("decentralized", "forward", 2), ("decentralized", "forward", 1), ("low_precision_decentralized", "backward", 1)],
)
def test_a_step_that_all_or_one_of_the_ranks_have_begun_does_not_hold_up_the_end(
    name: str, half: str, ranks: int
) -> None:
    assert max(make_world(2).run(ends_inside_a_step, name, half, ranks)) < 20
