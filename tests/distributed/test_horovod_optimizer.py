"""hvd.DistributedOptimizer: against plain torch with all ranks' losses averaged, and what it refuses."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import bagua.horovod.torch as hvd
import bagua.torch_api
from tests.distributed.torch_ranks import cases_in, each_case, same_everywhere

RANKS = 3
STEPS = 4


class Branches(nn.Module):
    """A rank chooses which of two layers comes before the last one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.left, self.right, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor, left: bool = True) -> torch.Tensor:
        output: torch.Tensor = self.last((self.left if left else self.right)(x).tanh())
        return output


def batch(rank: int, step: int) -> torch.Tensor:
    return torch.randn(5, 4, generator=torch.Generator().manual_seed(10 * step + rank))


def loss_of(model: nn.Module, rank: int, step: int, **options: Any) -> torch.Tensor:
    loss: torch.Tensor = model(batch(rank, step), **options).square().mean()
    return loss


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.3, momentum=0.9, weight_decay=0.01),
    "adam": lambda params: torch.optim.Adam(params, lr=0.05),
}


def by_torch(
    kind: str, passes: int = 1, scale: float = 1 / RANKS, clip: float | None = None, left: Any = lambda rank: True
) -> list[torch.Tensor]:
    """The weights after training in one process on the sum of all ranks' losses times `scale`."""
    model = Branches()
    optimizer = OPTIMIZERS[kind](model.parameters())
    for step in range(STEPS):
        optimizer.zero_grad()
        for rank, turn in itertools.product(range(RANKS), range(passes)):
            (loss_of(model, rank, 100 * turn + step, left=left(rank)) * scale).backward()
        for param in model.parameters():
            # Zeros where no rank had a gradient, as Horovod has them.
            param.grad = torch.zeros_like(param) if param.grad is None else param.grad
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
    return [param.detach() for param in model.parameters()]


def by_ranks(
    rank: int, kind: str, passes: int = 1, left: Any = lambda rank: True, model: nn.Module | None = None, **options: Any
) -> list[torch.Tensor]:
    """The weights after training with DistributedOptimizer."""
    model = model or Branches()
    optimizer = hvd.DistributedOptimizer(
        OPTIMIZERS[kind](model.parameters()), backward_passes_per_step=passes, **options
    )
    for step in range(STEPS):
        optimizer.zero_grad()
        for turn in range(passes):
            loss_of(model, rank, 100 * turn + step, left=left(rank)).backward()
        optimizer.step()
    return [param.detach() for param in model.parameters()]


def close(found: list[torch.Tensor], expected: list[torch.Tensor], **tolerance: float) -> None:
    assert same_everywhere(*found)
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, **tolerance)


def a_layer_that_one_rank_leaves_out_counts_as_zeros_there(rank: int) -> None:
    for choose in (lambda r: r != 1, lambda r: r == 2):
        for kind in OPTIMIZERS:
            close(by_ranks(rank, kind, left=choose), by_torch(kind, left=choose))


def gradients_of_several_backward_passes_add_up(rank: int) -> None:
    close(by_ranks(rank, "sgd", passes=3), by_torch("sgd", passes=3))
    # A rank that chooses another layer in the second of two passes.
    model = Branches()
    optimizer = hvd.DistributedOptimizer(OPTIMIZERS["sgd"](model.parameters()))
    optimizer.set_backward_passes_per_step(2)
    plain = Branches()
    for turn in range(2):
        loss_of(model, rank, turn, left=turn == 0 or rank != 0).backward()
        for other in range(RANKS):
            (loss_of(plain, other, turn, left=turn == 0 or other != 0) / RANKS).backward()
    optimizer.synchronize()
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)


def compression_operations_and_factors(rank: int) -> None:
    expected = by_torch("sgd")
    close(by_ranks(rank, "sgd", gradient_predivide_factor=2.0), expected)
    close(by_ranks(rank, "sgd", op=hvd.Sum), by_torch("sgd", scale=1.0))
    close(by_ranks(rank, "sgd", compression=hvd.Compression.fp16), expected, atol=2e-3, rtol=2e-3)
    model = Branches()
    close(by_ranks(rank, "sgd", model=model, named_parameters=model.named_parameters()), expected)


def gradients_can_be_clipped_between_synchronize_and_step(rank: int) -> None:
    model = Branches()
    optimizer = hvd.DistributedOptimizer(OPTIMIZERS["sgd"](model.parameters()))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in range(STEPS):
            optimizer.zero_grad()
            loss_of(model, rank, step).backward()
            optimizer.synchronize()
            nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            with optimizer.skip_synchronize():
                optimizer.step()
    close([param.detach() for param in model.parameters()], by_torch("sgd", clip=0.05))


def a_step_after_synchronize_warns(rank: int) -> None:
    model = Branches()
    optimizer = hvd.DistributedOptimizer(OPTIMIZERS["sgd"](model.parameters()))
    loss_of(model, rank, 0).backward()
    optimizer.synchronize()
    with pytest.warns(UserWarning, match="skip_synchronize"):
        optimizer.step()
    optimizer.zero_grad()
    loss_of(model, rank, 1).backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()


def the_optimizer_stays_one_of_its_class(rank: int) -> None:
    model = Branches()
    inner = torch.optim.Adam(model.parameters(), lr=0.5)
    optimizer = hvd.DistributedOptimizer(inner)
    assert isinstance(optimizer, torch.optim.Adam)
    assert type(optimizer).__name__ == "Adam"
    assert optimizer.param_groups is inner.param_groups
    steps = []
    optimizer.register_step_pre_hook(lambda *_: steps.append("before"))
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.1)
    loss_of(model, rank, 0).backward()
    optimizer.step()
    schedule.step()
    optimizer.zero_grad()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.05)
    optimizer.load_state_dict(optimizer.state_dict())
    loss_of(model, rank, 1).backward()
    optimizer.step()
    assert steps == ["before"] * 2
    assert optimizer.state_dict()["state"][0]["step"] == 2
    assert same_everywhere(*model.parameters())


def a_closure_sees_its_gradients_reduced(rank: int) -> None:
    model = Branches()
    optimizer = hvd.DistributedOptimizer(OPTIMIZERS["sgd"](model.parameters()))
    for step in range(STEPS):

        def closure(step: int = step) -> torch.Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, rank, step)
            loss.backward()
            return loss

        assert float(optimizer.step(closure)) > 0
    close([param.detach() for param in model.parameters()], by_torch("sgd"))


def sparse_gradients_are_refused(rank: int) -> None:
    table = nn.Embedding(6, 2, sparse=True)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(table.parameters(), lr=1.0), named_parameters=[("table", table.weight)]
    )
    with pytest.raises(NotImplementedError, match="parameter 'table' is sparse"):
        table(torch.tensor([rank])).sum().backward()
    assert isinstance(optimizer, torch.optim.SGD)


def parameters_that_are_unfrozen_later_are_reduced_and_frozen_ones_left_alone(rank: int) -> None:
    model, plain = Branches(), Branches()
    model.left.requires_grad_(False)
    optimizer = hvd.DistributedOptimizer(OPTIMIZERS["sgd"](model.parameters()))
    alone = OPTIMIZERS["sgd"](plain.parameters())
    for step in range(3 * STEPS):
        for either in (model, plain):
            either.left.requires_grad_(step >= STEPS)
            either.last.requires_grad_(step < 2 * STEPS)
        optimizer.zero_grad()
        loss_of(model, rank, step).backward()
        optimizer.step()
        alone.zero_grad()
        for other in range(RANKS):
            (loss_of(plain, other, step) / RANKS).backward()
        for param in plain.right.parameters():
            param.grad = torch.zeros_like(param)
        alone.step()
    close([param.detach() for param in model.parameters()], [param.detach() for param in plain.parameters()])


def one_backward_too_many_and_zero_grad_too_early_are_errors(rank: int) -> None:
    model = Branches()
    optimizer = hvd.DistributedOptimizer(
        OPTIMIZERS["sgd"](model.parameters()), named_parameters=model.named_parameters()
    )
    loss_of(model, rank, 0).backward()
    with pytest.raises(AssertionError, match=r"step\(\) or optimizer.synchronize\(\)"):
        optimizer.zero_grad()
    with pytest.raises(AssertionError, match="raise backward_passes_per_step"):
        loss_of(model, rank, 0).backward()
    optimizer.step()
    optimizer.zero_grad()
    optimizer.set_backward_passes_per_step(2)
    # What was accumulated is dropped with its count.
    loss_of(model, rank, 0).backward()
    optimizer.zero_grad()
    for _ in range(2):
        loss_of(model, rank, 0).backward()
    optimizer.step()
    assert same_everywhere(*model.parameters())


def wrong_arguments_are_refused_before_anything_is_sent(rank: int) -> None:
    if rank == 0:
        model = Branches()
        inner = OPTIMIZERS["sgd"](model.parameters())
        named = list(model.named_parameters())
        for error, text, options in (
            (ValueError, "at least 1, got 0", {"backward_passes_per_step": 0}),
            (TypeError, "op must be hvd.Average", {"op": "sum"}),
            (NotImplementedError, "hvd.Average", {"op": hvd.Adasum}),
            (ValueError, "needs op=hvd.Average", {"op": hvd.Sum, "gradient_predivide_factor": 2.0}),
            (ValueError, "must be positive", {"gradient_predivide_factor": 0.0}),
            (
                ValueError,
                "a name twice",
                {"named_parameters": [*named, ("left.weight", named[1][1])]},
            ),
            (ValueError, "lacks 1 of", {"named_parameters": named[:-1]}),
            (TypeError, "which has names", {"named_parameters": model.parameters()}),
            (NotImplementedError, r"groups=.* BAGUA_DEFAULT_BUCKET_SIZE", {"groups": 2}),
            (NotImplementedError, "BAGUA_DEFAULT_BUCKET_SIZE", {"num_groups": 2}),
            (NotImplementedError, "nn.Embedding", {"sparse_as_dense": True}),
            (NotImplementedError, "with_bagua", {"process_set": [0]}),
        ):
            with pytest.raises(error, match=text):
                hvd.DistributedOptimizer(inner, **options)
        with pytest.raises(TypeError, match=r"torch.optim.Optimizer"):
            hvd.DistributedOptimizer(model)  # type: ignore[type-var]
        with pytest.raises(ValueError, match="already"):
            hvd.DistributedOptimizer(hvd.DistributedOptimizer(inner))
        assert not any(param._post_accumulate_grad_hooks for param in model.parameters())


def parameters_of_a_wrapped_model_are_refused(rank: int) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    bagua.torch_api.with_bagua(model, [optimizer], "gradient_allreduce")
    with pytest.raises(ValueError, match=r"communicated by model 'Linear_\d+' already"):
        hvd.DistributedOptimizer(optimizer)
    bagua.torch_api.unwrap(model)
    hvd.DistributedOptimizer(optimizer)


CASES = cases_in(globals())


def begin(rank: int) -> None:
    hvd.init()


test_on_three_ranks = each_case(CASES, RANKS)
