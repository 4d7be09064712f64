"""qadam on several ranks against a simulation of all of them in one process: plain torch, and the codecs' oracle."""

from __future__ import annotations

import contextlib
import copy

import pytest
import torch

import bagua.torch_api as bagua_torch
from bagua.errors import BaguaError
from bagua.torch_api.algorithms.q_adam import QAdamAlgorithm, QAdamOptimizer
from tests.distributed.qadam_oracle import (
    BETAS,
    DECAY,
    AllRanks,
    W,
    assert_equal_models,
    batch,
    loss_of,
    net,
    q_adam,
    train,
    wrapped,
)
from tests.distributed.states import load, saved
from tests.distributed.torch_ranks import HOSTED, cases_in, each_case, same_everywhere
from tests.distributed.training_models import ChosenLayers


def moments_of(optimizer: QAdamOptimizer) -> list[torch.Tensor]:
    return [state[key].clone() for state in optimizer.state.values() for key in ("exp_avg", "exp_avg_sq")]


def the_training_of_all_ranks_equals_the_simulation(rank: int) -> None:
    for codec, hierarchical, do_flatten in (
        (None, True, True),
        ("minmax_u8", True, True),
        ("minmax_u8", False, True),
        ("minmax_u8", False, False),
        ("onebit", False, True),
    ):
        model = net()
        expected = AllRanks(model, codec, hierarchical)
        optimizer = wrapped(model, compression=codec, hierarchical=hierarchical, do_flatten=do_flatten)
        for step in range(3 * W):
            train(model, optimizer, range(step, step + 1))
            expected.step(step)
            what = f"{codec} {hierarchical=} {do_flatten=} {step=}"
            assert_equal_models(model, expected, what)
            state = dict(model.named_parameters())
            for name in state:
                m = optimizer.state[state[name]]["exp_avg"]
                torch.testing.assert_close(m, expected.moment(name), rtol=1e-6, atol=1e-7, msg=lambda t, w=what: w + t)


def gradients_stay_those_of_this_rank_after_the_warm_up(rank: int) -> None:
    for do_flatten in (True, False):
        model = net()
        optimizer = wrapped(model, do_flatten=do_flatten)
        train(model, optimizer, range(W))
        expected = AllRanks(model)
        optimizer.zero_grad()
        loss_of(model, rank, W).backward()
        own = expected.gradients(rank, [W])
        assert all(torch.equal(param.grad, grad) for param, grad in zip(model.parameters(), own, strict=True))


def gradients_accumulate_with_and_without_no_sync(rank: int) -> None:
    for silent, do_flatten in ((True, True), (False, True), (True, False), (False, False)):
        model = net()
        expected = AllRanks(model)
        optimizer = wrapped(model, do_flatten=do_flatten)
        for step in range(2 * W):
            optimizer.zero_grad()
            with model.bagua_ddp.no_sync() if silent else contextlib.nullcontext():
                loss_of(model, rank, 2 * step).backward()
                moments = moments_of(optimizer)
            loss_of(model, rank, 2 * step + 1).backward()
            assert all(map(torch.equal, moments_of(optimizer), moments)), "a backward changed a moment"
            optimizer.step()
            expected.step(2 * step, 2 * step + 1)
            assert_equal_models(model, expected, f"{silent=} {do_flatten=} {step=}", 5e-6)


def clipping_acts_in_the_warm_up_and_not_after_it(rank: int) -> None:
    models = [net(), net()]
    for clip, model in enumerate(models):
        optimizer = wrapped(model)
        train(model, optimizer, range(W))
        optimizer.zero_grad()
        loss_of(model, rank, W).backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-4)
        optimizer.step()
    assert all(map(torch.equal, models[0].parameters(), models[1].parameters()))


def unused_parameters_stay_where_no_rank_uses_them(rank: int) -> None:
    for do_flatten in (True, False):
        torch.manual_seed(8)
        model = ChosenLayers(4, 3)
        optimizer = wrapped(model, do_flatten=do_flatten, find_unused_parameters=True)
        initial = copy.deepcopy(model.never.state_dict())
        for step in range(W + 1):
            optimizer.zero_grad()
            model(batch(rank, step), "left", "right").square().mean().backward()
            optimizer.step()
        # Now rank 0 alone uses the left layer, and no rank the right one.
        expected = AllRanks(model)
        grads = [torch.zeros_like(param) for param in model.parameters()]
        expected.model(batch(0, 7), "left").square().mean().backward()
        grads[0], grads[1] = expected.model.left.weight.grad, expected.model.left.bias.grad
        before = {name: optimizer.state[param]["exp_avg"].clone() for name, param in model.left.named_parameters()}
        values = {name: param.detach().clone() for name, param in model.left.named_parameters()}
        right = [param.detach().clone() for param in model.right.parameters()]
        right_moments = [optimizer.state[param]["exp_avg"].clone() for param in model.right.parameters()]
        optimizer.zero_grad()
        # The other ranks' backward reaches a parameter with a gradient of 0.
        (model(batch(0, 7), "left").square().mean() * float(rank == 0)).backward()
        optimizer.step()
        for name, param in model.left.named_parameters():
            decay, beta1 = (DECAY, BETAS[0]) if name == "weight" else (0.0, 0.7)
            grad = grads[0 if name == "weight" else 1] / bagua_torch.get_world_size()
            m = beta1 * before[name] + (1 - beta1) * (grad + decay * values[name])
            torch.testing.assert_close(optimizer.state[param]["exp_avg"], m, rtol=1e-5, atol=1e-7)
            assert not torch.equal(param, values[name])
        assert all(map(torch.equal, model.right.parameters(), right))
        assert all(
            torch.equal(optimizer.state[param]["exp_avg"], m)
            for param, m in zip(model.right.parameters(), right_moments, strict=True)
        )
        assert all(param.grad is None for param in model.right.parameters())
        assert all(torch.equal(param, initial[name]) for name, param in model.never.named_parameters())
        assert all(param not in optimizer.state for param in model.never.parameters())
        assert same_everywhere(*model.parameters())


def an_earlier_state_brings_the_exchange_of_gradients_back(rank: int) -> None:
    model = net()
    optimizer = wrapped(model, compression="minmax_u8", hierarchical=False)
    train(model, optimizer, range(1))
    states = saved(model, optimizer)
    train(model, optimizer, range(1, 2 * W))
    first = [param.detach().clone() for param in model.parameters()]
    load(model, optimizer, states)
    train(model, optimizer, range(1, 2 * W))
    assert all(map(torch.equal, model.parameters(), first))


def what_it_cannot_train_is_refused_with_names(rank: int) -> None:
    model = net()
    some = QAdamOptimizer(model[0].parameters())
    with pytest.raises(ValueError, match=r"does not have the parameters \['2.weight', '2.bias'\]"):
        model.with_bagua([some], QAdamAlgorithm(some))
    with pytest.raises(ValueError, match="among its optimizers"):
        model.with_bagua([], QAdamAlgorithm(q_adam(model)))
    double = net().double()
    optimizer = q_adam(double)
    with pytest.raises(TypeError, match=r"parameter '2.bias': .*float64"):
        double.with_bagua([optimizer], QAdamAlgorithm(optimizer))
    embedding = torch.nn.Embedding(4, 3, sparse=True)
    optimizer = QAdamOptimizer(embedding.parameters())
    with pytest.raises(NotImplementedError, match="sparse gradients"):
        embedding.with_bagua([optimizer], QAdamAlgorithm(optimizer))


def an_algorithm_object_serves_one_model(rank: int) -> None:
    model, other = net(), net()
    optimizer = QAdamOptimizer([*model.parameters(), *other.parameters()], warmup_steps=W)
    algorithm = QAdamAlgorithm(optimizer)
    model.with_bagua([optimizer], algorithm)
    with pytest.raises(ValueError, match="serves a Sequential already: make one QAdamAlgorithm"):
        other.with_bagua([optimizer], algorithm)
    model.with_bagua([optimizer], algorithm)
    train(model, optimizer, range(W + 1))


def grad_scaler_is_refused_after_the_warm_up_only(rank: int) -> None:
    for unscale in (False, True):
        model = net()
        optimizer = wrapped(model)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        skipped = 0
        for step in range(W + 1):
            optimizer.zero_grad()
            loss = loss_of(model, rank, step)
            if step == 1 and rank == bagua_torch.get_world_size() - 1:
                loss = loss * float("inf")
            scaler.scale(loss).backward()
            before = optimizer.steps
            scaler.step(optimizer)
            scaler.update()
            skipped += optimizer.steps == before
        assert skipped == 1, "an overflow on one rank is everybody's"
        assert optimizer.steps == W
        expected = [param.detach().clone() for param in model.parameters()]
        moments = moments_of(optimizer)
        optimizer.zero_grad()
        scaler.scale(loss_of(model, rank, 9)).backward()
        if unscale:
            scaler.unscale_(optimizer)
        with pytest.raises(BaguaError, match="GradScaler"):
            scaler.step(optimizer)
        assert all(map(torch.equal, model.parameters(), expected))
        assert all(map(torch.equal, moments_of(optimizer), moments))
        off = torch.amp.GradScaler("cpu", enabled=False)
        optimizer.zero_grad()
        off.scale(loss_of(model, rank, 10)).backward()
        off.step(optimizer)
        assert optimizer.steps == W + 1


def a_step_without_an_exchange_is_an_error(rank: int) -> None:
    model = net()
    optimizer = wrapped(model)
    train(model, optimizer, range(W + 1))
    before = [param.detach().clone() for param in model.parameters()]
    with pytest.raises(BaguaError, match="that the other ranks have not seen"):
        optimizer.step()
    for dropped in (False, True):
        optimizer.zero_grad()
        loss_of(model, rank, 2).backward()
        if dropped:
            optimizer.zero_grad()
            optimizer.step()
        with model.bagua_ddp.no_sync():
            loss_of(model, rank, 3).backward()
        with pytest.raises(BaguaError, match="backward outside no_sync"):
            optimizer.step()
    assert all(map(torch.equal, model.parameters(), before))
    train(model, optimizer, range(W + 1, W + 2))
    assert same_everywhere(*model.parameters())


CASES = cases_in(globals())


test_qadam = each_case(CASES, 1, *HOSTED, timeout=60)
