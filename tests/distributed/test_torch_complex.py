"""Complex tensors, and tensors whose memory holds the negatives or conjugates of their values.

That complex parameters train as under torch is a row of the table in training_rows.py.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest
import torch

import bagua.torch_api as bagua
from tests.distributed.torch_ranks import cases_in, each_case, same_everywhere

#: What a rank's gradient becomes lazily, and the same in NumPy.
LAZY: dict[str, tuple[torch.dtype, Callable[[torch.Tensor], torch.Tensor], Callable[[np.ndarray], np.ndarray]]] = {
    "conjugate": (torch.complex64, torch.Tensor.conj, np.conj),
    "negation": (torch.float32, torch._neg_view, np.negative),
    "negation of complex": (torch.complex128, torch._neg_view, np.negative),
    "conjugate and negation": (torch.complex64, lambda g: torch._neg_view(g.conj()), lambda g: -np.conj(g)),
}


def is_lazy(tensor: torch.Tensor) -> bool:
    return tensor.is_conj() or tensor.is_neg()


class Product(torch.nn.Module):
    """The real part of the sum of weight * x, whose gradient is the conjugate of x."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(2, 3, dtype=dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = (self.weight * x).real.sum()
        return y


def inputs(dtype: torch.dtype, step: int) -> list[torch.Tensor]:
    """Returns the factors of each rank's weight."""
    return [
        torch.randn(2, 3, dtype=dtype, generator=torch.Generator().manual_seed(10 * rank + step))
        for rank in range(bagua.get_world_size())
    ]


def a_gradient_that_is_lazy_on_one_rank_is_averaged_by_value(rank: int) -> None:
    size = bagua.get_world_size()
    last = size - 1
    seen: list[bool] = []
    for (dtype, lazily, plainly), do_flatten, set_to_none, find_unused, create_graph in itertools.product(
        LAZY.values(), (True, False), (True, False), (True, False), (True, False)
    ):
        model = Product(dtype)
        if rank == last:
            model.weight.register_hook(lazily)
        model.weight.register_post_accumulate_grad_hook(lambda weight: seen.append(is_lazy(weight.grad)))
        model.with_bagua(
            [],
            bagua.algorithms.GradientAllReduceAlgorithm(),
            do_flatten=do_flatten,
            find_unused_parameters=find_unused,
        )
        for step in range(2):
            model.zero_grad(set_to_none=set_to_none)
            xs = inputs(dtype, step)
            model(xs[rank]).backward(create_graph=create_graph)
            arrays = [np.conj(x.numpy()) for x in xs]
            arrays[last] = plainly(arrays[last])
            expected = sum(arrays) / size
            found = model.weight.grad
            assert found is not None
            assert same_everywhere(found.detach().resolve_conj().resolve_neg())
            np.testing.assert_allclose(found.detach().resolve_conj().resolve_neg().numpy(), expected, rtol=1e-5)
    assert any(seen) == (rank == last), "the gradient of the last rank alone must have been lazy"


def lazy_values_of_buckets_are_resolved_or_refused(rank: int) -> None:
    for lazily in (torch.Tensor.conj, torch._neg_view):
        values = lazily(torch.full((3,), 1 + 2j * (rank + 1)))
        plain = values.resolve_conj().resolve_neg().clone()
        values.ensure_bagua_tensor("values", f"lazy {lazily.__name__}")
        with pytest.raises(ValueError, match="'values' of bucket 'b', which is not flattened, is the lazy"):
            bagua.bucket.BaguaBucket([values], "b", flatten=False)
        bucket = bagua.bucket.BaguaBucket([values], "b", flatten=True)
        assert torch.equal(bucket.flattened_tensor(), plain)
        assert not is_lazy(values)
        assert torch.equal(values, plain)


CASES = cases_in(globals())

test = each_case(CASES, 2, 3, 4)
