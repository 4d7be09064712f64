"""powersgd on several ranks against a NumPy simulation of all of them, and against what the method promises.

That it resumes, and that an overflow makes every rank skip, is in test_algorithms_together.py.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

import bagua.torch_api as bagua_torch
from bagua.torch_api.algorithms.powersgd import PowerSGDAlgorithm
from tests.distributed.torch_ranks import HOSTED, cases_in, each_case, same_everywhere

Values = npt.NDArray[Any]

RANK = 2

SHAPES = {"matrix": (20, 30), "conv": (8, 4, 3, 3), "bias": (5,)}


class Given(torch.nn.Module):
    """Parameters whose gradients are what the forward is given."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        for name, shape in SHAPES.items():
            self.register_parameter(name, torch.nn.Parameter(torch.zeros(shape, dtype=dtype)))

    def forward(self, gradients: dict[str, torch.Tensor]) -> torch.Tensor:
        return sum(((getattr(self, name) * grad).sum() for name, grad in gradients.items()), torch.zeros(()))


class Simulated:
    """PowerSGD of one parameter on all ranks, in float64."""

    def __init__(self, name: str, warm: bool = True, feedback: bool = True, seed: int = 1) -> None:
        self.number = list(SHAPES).index(name)
        self.shape = SHAPES[name]
        self.n, self.m = self.shape[0], int(np.prod(self.shape[1:]))
        self.warm, self.feedback, self.seed = warm, feedback, seed
        self.round = 0
        self.q = self.drawn()
        self.errors = [np.zeros((self.n, self.m)) for _ in range(size())]

    def drawn(self) -> Values:
        return np.random.default_rng([self.seed, self.round, self.number]).standard_normal((self.m, RANK))

    def step(self, grads: Sequence[torch.Tensor]) -> Values:
        given = [g.double().numpy().reshape(self.n, self.m) + e for g, e in zip(grads, self.errors, strict=True)]
        p, _ = np.linalg.qr(sum(m @ self.q for m in given))
        factor = sum(m.T @ p for m in given) / len(given)
        if self.feedback:
            self.errors = [m - p @ (p.T @ m) for m in given]
        self.round += 1
        self.q = factor if self.warm else self.drawn()
        return (p @ factor.T).reshape(self.shape)


def size() -> int:
    return bagua_torch.get_world_size()


def gradients(rank: int, step: int, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in SHAPES.items()}


def wrapped(
    model: torch.nn.Module, algorithm: PowerSGDAlgorithm | None = None, **options: Any
) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    model.with_bagua([optimizer], algorithm or PowerSGDAlgorithm(RANK), **options)
    return optimizer


def averages(model: torch.nn.Module, given: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Returns each ``param.grad`` after a backward."""
    model.zero_grad()
    model(given).backward()
    return {name: param.grad.detach().clone() for name, param in model.named_parameters() if param.grad is not None}


def close(mine: torch.Tensor, theirs: Values | torch.Tensor, what: object = "", tolerance: float = 1e-5) -> None:
    expected = torch.as_tensor(theirs, dtype=torch.float64)
    scale = max(1.0, float(expected.abs().max()))
    torch.testing.assert_close(
        mine.double(), expected, rtol=0.0, atol=tolerance * scale, msg=lambda text: f"{what}: {text}"
    )


def rounds_equal_the_simulation(rank: int) -> None:
    if size() == 1:
        return
    for warm, feedback, do_flatten in (
        (True, True, True),
        (False, True, True),
        (True, False, True),
        (False, False, False),
        (True, True, False),
    ):
        model = Given()
        wrapped(model, PowerSGDAlgorithm(RANK, warm_start=warm, error_feedback=feedback, seed=7), do_flatten=do_flatten)
        assert model.bagua_algorithm.matrices == {"matrix": (20, 30, RANK), "conv": (8, 36, RANK)}
        expected = {name: Simulated(name, warm, feedback, 7) for name in ("matrix", "conv")}
        for step in range(5):
            what = f"{warm=} {feedback=} {do_flatten=} {step=}"
            everybody = [gradients(other, step) for other in range(size())]
            found = averages(model, everybody[rank])
            close(found["bias"], sum(given["bias"] for given in everybody) / size(), what)
            state = model.bagua_algorithm.state_dict()
            for name, one in expected.items():
                close(found[name], one.step([given[name] for given in everybody]), f"{what} {name}", 3e-5)
                if feedback:
                    close(state["error"][name].reshape(one.n, one.m), one.errors[rank], f"{what} {name}", 3e-5)
            assert same_everywhere(*found.values()), what
            assert ("error" in state, "q" in state) == (feedback, warm)
            assert state["round"] == step + 1
            if warm:
                assert same_everywhere(*state["q"].values())


def gradients_of_zero_stay_zero_and_do_no_harm(rank: int) -> None:
    model = Given()
    wrapped(model)
    zeros = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    for _ in range(3):
        assert not any(average.any() for average in averages(model, zeros).values())
    # A gradient whose first rows, and many columns, are 0: the direction has to be found again.
    for _ in range(3):
        given = zeros | {"matrix": torch.zeros(20, 30)}
        given["matrix"][15, 20:] = float(rank + 1)
        found = averages(model, given)["matrix"]
        expected = torch.zeros(20, 30)
        expected[15, 20:] = (size() + 1) / 2
        close(found, expected)


def gradients_of_a_lower_rank_than_the_last_ones_give_no_nan(rank: int) -> None:
    model = Given()
    wrapped(model, PowerSGDAlgorithm(RANK, error_feedback=False))
    one = torch.outer(torch.arange(20.0), torch.arange(30.0))
    for _ in range(4):
        close(averages(model, gradients(rank, 0) | {"matrix": one * (rank + 1)})["matrix"], one * (size() + 1) / 2)
    other = torch.outer(torch.arange(20.0).flip(0), torch.ones(30))
    for _ in range(2):
        found = averages(model, gradients(rank, 0) | {"matrix": one + other})["matrix"]
    close(found, one + other, tolerance=1e-4)


def gradients_of_any_scale_are_approximated(rank: int) -> None:
    for scale in (1e-25, 1e25):
        model = Given()
        wrapped(model)
        basis = torch.randn(20, RANK, generator=torch.Generator().manual_seed(1))
        factor = torch.randn(RANK, 30, generator=torch.Generator().manual_seed(2))
        for _ in range(4):
            found = averages(model, gradients(rank, 0) | {"matrix": (basis @ factor) * scale})["matrix"]
            close(found / scale, basis @ factor, scale)


def an_overflow_on_one_rank_is_everybodys_and_leaves_the_state(rank: int) -> None:
    for warm in (True, False):
        for name in SHAPES:
            for value in (float("inf"), float("nan")):
                model, plain = Given(), Given()
                wrapped(model, PowerSGDAlgorithm(RANK, warm_start=warm))
                wrapped(plain, PowerSGDAlgorithm(RANK, warm_start=warm))
                for step in range(2):
                    averages(model, gradients(rank, step))
                    averages(plain, gradients(rank, step))
                broken = gradients(rank, 9)
                if rank == size() - 1:
                    broken[name].view(-1)[3] = value
                before = model.bagua_algorithm.state_dict()
                found = averages(model, broken)
                assert not found[name].isfinite().all()
                assert all(found[other].isfinite().all() for other in SHAPES if other != name)
                after = model.bagua_algorithm.state_dict()
                for kind in {"error", "q"} & before.keys():
                    assert all(torch.equal(before[kind][key], after[kind][key]) for key in before[kind])
                mine, theirs = averages(model, gradients(rank, 3)), averages(plain, gradients(rank, 3))
                assert all(torch.equal(mine[key], theirs[key]) for key in SHAPES), (warm, name, value)


def half_precision_gradients_are_computed_in_float32(rank: int) -> None:
    if size() == 1:
        return
    for dtype, tolerance in ((torch.float16, 2e-3), (torch.bfloat16, 2e-2), (torch.float64, 1e-9)):
        model = Given(dtype)
        wrapped(model)
        expected = {name: Simulated(name) for name in ("matrix", "conv")}
        for step in range(3):
            everybody = [gradients(other, step, dtype) for other in range(size())]
            found = averages(model, everybody[rank])
            for name, one in expected.items():
                assert found[name].dtype == dtype
                close(found[name], one.step([given[name] for given in everybody]), f"{dtype} {name}", tolerance)
            # Rounding to the gradient's type is no part of the error.
            error = model.bagua_algorithm.state_dict()["error"]["matrix"]
            assert error.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
            close(error, expected["matrix"].errors[rank], dtype, min(tolerance, 1e-4))
            assert same_everywhere(*(average.double() for average in found.values()))


def unused_parameters_stay_and_take_part_where_another_rank_uses_them(rank: int) -> None:
    if size() == 1:
        return
    for do_flatten in (True, False):
        model = Given()
        wrapped(model, find_unused_parameters=True, do_flatten=do_flatten)
        expected = Simulated("matrix")
        for step in range(4):
            everybody = [gradients(other, step) for other in range(size())]
            names = ["matrix", "bias"] if rank == 0 else ["bias"]
            if step == 2:
                names = ["bias"]
            before = model.bagua_algorithm.state_dict()
            found = averages(model, {name: everybody[rank][name] for name in names})
            after = model.bagua_algorithm.state_dict()
            assert "conv" not in found
            assert not after["error"]["conv"].any()
            assert torch.equal(before["q"]["conv"], after["q"]["conv"])
            if step == 2:
                assert "matrix" not in found
                assert torch.equal(before["error"]["matrix"], after["error"]["matrix"])
                continue
            used = [everybody[0]["matrix"], *(torch.zeros(20, 30) for _ in range(size() - 1))]
            close(found["matrix"], expected.step(used), step, 3e-5)


def gradients_accumulate_under_no_sync(rank: int) -> None:
    if size() == 1:
        return
    for do_flatten in (True, False):
        model = Given()
        wrapped(model, do_flatten=do_flatten)
        expected = Simulated("matrix")
        for step in range(3):
            model.zero_grad()
            with model.bagua_ddp.no_sync():
                model(gradients(rank, 10 * step)).backward()
            model(gradients(rank, 10 * step + 1)).backward()
            given = [[gradients(other, 10 * step + i)["matrix"] for i in range(2)] for other in range(size())]
            close(model.matrix.grad, expected.step([a + b for a, b in given]), step, 3e-5)


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        x = torch.randn(6, 20, generator=torch.Generator().manual_seed(100 * step + bagua_torch.get_rank()))
        model(x).square().mean().backward()
        optimizer.step()


def mlp(bias: bool = True) -> torch.nn.Module:
    torch.manual_seed(2)
    return torch.nn.Sequential(torch.nn.Linear(20, 32, bias), torch.nn.Tanh(), torch.nn.Linear(32, 24, bias))


def a_model_of_matrices_only_has_no_buckets(rank: int) -> None:
    for unused in (False, True):
        model = mlp(bias=False)
        optimizer = wrapped(model, find_unused_parameters=unused)
        assert not model.bagua_buckets
        start = copy.deepcopy(model.state_dict())
        train(model, optimizer, range(3))
        assert same_everywhere(*model.parameters())
        assert not any(torch.equal(param, start[name]) for name, param in model.named_parameters())
        model.bagua_algorithm.load_state_dict(model.bagua_algorithm.state_dict())


def sparse_gradients_are_refused(rank: int) -> None:
    with pytest.raises(NotImplementedError, match="sparse gradients, which PowerSGDAlgorithm does not"):
        wrapped(torch.nn.Embedding(40, 30, sparse=True))


def only_what_becomes_smaller_is_approximated(rank: int) -> None:
    for options, expected in (
        ({"rank": 4}, {"matrix": (20, 30, 4)}),
        ({"rank": 4, "min_compression": 1.0}, {"matrix": (20, 30, 4), "conv": (8, 36, 4)}),
        ({"rank": 100, "min_compression": 0.1}, {"matrix": (20, 30, 20), "conv": (8, 36, 8), "bias": (5, 1, 1)}),
        # 20 * 30 = 2 * 6 * (20 + 30)
        ({"rank": 6}, {"matrix": (20, 30, 6)}),
        ({"rank": 7}, {}),
    ):
        model = Given()
        wrapped(model, PowerSGDAlgorithm(**options))
        assert model.bagua_algorithm.matrices == expected, options
        found = averages(model, gradients(rank, 0))
        if options["rank"] in (7, 100):
            for name in SHAPES:
                close(found[name], sum(gradients(other, 0)[name] for other in range(size())) / size())


CASES = cases_in(globals())

test_powersgd = each_case(CASES, 1, *HOSTED, timeout=60)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rank": 0}, "rank must be an int of at least 1, not 0"),
        ({"rank": 1.5}, "rank must be an int of at least 1, not 1.5"),
        ({"seed": -1}, "seed must be an int of at least 0, not -1"),
        ({"min_compression": -1.0}, "min_compression must be a finite number"),
        ({"min_compression": float("nan")}, "min_compression must be a finite number"),
    ],
)
def test_numbers_out_of_range_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PowerSGDAlgorithm(**options)
