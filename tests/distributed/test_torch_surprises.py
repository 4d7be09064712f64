"""Hooks, threads and groups that change what a backward communicates: the numbers are right, or an error says so."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.multiprocessing
from torch import nn
from torch.nn.parallel import DistributedDataParallel as Torchs

import bagua.torch_api as bagua
from bagua.errors import BaguaError, MismatchError
from bagua.torch_api.algorithms import Algorithm
from bagua.torch_api.data_parallel import DistributedDataParallel
from tests.distributed.left_out import needs_torch, skip_if_left_out
from tests.distributed.torch_ranks import ENVIRONMENT, cases_in, each_case, same_everywhere
from tests.waits import meet
from tests.world import make_world

RANKS = 2

Wrap = Callable[[nn.Module], Any]


def patched(flatten: bool) -> Wrap:
    return lambda model: model.with_bagua([], Algorithm.init("gradient_allreduce"), do_flatten=flatten)


#: Functions that wrap a model for an all_reduce of its gradients.
OURS: list[Wrap] = [
    patched(True),
    patched(False),
    DistributedDataParallel,
    lambda model: DistributedDataParallel(model, gradient_as_bucket_view=False),
]


def net() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2))


def inputs(step: int = 0) -> torch.Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(10 * step + bagua.get_rank()))


def gradients(model: nn.Module) -> list[torch.Tensor]:
    return [param.grad.detach().clone() for param in model.parameters() if param.grad is not None]


def backwards(wrap: Wrap, prepare: Callable[[nn.Module], None], after: Callable[[nn.Module], None]) -> Any:
    """The gradients of three backwards, of which the second accumulates into the first."""
    model = net()
    prepare(model)
    wrapped = wrap(model)
    after(model)
    found = []
    for step in range(3):
        if step == 2:
            model.zero_grad()
        wrapped(inputs(step)).square().sum().backward()
        found += gradients(model)
    return found


def nothing(model: nn.Module) -> None:
    pass


def double(param: nn.Parameter) -> None:
    assert param.grad is not None
    param.grad.mul_(2)


def replace(param: nn.Parameter) -> None:
    assert param.grad is not None
    param.grad = param.grad * 2


def replace_data(param: nn.Parameter) -> None:
    assert param.grad is not None
    param.grad.data = param.grad.data * 2


def with_hooks(hook: Callable[[nn.Parameter], None]) -> Callable[[nn.Module], None]:
    def register(model: nn.Module) -> None:
        for param in model.parameters():
            param.register_post_accumulate_grad_hook(hook)

    return register


def with_tensor_hooks(model: nn.Module) -> None:
    for param in model.parameters():
        param.register_hook(lambda grad: grad * 3)


def hooks_on_parameters_act_before_the_communication(rank: int) -> None:
    cases = [
        (before, after)
        for hook in (double, replace, replace_data)
        for before, after in (
            (with_hooks(hook), nothing),
            (nothing, with_hooks(hook)),
            (with_hooks(hook), with_hooks(hook)),
        )
    ]
    cases += [(with_tensor_hooks, nothing), (nothing, with_tensor_hooks)]
    for before, after in cases:
        expected = backwards(Torchs, before, after)
        for wrap in OURS:
            found = backwards(wrap, before, after)
            assert same_everywhere(*found)
            torch.testing.assert_close(found, expected)


def a_hook_that_removes_a_gradient_is_an_error(rank: int) -> None:
    def remove(param: nn.Parameter) -> None:
        param.grad = None

    model = net()
    patched(True)(model)
    loss = model(inputs()).sum()
    handle = model[1].weight.register_post_accumulate_grad_hook(remove)
    with pytest.raises(BaguaError, match=r"the gradient of '1.weight' is None .* another hook removed it"):
        loss.backward()
    handle.remove()
    model.zero_grad()
    model(inputs()).sum().backward()
    assert same_everywhere(*gradients(model))


def a_gradient_that_changes_while_it_is_communicated_is_an_error(rank: int) -> None:
    changes: list[tuple[Callable[[nn.Parameter], None], str]] = [(double, "changed"), (replace, "replaced")]
    for wrap in OURS:
        for change, what in changes:
            model = net()
            wrapped = wrap(model)
            param = model[1].weight
            # Comes after all hooks of the parameter.
            node = param.view_as(param).grad_fn.next_functions[0][0]
            handle = node.register_hook(lambda *_, change=change, param=param: change(param))
            with pytest.raises(BaguaError, match=rf"the gradient of '1.weight' of model .* was {what} on rank {rank}"):
                wrapped(inputs()).sum().backward()
            handle.remove()
            model.zero_grad()
            wrapped(inputs()).sum().backward()
            assert same_everywhere(*gradients(model))


def move(param: nn.Parameter) -> None:
    assert param.grad is not None
    param.grad.share_memory_()


def a_gradient_whose_memory_moves_while_it_is_communicated_gets_the_result(rank: int) -> None:
    for wrap in OURS:
        model = net()
        wrapped = wrap(model)
        # The last parameters' gradients are being reduced when the first ones come.
        model[0].weight.register_hook(lambda grad, model=model: move(model[2].weight))
        for step in range(3):
            wrapped(inputs(step)).square().sum().backward()
        plain = net()
        for step in range(3):
            plain(inputs(step)).square().sum().backward()
        for mine, own in zip(gradients(model), gradients(plain), strict=True):
            bagua.allreduce_inplace(own, bagua.ReduceOp.AVG)
            torch.testing.assert_close(mine, own)
        assert same_everywhere(*gradients(model))


def a_model_whose_group_has_ended_is_not_trained(rank: int) -> None:
    models = [net() for _ in OURS]
    wrappers = [wrap(model) for wrap, model in zip(OURS, models, strict=True)]
    for wrapped in wrappers:
        wrapped(inputs()).sum().backward()
    for _ in range(2):
        bagua.destroy_process_group()
        for wrapped in wrappers:
            # Alone, without a group.
            wrapped(torch.full((1, 4), 1.0 + rank)).sum().backward()
        bagua.init_process_group()
        for model, wrapped in zip(models, wrappers, strict=True):
            with pytest.raises(BaguaError, match=r"model '.*' was wrapped for a process group that has ended"):
                wrapped(torch.ones(1, 4))
            with torch.no_grad():
                wrapped(torch.ones(1, 4))
            wrapped.eval()
            wrapped(torch.ones(1, 4))
            wrapped.train()
            copy.deepcopy(model)(torch.ones(1, 4)).sum().backward()
        # Wrapped for this group: a model directly, the one in a wrapper by another wrapper.
        wrappers = [wrap(model) for wrap, model in zip(OURS, models, strict=True)]
        for model, wrapped in zip(models, wrappers, strict=True):
            model.zero_grad()
            wrapped(inputs()).sum().backward()
            assert same_everywhere(*gradients(model))
    bagua.destroy_process_group()
    bagua.init_process_group()
    # One trains alone by request, one inside a larger model, the others are wrapped again.
    bagua.unwrap(models[0])
    models[0](inputs()).sum().backward()
    larger = nn.Sequential(models[1], nn.Linear(2, 2))
    for model in (larger, models[2], models[3]):
        wrapped = DistributedDataParallel(model)
        model.zero_grad()
        wrapped(inputs()).sum().backward()
        assert same_everywhere(*gradients(model))


CASES = cases_in(globals())

test = each_case(CASES, RANKS)


def two_threads(rank: int) -> str:
    bagua.init_process_group()
    model = net()
    patched(True)(model)
    # What a rank raises may reach another one that is still wrapping.
    meet("wrapped", rank, range(RANKS))
    inside, outside = threading.Event(), threading.Event()
    first, second = model(inputs()), model(inputs(1))

    def pause(grad: torch.Tensor) -> None:
        inside.set()
        assert outside.wait(30)

    said: list[str] = []

    def backward(output: torch.Tensor) -> None:
        try:
            output.sum().backward()
        except BaguaError as error:
            said.append(str(error))

    # The last layer's gradients have come, the others have not.
    handle = model[1].weight.register_hook(pause)
    thread = threading.Thread(target=backward, args=(first,))
    thread.start()
    assert inside.wait(30)
    handle.remove()
    backward(second)
    outside.set()
    thread.join()
    assert len(said) == 2
    return said[0]


def test_two_threads_in_the_backward_of_one_model_are_an_error_on_all_ranks() -> None:
    found = make_world(RANKS, env=ENVIRONMENT).run(two_threads)
    assert any("two threads on rank" in said for said in found)


def steps_in_a_hook(rank: int, is_given: bool) -> str:
    bagua.init_process_group()
    model = net()
    optimizers = {param: torch.optim.SGD([param], lr=0.1) for param in model.parameters()}
    for param, optimizer in optimizers.items():
        param.register_post_accumulate_grad_hook(lambda _, optimizer=optimizer: optimizer.step())
    wrapped = DistributedDataParallel(model, optimizers=list(optimizers.values()) if is_given else ())
    meet("wrapped", rank, range(RANKS))
    before = model[0].weight.detach().clone()
    with pytest.raises(BaguaError) as caught:
        wrapped(inputs(rank)).sum().backward()
    assert torch.equal(before, model[0].weight)
    return str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize("is_given", [True, False])
def test_a_step_in_a_hook_of_a_backward_is_an_error_on_all_ranks(is_given: bool) -> None:
    for said in make_world(RANKS, env=ENVIRONMENT).run(steps_in_a_hook, is_given):
        assert "inside a backward, before the gradients of model" in said


@needs_torch((2, 10), "a gradient has the dtype of its parameter")  # type: ignore[type-var]
def a_gradient_of_another_dtype(rank: int) -> str:
    bagua.init_process_group()
    model = net()
    patched(True)(model)
    model[1].weight.grad_dtype = torch.float64
    # What a rank raises may reach another one that is still wrapping.
    meet("wrapped", rank, range(RANKS))
    with pytest.raises(BaguaError) as caught:
        model(inputs()).sum().backward()
    return str(caught.value)


def test_a_gradient_of_another_dtype_is_an_error_on_all_ranks() -> None:
    skip_if_left_out(a_gradient_of_another_dtype)
    for said in make_world(RANKS, env=ENVIRONMENT).run(a_gradient_of_another_dtype):
        assert "the gradient of '1.weight' of model" in said
        assert "is torch.float64[4, 4]" in said


#: What one rank does with its buffers after the model was wrapped, and what the error says of it.
CHANGES: list[tuple[Callable[[nn.Module], None], str]] = [
    (lambda layer: layer.register_buffer("extra", torch.ones(3)), "buffer 'extra' float32[3] is new"),
    (lambda layer: layer.register_buffer("seen", torch.ones(9)), "buffer 'seen' float32[9] was buffer 'seen' int64[2]"),
    (lambda layer: delattr(layer, "seen"), "buffer 'seen' int64[2] is gone"),
]


def two_steps(model: nn.Module) -> None:
    # A rank without any buffer sends none at the end of the first step, and the ranks differ in the second.
    for _ in range(2):
        model(inputs()).sum().backward()


def changes_its_buffers(rank: int) -> list[str]:
    found = []
    for change, _ in CHANGES:
        bagua.init_process_group()
        model = nn.Linear(4, 4)
        model.register_buffer("seen", torch.zeros(2, dtype=torch.int64))
        patched(True)(model)
        model(inputs()).sum().backward()
        if rank == 1:
            change(model)
        with pytest.raises(MismatchError) as caught:
            two_steps(model)
        assert caught.value.record
        found.append(str(caught.value))
        bagua.destroy_process_group()
    return found


@pytest.mark.slow
def test_a_buffer_that_one_rank_changes_later_is_named_in_its_error() -> None:
    _, found = make_world(RANKS, env=ENVIRONMENT).run(changes_its_buffers)
    for said, (_, change) in zip(found, CHANGES, strict=True):
        assert "rank 1 changed the buffers of model 'Linear" in said
        assert f"after it was wrapped: {change};" in said
