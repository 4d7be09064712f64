"""The optimizers that aggregate, and the functions that they use: acceptance checks A25 to A27."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import bagua.torch_api as bagua
from bagua.aggregation import global_average
from bagua.aggregation.optim import (
    CentralizedAdam,
    CentralizedSGD,
    CustomCentralizedOptimizer,
    DecentralizedSGD,
    FP16Optimizer,
    PowerSGD,
    SignSGD,
    SparsifiedSGD,
)
from tests.distributed.aggregation_ranks import assert_close, each_case, everybodys, numbers
from tests.distributed.torch_ranks import cases_in, same_everywhere

BATCH = 3


def net(seed: int = 5) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Tanh(), torch.nn.Linear(6, 2))


def loss_of(model: torch.nn.Module, ranks: list[int], step: int) -> torch.Tensor:
    """The mean over the batches of some ranks."""
    data = torch.cat([numbers(rank, (BATCH, 6), 1000 + step) for rank in ranks])
    return (model(data[:, :4]) - data[:, 4:]).square().mean()


def weights(model: torch.nn.Module) -> list[torch.Tensor]:
    return [parameter.detach() for parameter in model.parameters()]


def train(model: torch.nn.Module, optimizer: Any, ranks: list[int], steps: int = 5) -> list[torch.Tensor]:
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(model, ranks, step).backward()
        optimizer.step()
    return weights(model)


def assert_weights_close(ours: list[torch.Tensor], theirs: list[torch.Tensor], atol: float = 1e-6) -> None:
    for one, other in zip(ours, theirs, strict=True):
        assert_close(one, other, rtol=0, atol=atol)


def a25_aggregated_gradients_train_as_on_the_whole_batch(rank: int) -> None:
    size = bagua.get_world_size()
    everybody = list(range(size))
    kinds: list[tuple[Callable[[Any], Any], Callable[[Any], Any]]] = [
        (
            lambda m: CentralizedSGD(size, m, lr=0.1, momentum=0.9, weight_decay=0.01, nesterov=True),
            lambda p: torch.optim.SGD(p, 0.1, 0.9, weight_decay=0.01, nesterov=True),
        ),
        (lambda m: CentralizedSGD(size, m, 0.1, by_layer=True, group="torch"), lambda p: torch.optim.SGD(p, 0.1)),
        # A large epsilon, as Adam makes a whole step of a gradient that is only rounding.
        (lambda m: CentralizedAdam(size, m, lr=0.01, eps=1e-3), lambda p: torch.optim.Adam(p, 0.01, eps=1e-3)),
    ]
    for ours, theirs in kinds:
        model, reference = net(), net()
        found = train(model, ours(model), [rank])
        assert_weights_close(found, train(reference, theirs(reference.parameters()), everybody))
        assert same_everywhere(*found)


def a25_aggregated_weights_make_replicas_equal_from_the_start(rank: int) -> None:
    size = bagua.get_world_size()
    model = net(seed=rank)
    optimizer = CentralizedSGD(size, model, lr=0.1, momentum=0.9, agg_grad=False)
    assert same_everywhere(*weights(model))
    for step in range(3):
        optimizer.zero_grad()
        loss_of(model, [rank], step).backward()
        optimizer.step()
        assert same_everywhere(*weights(model))


def a25_what_is_clipped_is_the_aggregated_gradient(rank: int) -> None:
    size = bagua.get_world_size()
    model = net()
    optimizer = CustomCentralizedOptimizer(
        model, size, torch.optim.SGD(model.parameters(), lr=0.1), grad_clip=0.01, average_world=True
    )
    loss_of(model, [rank], 0).backward()
    assert optimizer.step() is True
    norm = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]).norm()
    assert_close(norm, torch.tensor(0.01), rtol=1e-3, atol=0)


def a25_the_custom_optimizer_divides_by_the_callers_denominator(rank: int) -> None:
    size = bagua.get_world_size()
    for agg_grad in (True, False):
        model, reference = net(), net()
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        if agg_grad:
            custom = CustomCentralizedOptimizer(model, size, sgd, average_custom=True)
        else:
            custom = CustomCentralizedOptimizer(model, size, sgd, agg_grad=False, average_custom=True)
        loss_of(model, [rank], 0).backward()
        custom.step(denom=torch.tensor(float(size)))
        expected = train(reference, torch.optim.SGD(reference.parameters(), lr=0.1), list(range(size)), steps=1)
        assert_weights_close(weights(model), expected)
        with pytest.raises(ValueError, match="denominator"):
            custom.step()
    with pytest.raises(NotImplementedError):
        CustomCentralizedOptimizer(model, size, sgd)


def a25_a_closure_is_evaluated_before_its_gradients_travel(rank: int) -> None:
    size = bagua.get_world_size()
    models = [net(), net()]
    for model, with_closure in zip(models, (False, True), strict=True):
        optimizer = CentralizedSGD(size, model, lr=0.1)

        def closure(model: Any = model, optimizer: Any = optimizer) -> torch.Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, [rank], 0)
            loss.backward()
            return loss

        calls: list[str] = []
        loss = optimizer.step(closure, Tracker(calls)) if with_closure else (closure(), optimizer.step())[0]
        assert float(loss) == float(loss_of(net(), [rank], 0))
        assert calls == (["agg", "step"] if with_closure else [])
    assert_weights_close(weights(models[0]), weights(models[1]))
    assert same_everywhere(*weights(models[1]))


class Tracker:
    """Records its calls."""

    def __init__(self, calls: list[str]) -> None:
        self.calls = calls

    def record_batch_agg(self) -> None:
        self.calls.append("agg")

    def record_batch_opt_step(self) -> None:
        self.calls.append("step")


def power_sgd_at_full_rank_trains_as_on_the_whole_batch(rank: int) -> None:
    size = bagua.get_world_size()
    model, reference = net(), net()
    # Without the ranks' disagreement in the memory, full rank is exact in every step.
    optimizer = PowerSGD(model, lr=0.1, momentum=0.9, world_size=size, rank=6)
    optimizer.aggregation.memory = "local"
    found = train(model, optimizer, [rank])
    expected = train(reference, torch.optim.SGD(reference.parameters(), 0.1, 0.9), list(range(size)))
    assert_weights_close(found, expected, atol=1e-5)
    assert same_everywhere(*found)


def decentralized_sgd_steps_alone_and_averages_with_neighbours(rank: int) -> None:
    size = bagua.get_world_size()
    model, alone = net(seed=rank), net(seed=rank)
    train(alone, torch.optim.SGD(alone.parameters(), 0.1), [rank], steps=1)
    neighbors = sorted({(rank - 1) % size, (rank + 1) % size} - {rank})
    optimizer = DecentralizedSGD(rank, neighbors, model, lr=0.1)
    train(model, optimizer, [rank], steps=1)
    for one, before in zip(weights(model), weights(alone), strict=True):
        expected = everybodys(before)[[rank, *neighbors]].mean(0)
        assert_close(one, expected, rtol=0, atol=1e-6)
    for missing in ({"rank": None}, {"neighbors": None}, {"model": None}, {"lr": None}):
        with pytest.raises(ValueError, match=next(iter(missing))):
            DecentralizedSGD(**({"rank": rank, "neighbors": [], "model": model, "lr": 0.1} | missing))


def sparsified_sgd_keeps_replicas_equal_and_loses_nothing(rank: int) -> None:
    for options in ({}, {"random_sparse": True}, {"method": "top_k", "sparse_grad_size": 0.2}):
        model = net()
        start = [weight.clone() for weight in weights(model)]
        optimizer = SparsifiedSGD(model.parameters(), lr=0.1, **({"sparse_grad_size": 3} | options))
        given = [torch.zeros_like(weight) for weight in start]
        for step in range(4):
            optimizer.param_groups[0]["lr"] = 0.1 / (step + 1)
            optimizer.zero_grad()
            loss_of(model, [rank], step).backward()
            for total, parameter in zip(given, model.parameters(), strict=True):
                assert parameter.grad is not None
                total += 0.1 / (step + 1) * parameter.grad
            optimizer.step()
            optimizer.update_estimated_weights(step, 3)
        assert same_everywhere(*weights(model))
        for old, new, total, memory in zip(start, weights(model), given, optimizer.aggregation.memories, strict=True):
            moved = old - new + everybodys(memory).mean(0)
            assert_close(moved, everybodys(total).mean(0), rtol=0, atol=1e-6)


def estimated_weights_are_the_mean_with_quadratic_weights(rank: int) -> None:
    model = torch.nn.Linear(4, 1, bias=False)
    optimizer = SparsifiedSGD(model.parameters(), lr=0.1)
    iterates = [numbers(0, (1, 4), step) for step in range(5)]
    for step, iterate in enumerate(iterates):
        model.weight.detach().copy_(iterate)
        optimizer.update_estimated_weights(step, 2)
    shares = torch.tensor([(step + 4 / 2) ** 2 for step in range(5)])
    expected = torch.einsum("t,tij->ij", shares / shares.sum(), torch.stack(iterates))
    assert_close(optimizer.get_estimated_weights()[0], expected)


def sign_sgd_moves_by_the_majoritys_sign(rank: int) -> None:
    size = bagua.get_world_size()
    parameter = torch.nn.Parameter(torch.zeros(4))
    optimizer = SignSGD([parameter], lr=0.5, momentum=0.9, world_size=size)
    parameter.grad = torch.tensor([-3.0, 1e-6 if rank == 0 else 2.0, 0.0, 5.0 if rank == 0 else -0.1])
    optimizer.step()
    votes = 1 - (size - 1)
    last = -0.5 * ((votes > 0) - (votes < 0))
    assert parameter.detach().tolist() == [0.5, -0.5, 0.0, last]
    alone = torch.nn.Parameter(torch.zeros(2))
    SignSGD([alone], lr=0.5).step()
    assert alone.detach().tolist() == [0.0, 0.0]
    alone.grad = torch.tensor([float(rank) - 0.5, 1.0])
    SignSGD([alone], lr=0.5).step()
    assert alone.detach().tolist() == [0.5 if rank == 0 else -0.5, -0.5]


def a26_the_global_average_is_weighted_by_counts(rank: int) -> None:
    size = bagua.get_world_size()
    sums, counts = [2.5 * r + 1 for r in range(size)], [r + 1 for r in range(size)]
    for group in (None, "torch"):
        for wrap in (lambda x: x, torch.tensor):
            found = global_average(wrap(sums[rank]), wrap(counts[rank]), group=group)
            assert found.shape == ()
            assert found.dtype is torch.float32
            assert_close(found, torch.tensor(sum(sums) / sum(counts)))


def half_precision(rank: int, **options: Any) -> tuple[torch.nn.Module, FP16Optimizer]:
    model = net().half()
    optimizer = FP16Optimizer(model, bagua.get_world_size(), average_world=True, **options)
    optimizer.set_optimizer(torch.optim.SGD([optimizer.fp32_params], lr=0.1))
    return model, optimizer


def half_loss(model: torch.nn.Module, rank: int, step: int) -> torch.Tensor:
    data = numbers(rank, (BATCH, 6), 1000 + step).half()
    return (model(data[:, :4]) - data[:, 4:]).float().square().mean()


def a27_an_overflow_on_one_rank_makes_all_skip(rank: int) -> None:
    size = bagua.get_world_size()
    for options in ({}, {"by_layer": True}, {"divide_before": True}, {"use_horovod": True}):
        model, optimizer = half_precision(rank, **options)
        kept = [weight.clone() for weight in weights(model)]
        optimizer.backward_loss(half_loss(model, rank, 0))
        if rank == size - 1:
            next(model.parameters()).grad[0, 0] = torch.inf  # type: ignore[index]
        assert optimizer.step() is False
        assert optimizer.loss_scaler.loss_scale == 512
        assert all(torch.equal(one, other) for one, other in zip(weights(model), kept, strict=True))
        optimizer.zero_grad()
        optimizer.backward_loss(half_loss(model, rank, 0))
        assert optimizer.step() is True
        assert not torch.equal(weights(model)[0], kept[0])
        assert same_everywhere(*weights(model), optimizer.fp32_params)


def a27_half_precision_training_follows_single_precision(rank: int) -> None:
    size = bagua.get_world_size()
    model, optimizer = half_precision(rank)
    reference = net().half().float()
    for step in range(10):
        optimizer.zero_grad()
        optimizer.backward_loss(half_loss(model, rank, step))
        assert optimizer.step()
    expected = train(reference, torch.optim.SGD(reference.parameters(), 0.1), list(range(size)), steps=10)
    for one, other in zip(weights(model), expected, strict=True):
        assert_close(one.float(), other, rtol=0, atol=5e-3)


def a27_the_scale_grows_again_and_ends_at_its_minimum(rank: int) -> None:
    model, optimizer = half_precision(rank, scale_window=2, max_scale=2048)
    scales = []
    for step in range(5):
        optimizer.zero_grad()
        optimizer.backward_loss(half_loss(model, rank, step))
        optimizer.step()
        scales.append(optimizer.loss_scaler.loss_scale)
    assert scales == [1024, 2048, 2048, 2048, 2048]
    model, optimizer = half_precision(rank, min_scale=512)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, torch.nan)
    with pytest.raises(FloatingPointError, match="512"):
        optimizer.step()
    with pytest.raises(ValueError, match="fp32_params"):
        optimizer.set_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(ValueError, match="set_optimizer"):
        FP16Optimizer(model, 1, average_world=True).step()
    with pytest.raises(NotImplementedError):
        FP16Optimizer(model, 1)


CASES = cases_in(globals())

test_optim = each_case(CASES)
