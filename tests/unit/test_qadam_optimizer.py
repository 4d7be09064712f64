"""QAdamOptimizer without any communication: Adam to the bit in its warm-up, then the formulas, computed with NumPy."""

from __future__ import annotations

import copy
import io
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

import bagua.torch_api as bagua
from bagua.errors import BaguaError
from bagua.torch_api.algorithms.q_adam import QAdamAlgorithm, QAdamOptimizer

W = 4

Values = npt.NDArray[Any]


def parameters(dtype: torch.dtype = torch.float32) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(3)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in ((5, 3), (7,), (1, 2))]


def groups(params: list[torch.nn.Parameter]) -> list[dict[str, Any]]:
    """Two groups with numbers of their own."""
    return [
        {"params": params[:2], "weight_decay": 0.1},
        {"params": params[2:], "lr": 0.02, "betas": (0.8, 0.95), "eps": 1e-4},
    ]


def give_gradients(params: list[torch.nn.Parameter], step: int, without: int | None = None) -> None:
    generator = torch.Generator().manual_seed(100 + step)
    for number, param in enumerate(params):
        grad = torch.randn(param.shape, generator=generator).to(param.dtype)
        param.grad = None if number == without else grad


def train(optimizer: torch.optim.Optimizer, params: list[torch.nn.Parameter], steps: range) -> None:
    for step in steps:
        give_gradients(params, step)
        optimizer.step()


def equal(mine: Sequence[torch.Tensor], theirs: Sequence[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


class OneParameter:
    """QAdam of one parameter in float64, from the formulas."""

    def __init__(self, start: torch.Tensor, lr: float, betas: tuple[float, float], eps: float, decay: float) -> None:
        self.p: Values = start.detach().double().numpy().copy()
        self.m, self.v = np.zeros_like(self.p), np.zeros_like(self.p)
        self.lr, (self.b1, self.b2), self.eps, self.decay = lr, betas, eps, decay
        self.t = 0

    def step(self, grad: torch.Tensor) -> None:
        self.t += 1
        g = grad.double().numpy() + self.decay * self.p
        self.m = self.b1 * self.m + (1 - self.b1) * g
        if self.t <= W:
            self.v = self.b2 * self.v + (1 - self.b2) * g * g
        v = self.v / (1 - self.b2 ** min(self.t, W))
        self.p = self.p - self.lr / (1 - self.b1**self.t) * self.m / (np.sqrt(v) + self.eps)

    def legacy_step(self, grad: torch.Tensor, beta1_of_group_0: float) -> None:
        self.t += 1
        g = grad.double().numpy()
        if self.t < W:
            g = g + self.decay * self.p
            self.m = self.b1 * self.m + (1 - self.b1) * g
            self.v = self.b2 * self.v + (1 - self.b2) * g * g
        elif self.t > W:
            self.m = beta1_of_group_0 * self.m + (1 - beta1_of_group_0) * g
        v = self.v / (1 - self.b2**self.t)
        self.p = self.p - self.lr / (1 - self.b1**self.t) * self.m / (np.sqrt(v) + self.eps)


def simulated(params: list[torch.nn.Parameter]) -> list[OneParameter]:
    """The parameters with the numbers of :func:`groups`."""
    first = [OneParameter(param, 0.01, (0.9, 0.99), 1e-8, 0.1) for param in params[:2]]
    return [*first, *(OneParameter(param, 0.02, (0.8, 0.95), 1e-4, 0.0) for param in params[2:])]


def optimizer_of(params: list[torch.nn.Parameter], **options: Any) -> QAdamOptimizer:
    return QAdamOptimizer(groups(params), lr=0.01, betas=(0.9, 0.99), warmup_steps=W, **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_warm_up_is_adam_bit_for_bit(dtype: torch.dtype) -> None:
    mine, theirs = parameters(dtype), parameters(dtype)
    optimizer = QAdamOptimizer(groups(mine), lr=0.01, betas=(0.9, 0.99), warmup_steps=W)
    adam = torch.optim.Adam(groups(theirs), lr=0.01, betas=(0.9, 0.99), foreach=False)
    for step in range(W + 1):
        for params, one in ((mine, optimizer), (theirs, adam)):
            give_gradients(params, step, without=1 if step == 2 else None)
            one.step()
        assert equal(mine, theirs) == (step < W), "step W is Adam's too, the next one is not"


def test_after_the_warm_up_the_second_moment_and_its_bias_correction_stay() -> None:
    params = parameters()
    optimizer, expected = optimizer_of(params), simulated(params)
    for step in range(3 * W):
        give_gradients(params, step)
        for one, param in zip(expected, params, strict=True):
            one.step(param.grad)
        optimizer.step()
        for one, param in zip(expected, params, strict=True):
            np.testing.assert_allclose(param.detach().numpy(), one.p, rtol=1e-5, atol=1e-6)
    for one, param in zip(expected, params, strict=True):
        np.testing.assert_allclose(optimizer.state[param]["exp_avg_sq"].numpy(), one.v, rtol=1e-5)
        np.testing.assert_allclose(optimizer.state[param]["exp_avg"].numpy(), one.m, rtol=1e-4, atol=1e-6)


def test_legacy_is_the_arithmetic_of_the_original() -> None:
    params = parameters()
    optimizer, expected = optimizer_of(params, legacy=True), simulated(params)
    for step in range(3 * W):
        give_gradients(params, step)
        for one, param in zip(expected, params, strict=True):
            one.legacy_step(param.grad, 0.9)
        optimizer.step()
        for one, param in zip(expected, params, strict=True):
            np.testing.assert_allclose(param.detach().numpy(), one.p, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("saved_after", [1, W - 1, W, W + 1, 2 * W])
@pytest.mark.parametrize("legacy", [False, True])
def test_a_resumed_run_goes_on_bit_for_bit(saved_after: int, legacy: bool) -> None:
    params = parameters()
    optimizer = optimizer_of(params, legacy=legacy)
    train(optimizer, params, range(saved_after))
    file = io.BytesIO()
    torch.save([optimizer.state_dict(), [param.data for param in params]], file)
    train(optimizer, params, range(saved_after, 3 * W))
    file.seek(0)
    state, values = torch.load(file, weights_only=True)
    resumed = [torch.nn.Parameter(value) for value in values]
    other = optimizer_of(resumed, legacy=legacy)
    other.load_state_dict(state)
    assert other.steps == saved_after
    train(other, resumed, range(saved_after, 3 * W))
    assert equal(params, resumed)


def test_an_earlier_state_brings_the_warm_up_back() -> None:
    params = parameters()
    optimizer = optimizer_of(params)
    train(optimizer, params, range(2))
    state, values = copy.deepcopy(optimizer.state_dict()), [param.detach().clone() for param in params]
    train(optimizer, params, range(2, W + 2))
    first = [param.detach().clone() for param in params]
    assert optimizer.warmed_up
    optimizer.load_state_dict(state)
    assert not optimizer.warmed_up
    with torch.no_grad():
        for param, value in zip(params, values, strict=True):
            param.copy_(value)
    train(optimizer, params, range(2, W + 2))
    assert equal(params, first)


def test_a_parameter_without_a_gradient_stays() -> None:
    params = parameters()
    optimizer = optimizer_of(params)
    train(optimizer, params, range(W + 1))
    before = params[1].detach().clone()
    moment = optimizer.state[params[1]]["exp_avg"].clone()
    give_gradients(params, W + 1, without=1)
    other = params[0].detach().clone()
    optimizer.step()
    assert torch.equal(params[1], before)
    assert torch.equal(optimizer.state[params[1]]["exp_avg"], moment)
    assert not torch.equal(params[0], other)


def test_a_first_gradient_after_the_warm_up_is_an_error_that_changes_nothing() -> None:
    params = parameters()
    optimizer = optimizer_of(params)
    for step in range(W):
        give_gradients(params, step, without=1)
        optimizer.step()
    before = [param.detach().clone() for param in params]
    give_gradients(params, W)
    with pytest.raises(BaguaError, match=r"shape \[7\] got its first gradient after the 4 warm-up steps"):
        optimizer.step()
    assert equal(params, before)
    assert optimizer.steps == W


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"warmup_steps": 0}, "warmup_steps must be a positive int, not 0"),
        ({"warmup_steps": 2.5}, "warmup_steps must be a positive int, not 2.5"),
        ({"lr": -1.0}, "lr must not be negative"),
        ({"eps": -1.0}, "eps must not be negative"),
        ({"weight_decay": -0.1}, "weight_decay must not be negative"),
        ({"weight_decay": float("nan")}, "weight_decay must not be negative"),
        ({"betas": (0.9, 1.0)}, "betas must be two numbers"),
        ({"betas": (-0.1, 0.9)}, "betas must be two numbers"),
    ],
)
def test_numbers_out_of_range_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        QAdamOptimizer(parameters(), **options)


def test_complex_parameters_and_sparse_gradients_are_refused() -> None:
    with pytest.raises(TypeError, match="complex"):
        QAdamOptimizer([torch.nn.Parameter(torch.zeros(2, dtype=torch.complex64))])
    embedding = torch.nn.Embedding(3, 2, sparse=True)
    optimizer = QAdamOptimizer(embedding.parameters())
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(RuntimeError, match="dense gradients"):
        optimizer.step()


def test_the_algorithm_needs_a_qadam_optimizer_and_a_known_codec() -> None:
    with pytest.raises(TypeError, match="needs a QAdamOptimizer, not a Adam"):
        QAdamAlgorithm(torch.optim.Adam(parameters()))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="minmax_u8"):
        QAdamAlgorithm(QAdamOptimizer(parameters()), compression="nonsense")
    made = bagua.algorithms.Algorithm.init("qadam", q_adam_optimizer=QAdamOptimizer(parameters()))
    assert isinstance(made, bagua.algorithms.QAdamAlgorithm)


def test_it_cannot_be_fused() -> None:
    with pytest.raises(ValueError, match="QAdamOptimizer cannot be fused"):
        bagua.contrib.fuse_optimizer(QAdamOptimizer(parameters()))
