"""Gradients whose memory is that of another parameter's gradient too, or of a tensor that autograd still reads."""

from __future__ import annotations

import itertools
from typing import Any

import torch

import bagua.torch_api as bagua
from tests.distributed.left_out import needs_torch
from tests.distributed.torch_ranks import cases_in, each_case


def gradients_that_share_their_memory_are_communicated_once_each(rank: int) -> None:
    size = bagua.get_world_size()
    for do_flatten, bucket_size in itertools.product((True, False), (1, 1000)):
        model = torch.nn.ParameterList([torch.zeros(6), torch.zeros(6)])
        addresses: list[int] = []
        for parameter in model:
            parameter.register_post_accumulate_grad_hook(lambda p, to=addresses: to.append(p.grad.data_ptr()))
        algorithm = bagua.algorithms.GradientAllReduceAlgorithm(average=False)
        model.with_bagua([], algorithm, do_flatten=do_flatten, bucket_size=bucket_size)
        # Both parameters get a view of the gradient of the sum.
        first, second = (parameter.view(2, 3) for parameter in model)
        ((first + second) * (rank + 1)).sum().backward()
        assert len(addresses) == 2
        assert do_flatten or addresses[0] == addresses[1], "autograd gave each parameter memory of its own"
        for parameter in model:
            assert torch.equal(parameter.grad, torch.full((6,), size * (size + 1) / 2))


def a_gradient_does_not_change_while_autograd_still_reads_it(rank: int) -> None:
    size = bagua.get_world_size()
    for do_flatten in (True, False):
        model = torch.nn.ParameterList([torch.ones(6), torch.ones(6)])
        early, late = model
        algorithm = bagua.algorithms.GradientAllReduceAlgorithm()
        model.with_bagua([], algorithm, do_flatten=do_flatten, bucket_size=1)
        product = early * (rank + 1.0)
        shared = []

        def communicate(grad: torch.Tensor, model: Any = model, late: Any = late, shared: Any = shared) -> None:
            shared.append(late.grad is not None and late.grad.data_ptr() == grad.data_ptr())
            # Runs behind the bucket of `late`, which is complete.
            model.bagua_ddp.backend.all_reduce(torch.zeros(1), bagua.ReduceOp.SUM).wait()

        product.register_hook(communicate)
        ((product.view(2, 3) + late.view(2, 3)) * (rank + 1)).sum().backward()
        assert shared == [not do_flatten], "autograd was to read the memory of the other gradient"
        squares = sum((other + 1.0) ** 2 for other in range(size)) / size
        torch.testing.assert_close(early.grad, torch.full((6,), squares))
        torch.testing.assert_close(late.grad, torch.full((6,), (size + 1) / 2))


@needs_torch((2, 11), "a copy of the gradient is communicated there")
def a_gradient_of_its_own_is_communicated_where_it_is(rank: int) -> None:
    for set_to_none in (True, False):
        model = torch.nn.Linear(3, 2)
        model.with_bagua([], bagua.algorithms.GradientAllReduceAlgorithm(), do_flatten=False)
        for step in range(3):
            before = model.weight.grad
            model.zero_grad(set_to_none=set_to_none)
            model(torch.full((1, 3), float(rank + step))).sum().backward()
            mean = (bagua.get_world_size() - 1) / 2 + step
            assert torch.equal(model.weight.grad, torch.full((2, 3), mean))
            # The memory that was marked ready is the gradient's, and no copy of it.
            slot = model.bagua_ddp.exchange._slots["weight"]
            assert slot.wire.data_ptr() == model.weight.grad.data_ptr()
            assert set_to_none or step == 0 or model.weight.grad is before


CASES = cases_in(globals())

test = each_case(CASES, 2, 3)
