"""fuse_optimizer: the same numbers as the plain optimizer, bit for bit, whatever happens between two steps."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import optim

from bagua.torch_api.contrib import fuse_optimizer

Make = Callable[[Any], optim.Optimizer]

STEPS = 100

# The plain optimizer of these tests is torch's loop over parameters (foreach=False): it is what torch takes on the CPU
# anyhow, and the arithmetic that each element must see.
CONFIGURATIONS: dict[str, Make] = {
    name: functools.partial(kind, foreach=False, **options)
    for name, (kind, options) in {
        "sgd": (optim.SGD, {"lr": 0.1}),
        "sgd momentum": (optim.SGD, {"lr": 0.1, "momentum": 0.9}),
        "sgd nesterov": (optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
        "sgd dampening": (optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.1}),
        "adam": (optim.Adam, {"lr": 0.01}),
        "adam decay": (optim.Adam, {"lr": 0.01, "weight_decay": 0.1, "betas": (0.8, 0.99)}),
        "adam amsgrad": (optim.Adam, {"lr": 0.01, "amsgrad": True}),
        "adamw": (optim.AdamW, {"lr": 0.01}),
        "adamw amsgrad": (optim.AdamW, {"lr": 0.01, "amsgrad": True, "maximize": True}),
        "nadam": (optim.NAdam, {"lr": 0.01}),
        "radam": (optim.RAdam, {"lr": 0.01, "weight_decay": 0.1}),
        "adamax": (optim.Adamax, {"lr": 0.01}),
        "adagrad": (optim.Adagrad, {"lr": 0.1}),
        "adagrad decay": (optim.Adagrad, {"lr": 0.1, "lr_decay": 0.01, "initial_accumulator_value": 0.1}),
        "adadelta": (optim.Adadelta, {"lr": 1.0}),
        "rmsprop": (optim.RMSprop, {"lr": 0.01}),
        "rmsprop centered": (optim.RMSprop, {"lr": 0.01, "centered": True, "momentum": 0.9}),
        "rprop": (optim.Rprop, {"lr": 0.01}),
        "asgd": (optim.ASGD, {"lr": 0.01}),
        "asgd averaging": (optim.ASGD, {"lr": 0.01, "t0": 20, "lambd": 0.01, "weight_decay": 0.1}),
        "sgd momentum decay": (optim.SGD, {"lr": 0.05, "momentum": 0.5, "weight_decay": 0.1}),
    }.items()
}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """These tensors are too small for two."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Net(torch.nn.Module):
    """Odd sizes, so that a parameter ends in the middle of a vector register."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = torch.nn.Conv2d(1, 3, 3)
        self.norm = torch.nn.BatchNorm2d(3)
        self.first = torch.nn.Linear(27, 37)
        self.second = torch.nn.Linear(37, 5, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.norm(self.conv(x))).flatten(1)
        return self.second(torch.tanh(self.first(hidden)))


def twins(make: Make, **options: Any) -> tuple[Net, optim.Optimizer, Net, optim.Optimizer]:
    """The same network twice, the second with a fused optimizer; two groups of parameters each."""
    torch.manual_seed(3)
    plain = Net()
    fused = copy.deepcopy(plain)
    first, second = make(groups(plain)), make(groups(fused))
    return plain, first, fused, fuse_optimizer(second, **options)


def groups(model: Net) -> list[dict[str, Any]]:
    return [
        {"params": [*model.conv.parameters(), *model.norm.parameters()]},
        {"params": [*model.first.parameters(), *model.second.parameters()]},
    ]


def backward(model: torch.nn.Module, step: int) -> None:
    x = torch.randn(4, 1, 5, 5, generator=torch.Generator().manual_seed(step))
    model(x).square().mean().backward()


def gradients(model: torch.nn.Module, step: int) -> None:
    """As :func:`backward` would leave them, for less: a new tensor where there is none, else added in place."""
    for i, param in enumerate(model.parameters()):
        grad = torch.cos(param.detach() * (step + 1) + i)
        if param.grad is None:
            param.grad = grad
        else:
            param.grad.add_(grad)


def assert_equal(one: torch.nn.Module, other: torch.nn.Module) -> None:
    for (name, first), second in zip(one.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(first, second), name


def assert_equal_states(one: Any, other: Any, where: str = "state") -> None:
    assert type(one) is type(other), where
    if isinstance(one, dict):
        assert list(one) == list(other), where
        for key in one:
            assert_equal_states(one[key], other[key], f"{where}[{key!r}]")
    elif isinstance(one, list | tuple):
        for i, (first, second) in enumerate(zip(one, other, strict=True)):
            assert_equal_states(first, second, f"{where}[{i}]")
    elif isinstance(one, torch.Tensor):
        assert one.dtype == other.dtype, where
        assert torch.equal(one, other), where
    else:
        assert one == other, where


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_alternating_fused_and_plain_steps_equal_plain_steps(name: str, set_to_none: bool) -> None:
    plain, first, fused, second = twins(CONFIGURATIONS[name])
    for step in range(STEPS):
        for model, optimizer in ((plain, first), (fused, second)):
            optimizer.zero_grad(set_to_none=set_to_none)
            gradients(model, step)
        first.step()
        if step % 2 == 0:
            second.fuse_step()
        else:
            second.step()
        assert_equal(plain, fused)
    # Both groups, at every second step.
    assert second._bagua_fused_count == STEPS
    assert_equal_states(first.state_dict(), second.state_dict())
