"""fuse_optimizer: the same numbers as the plain optimizer, bit for bit, whatever happens between two steps."""

from __future__ import annotations

import copy
import functools
import io
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import optim

from bagua.torch_api.contrib import fuse_optimizer
from bagua.torch_api.contrib.fuse import is_fused_optimizer
from tests.cases import slow_but

Make = Callable[[Any], optim.Optimizer]

STEPS = 100

# The plain optimizer of these tests is torch's loop over parameters (foreach=False): it is what torch takes on the CPU
# anyhow, and the arithmetic that each element must see.
CONFIGURATIONS: dict[str, Make] = {
    name: functools.partial(kind, foreach=False, **options)  # type: ignore[arg-type]
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
#: One of each kind of state: none, one tensor, two and a step, with all options, and steps of each parameter.
QUICK = ("sgd", "sgd nesterov", "adam", "adamw amsgrad", "adagrad decay", "rprop", "asgd averaging")


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
    """Sets gradients like :func:`backward`, but faster: a new tensor if there is none, or else added in place."""
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


@pytest.mark.parametrize("set_to_none", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", slow_but(QUICK, CONFIGURATIONS))
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


def test_states_go_from_plain_to_fused_and_back() -> None:
    plain, first, fused, second = twins(CONFIGURATIONS["adam amsgrad"])
    for step in range(12):
        gradients(plain, step)
        gradients(fused, step)
        first.step()
        second.fuse_step()
        if step == 3:
            states = first.state_dict(), second.state_dict()
            room = io.BytesIO()
            torch.save(states, room)
            room.seek(0)
            of_plain, of_fused = torch.load(room, weights_only=True)
            second.load_state_dict(of_plain)
            first.load_state_dict(of_fused)
        if step == 6:
            fused.load_state_dict(plain.state_dict())
        assert_equal(plain, fused)
    assert_equal_states(first.state_dict(), second.state_dict())


def test_a_parameter_without_a_gradient_is_left_alone() -> None:
    plain, first, fused, second = twins(CONFIGURATIONS["adam"])
    for step in range(9):
        for model, optimizer in ((plain, first), (fused, second)):
            optimizer.zero_grad()
            gradients(model, step)
            if step % 3 == 1:
                model.first.bias.grad = None
            if step % 3 == 2:
                model.conv.weight.grad = None
        first.step()
        second.fuse_step()
        assert_equal(plain, fused)
    assert_equal_states(first.state_dict()["state"][4], second.state_dict()["state"][4])
    assert fused.first.bias in second.state


def test_parameters_that_move_are_brought_together_again() -> None:
    plain, first, fused, second = twins(CONFIGURATIONS["sgd momentum"])
    for step in range(4):
        gradients(plain, step)
        gradients(fused, step)
        first.step()
        second.fuse_step()
        fused.first.weight.data = fused.first.weight.data.clone()
    assert_equal(plain, fused)
    assert second._bagua_fused_count == 8


def test_options_and_groups_may_change_between_steps() -> None:
    plain, first, fused, second = twins(CONFIGURATIONS["adamw"])
    more = torch.nn.Parameter(torch.randn(5)), torch.nn.Parameter(torch.randn(6, 2))
    same = copy.deepcopy(more)
    schedules = [optim.lr_scheduler.StepLR(optimizer, 1, 0.5) for optimizer in (first, second)]
    for step in range(4):
        if step == 2:
            first.add_param_group({"params": list(more), "lr": 0.5})
            second.add_param_group({"params": list(same), "lr": 0.5})
        for param in (*more, *same):
            param.grad = torch.ones_like(param)
        gradients(plain, step)
        gradients(fused, step)
        first.step()
        second.fuse_step()
        for schedule in schedules:
            schedule.step()
    assert_equal(plain, fused)
    assert all(map(torch.equal, more, same))


def test_scalars_views_and_other_layouts_are_stepped_rightly() -> None:
    def parameters() -> list[torch.nn.Parameter]:
        torch.manual_seed(0)
        shared = torch.randn(4)
        return [
            torch.nn.Parameter(torch.tensor(3.0)),
            torch.nn.Parameter(torch.randn(2, 3, 4, 4).contiguous(memory_format=torch.channels_last)),
            torch.nn.Parameter(torch.randn(5, 3).t()),
            torch.nn.Parameter(shared[:3]),
            torch.nn.Parameter(shared[1:]),
            torch.nn.Parameter(torch.randn(4, dtype=torch.float64)),
            torch.nn.Parameter(torch.randn(7, dtype=torch.float64)),
            torch.nn.Parameter(torch.empty(0)),
        ]

    plain, fused = parameters(), parameters()
    first, second = optim.Adam(plain, lr=0.1), fuse_optimizer(optim.Adam(fused, lr=0.1))
    for step in range(4):
        for params in (plain, fused):
            for param in params:
                param.grad = torch.cos(param.detach() + step)
        first.step()
        second.fuse_step()
        for one, other in zip(plain, fused, strict=True):
            assert torch.equal(one, other)
            assert one.stride() == other.stride()
    assert second._bagua_fused_count == 4
    assert fused[3].data_ptr() + 4 == fused[4].data_ptr()


#: fused=True takes the scale and the overflow as attributes, and unscales within the step.
OWN_KERNEL = functools.partial(optim.AdamW, lr=0.01, fused=True)


@pytest.mark.parametrize(
    ("configuration", "unscale"),
    [(CONFIGURATIONS["adam"], False), (CONFIGURATIONS["adam"], True), (OWN_KERNEL, False)],
    ids=["adam", "adam, unscaled before", "torch's own kernel"],
)
def test_a_gradient_scaler_skips_what_overflowed(configuration: Any, unscale: bool) -> None:
    plain, first, fused, second = twins(configuration)
    scalers = [torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2) for _ in range(2)]
    for step in range(5):
        before = fused.first.weight.detach().clone()
        for model, optimizer, scaler in zip((plain, fused), (first, second), scalers, strict=True):
            optimizer.zero_grad()
            x = torch.randn(4, 1, 5, 5, generator=torch.Generator().manual_seed(step))
            scaler.scale(model(x).square().mean()).backward()
            if step == 2:
                model.first.bias.grad[0] = float("inf")
            if unscale:
                scaler.unscale_(optimizer)
            if optimizer is second:
                second.fuse_step(grad_scaler=scaler)
            else:
                scaler.step(optimizer)
            scaler.update()
        assert torch.equal(before, fused.first.weight) == (step == 2)
        if configuration is OWN_KERNEL:
            for one, other in zip(plain.parameters(), fused.parameters(), strict=True):
                torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)
        else:
            assert_equal(plain, fused)
    assert scalers[0].get_scale() == scalers[1].get_scale()
    # Four of five steps.
    if configuration is OWN_KERNEL:
        assert [float(entry["step"]) for entry in second.state_dict()["state"].values()] == [4.0] * 7
    else:
        assert second._bagua_fused_count == 4 * len(second.param_groups)


def test_hooks_and_closures_see_the_optimizer_itself() -> None:
    model = Net()
    optimizer = fuse_optimizer(optim.SGD(model.parameters(), lr=0.1))
    seen: list[object] = []
    optimizer.register_step_pre_hook(lambda who, args, kwargs: seen.append(who))
    optimizer.register_step_post_hook(lambda who, args, kwargs: seen.append(who))

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(torch.ones(2, 1, 5, 5)).sum()
        loss.backward()
        return loss

    assert isinstance(optimizer.fuse_step(closure), torch.Tensor)
    assert seen == [optimizer, optimizer]


class Lars(optim.Optimizer):
    """An update that is scaled by the norm of the whole parameter."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.add_(param.grad * param.norm() / param.grad.norm(), alpha=-group["lr"])


class Elementwise(optim.Optimizer):
    """A user's own, with a counter as a Python number."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    state = self.state[param]
                    state["step"] = state.get("step", 0) + 1
                    param.sub_(param.grad.sign(), alpha=group["lr"] / state["step"])


def test_what_is_not_element_wise_is_refused_with_the_reason() -> None:
    params = [torch.nn.Parameter(torch.randn(3, 3)) for _ in range(2)]
    before = torch.get_rng_state()
    for optimizer, reason in (
        (Lars(params, 0.1), "uses a norm"),
        (optim.LBFGS(params), "from all parameters at once"),
        (optim.SparseAdam(params), "sparse gradients"),
        (optim.Adam(params, differentiable=True), "differentiable=True"),
        *([(optim.Adafactor(params), "rows and columns")] if hasattr(optim, "Adafactor") else []),
        *([(optim.Muon(params), "orthogonalises")] if hasattr(optim, "Muon") else []),
    ):
        with pytest.raises(ValueError, match=reason):
            fuse_optimizer(optimizer)
        assert not is_fused_optimizer(optimizer)
    assert torch.equal(before, torch.get_rng_state())


def test_an_unknown_optimizer_that_is_element_wise_is_fused() -> None:
    plain, first, fused, second = twins(functools.partial(Elementwise, lr=0.1))
    for step in range(6):
        gradients(plain, step)
        gradients(fused, step)
        first.step()
        second.fuse_step() if step % 2 else second.step()
    assert_equal(plain, fused)
    assert second._bagua_fused_count == 6
    assert_equal_states(first.state_dict(), second.state_dict())


def test_fusing_twice_is_refused() -> None:
    optimizer = fuse_optimizer(optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=0.1))
    with pytest.raises(ValueError, match="fused already"):
        fuse_optimizer(optimizer)
    assert not is_fused_optimizer(copy.deepcopy(optimizer))


def test_a_sparse_gradient_is_refused_before_anything_changes() -> None:
    table, dense = torch.nn.Embedding(5, 2, sparse=True), torch.nn.Linear(2, 1)
    optimizer = fuse_optimizer(optim.SGD([*dense.parameters(), *table.parameters()], lr=0.1))
    dense(table(torch.tensor([1]))).sum().backward()
    before = [param.detach().clone() for param in dense.parameters()]
    with pytest.raises(NotImplementedError, match=r"parameter 2 of group 0, of shape .5, 2., is torch.sparse_coo"):
        optimizer.fuse_step()
    assert all(map(torch.equal, before, dense.parameters()))
    optimizer.step()
