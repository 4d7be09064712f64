"""Aggregations without other ranks: names, constructors, packing, Gram-Schmidt, subclasses."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: make setup")

import bagua.aggregation  # noqa: E402
from bagua.aggregation import (  # noqa: E402
    Aggregation,
    AllReduceAggregation,
    AllReduceAggregationHVD,
    DecentralizedAggregation,
    PowerAggregation,
    SparsifiedAggregation,
    centralized,
    decentralized,
    global_average,
    optim,
    orthogonalize,
    pack_tensors,
)


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        (Aggregation, ["use_cuda"]),
        (AllReduceAggregation, ["world_size", "divide_before", "use_cuda"]),
        (AllReduceAggregationHVD, ["world_size", "divide_before", "use_cuda"]),
        (SparsifiedAggregation, ["model", "use_cuda"]),
        (PowerAggregation, ["model", "use_cuda", "reuse_query", "world_size", "rank"]),
        (DecentralizedAggregation, ["rank", "neighbors", "use_cuda"]),
    ],
)
def test_constructors_take_the_originals_arguments_in_order(kind: type, names: list[str]) -> None:
    parameters = inspect.signature(kind).parameters.values()
    assert [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD] == names


def test_the_originals_modules_have_their_names() -> None:
    for name in ("AllReduceAggregation", "AllReduceAggregationHVD", "SparsifiedAggregation", "PowerAggregation"):
        assert getattr(centralized, name) is getattr(bagua.aggregation, name)
    assert decentralized.DecentralizedAggregation is DecentralizedAggregation
    assert centralized.ALLREDUCE_AGGREGATION_OPS == [centralized.AVG_WORLD, centralized.AVG_CUSTOM]
    assert (centralized.AVG_WORLD, centralized.AVG_CUSTOM) == ("avg_world", "avg_custom")
    for name in optim.__all__ + bagua.aggregation.__all__:
        assert hasattr(optim, name) or hasattr(bagua.aggregation, name)


def test_a26_different_dtypes_are_not_packed_silently() -> None:
    with pytest.raises(TypeError, match="different dtypes"):
        pack_tensors([torch.ones(1), torch.ones(1, dtype=torch.float64)])


def test_a26_the_global_average_of_one_rank_is_its_own_and_keeps_the_dtype() -> None:
    assert global_average(3, 4).item() == 0.75
    assert global_average(torch.tensor(1.0, dtype=torch.float64), 3).dtype is torch.float64


@pytest.mark.parametrize("shape", [(2, 2), (8, 5), (40, 40), (6, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a17_orthogonalised_columns_are_orthonormal(shape: tuple[int, int], dtype: Any) -> None:
    matrix = torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(3))
    assert orthogonalize(matrix) is None
    torch.testing.assert_close(matrix.T @ matrix, torch.eye(shape[1], dtype=dtype), rtol=0, atol=1e-5)


def test_a17_zero_dependent_and_surplus_columns_become_zero() -> None:
    matrix = torch.tensor([[1.0, 0.0, 2.0, 1.0], [1.0, 0.0, 2.0, -1.0]])
    orthogonalize(matrix, torch.tensor([1e-16]))
    half = 0.5**0.5
    torch.testing.assert_close(matrix, torch.tensor([[half, 0, 0, half], [half, 0, 0, -half]]))
    wide = torch.randn(2, 5, generator=torch.Generator().manual_seed(3))
    orthogonalize(wide)
    assert bool((wide[:, 2:] == 0).all())


class Doubling(Aggregation):
    """An aggregation as a user writes it, with only ``_agg``."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[int, str]] = []

    def _agg(self, data: Any, op: str, denom: Any = None) -> Any:
        self.calls.append((data.numel(), op))
        return data * 2


def test_a_subclass_needs_only_one_method() -> None:
    model = torch.nn.Linear(3, 2)
    model.weight.grad = torch.ones(2, 3)
    kept = model.weight.detach().clone()
    aggregation = Doubling()
    aggregation.agg_grad()(model, "twice")
    assert model.weight.grad.tolist() == [[2.0] * 3] * 2
    assert model.bias.grad is None
    aggregation.agg_model(by_layer=True)(model, "twice")
    assert torch.equal(model.weight, 2 * kept)
    # The gradients of the model with a mark for each parameter; then each parameter by itself.
    assert aggregation.calls == [(6 + 2 + 2, "twice"), (6, "twice"), (2, "twice")]


def test_autograd_notices_that_weights_have_changed() -> None:
    model = torch.nn.Linear(3, 2, bias=False)
    loss = model(torch.ones(1, 3, requires_grad=True)).sum()
    Doubling().agg_model()(model, "twice")
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_an_empty_model_has_nothing_to_aggregate() -> None:
    model = torch.nn.Module()
    for aggregation in (AllReduceAggregation(1), PowerAggregation(model), SparsifiedAggregation(model)):
        aggregation.agg_grad()(model, "avg_world")


def test_sparse_gradients_and_complex_or_integer_averages_are_refused_by_name() -> None:
    embedding = torch.nn.Embedding(4, 2, sparse=True)
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(NotImplementedError, match=r"parameter 0 has a torch\.sparse_coo gradient"):
        AllReduceAggregation(1).agg_grad()(embedding, "avg_world")
    for dtype, name in ((torch.int32, "int32"), (torch.complex64, "complex64")):
        values = torch.nn.ParameterList([torch.nn.Parameter(torch.ones(2, dtype=dtype), requires_grad=False)])
        with pytest.raises(TypeError, match=name):
            AllReduceAggregation(1).agg_model()(values, "avg_world")
        with pytest.raises(TypeError, match=name):
            PowerAggregation(values)


def test_impossible_arguments_are_refused_at_construction() -> None:
    model = torch.nn.Linear(2, 2)
    with pytest.raises(ValueError, match="world_size is 0"):
        AllReduceAggregation(0)
    with pytest.raises(ValueError, match="rank is 0"):
        PowerAggregation(model, rank=0)
    with pytest.raises(ValueError, match="world_size is 0"):
        PowerAggregation(model, world_size=0)
    with pytest.raises(ValueError, match="memory"):
        PowerAggregation(model, memory="none")  # type: ignore[arg-type]


def test_an_optimizer_that_is_not_made_yet_has_no_attributes() -> None:
    class Early(optim.GenericCentralizedOptimizer):
        pass

    early = Early(1, torch.nn.Linear(1, 1))
    with pytest.raises(AttributeError, match="param_groups"):
        early.param_groups  # noqa: B018
    with pytest.raises(ValueError, match="not been set"):
        early.step()
    for missing in ("world_size", "model", "lr"):
        given = {"world_size": 1, "model": torch.nn.Linear(1, 1), "lr": 0.1} | {missing: None}
        with pytest.raises(ValueError, match=missing):
            optim.CentralizedSGD(**given)
    assert optim.CentralizedSGD(1, torch.nn.Linear(1, 1), lr=0.5).param_groups[0]["lr"] == 0.5
