"""What users of the torch layer do beside the main road, and the mistakes that they make."""

from __future__ import annotations

import gc
import os
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

import bagua as neutral
import bagua.torch_api as bagua
from bagua.errors import BaguaError, BaguaTimeoutError, MismatchError, PeerRaisedError
from bagua.torch_api.data_parallel import DistributedDataParallel
from tests.distributed.torch_ranks import ENVIRONMENT, cases_in, each_case, same_everywhere
from tests.waits import until
from tests.world import make_world


def wrapped(model: torch.nn.Module, **options: object) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    bagua.with_bagua(model, [optimizer], bagua.algorithms.GradientAllReduceAlgorithm(), **options)
    return optimizer


def step(model: Callable[[torch.Tensor], torch.Tensor], optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.randn(5, 3)).pow(2).sum().backward()
    optimizer.step()


def a_compiled_model_trains(rank: int) -> None:
    before, after, in_place = (torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 1)) for _ in range(3))
    optimizer = wrapped(before)
    compiled = torch.compile(before, backend="eager")
    other = torch.compile(after, backend="eager")
    third = wrapped(in_place)
    in_place.compile(backend="eager")
    for model, which in ((compiled, optimizer), (other, wrapped(other)), (in_place, third)):
        for _ in range(2):
            step(model, which)
    assert before.bagua_ddp.bagua_train_step_counter == in_place.bagua_ddp.bagua_train_step_counter == 2
    assert same_everywhere(*before.parameters(), *after.parameters(), *in_place.parameters())


def reductions_of_another_library_are_refused(rank: int) -> None:
    # Equal to ours by number: its AVG would be our PRODUCT.
    with pytest.raises(TypeError, match=r"bagua\.torch_api\.ReduceOp"):
        bagua.allreduce_inplace(torch.ones(3), torch.distributed.ReduceOp.AVG)
    with pytest.raises(ValueError, match="4 is not a valid ReduceOp"):
        bagua.allreduce_inplace(torch.ones(3), 4)


def a_part_of_the_result_may_be_given_as_such(rank: int) -> None:
    n, count = bagua.get_world_size(), 5
    mine = slice(rank * count, (rank + 1) * count)
    whole = torch.full((n * count,), -1.0)
    whole[mine] = rank
    everybody = torch.arange(n).repeat_interleave(count).float()
    bagua.allgather(whole[mine], whole)
    assert torch.equal(whole, everybody)
    bagua.reduce_scatter(whole, whole[mine])
    assert torch.equal(whole[mine], torch.full((count,), float(rank * n)))
    whole = torch.full((n * count,), -1.0)
    whole[mine] = rank
    bagua.gather(whole[mine], whole, 0)
    assert rank != 0 or torch.equal(whole, everybody)


def a_sub_group_that_is_forgotten_is_left(rank: int) -> None:
    def use() -> None:
        group = bagua.new_group(list(range(bagua.get_world_size())))
        assert group.group_name in neutral.stats()["groups"]
        bagua.allreduce_inplace(torch.ones(3), comm=group)

    use()
    gc.collect()
    bagua.barrier()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(10):
        use()
    gc.collect()
    bagua.barrier()
    assert list(neutral.stats()["groups"]) == ["world"]
    # Each held at least one: some may be about to be freed.
    until(lambda: len(os.listdir("/proc/self/fd")) < before + 10, "descriptors of the groups are closed")


def an_algorithm_is_given_by_its_name(rank: int) -> None:
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for holder in (
        bagua.with_bagua(model, [optimizer], "bytegrad"),
        DistributedDataParallel(torch.nn.Linear(3, 1), algorithm="bytegrad"),
    ):
        algorithm = bagua.algorithm_of(holder)
        assert algorithm is holder.bagua_algorithm
        assert bagua.algorithm_of(holder, type(algorithm)) is algorithm
        shown = "ByteGradAlgorithm(hierarchical=True, average=True, compression='MinMaxUInt8', error_feedback=False)"
        assert repr(algorithm) == f"<ByteGradAlgorithmImpl of model '{holder.bagua_module_name}': {shown}>"
        with pytest.raises(TypeError, match=f"is {re.escape(shown)}, not a AsyncModelAverageAlgorithmImpl"):
            bagua.algorithm_of(holder, bagua.algorithms.AsyncModelAverageAlgorithmImpl)
    step(model, optimizer)
    assert same_everywhere(*model.parameters())
    adam = bagua.algorithms.QAdamOptimizer(model.parameters())
    assert bagua.algorithm_of(bagua.with_bagua(model, [adam], "qadam")).algorithm.q_adam_optimizer is adam
    bagua.unwrap(model)


def a_wrong_algorithm_of_one_rank_is_an_error_on_all(rank: int) -> None:
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for wrong, text in (
        ("bytegrd", "no algorithm 'bytegrd'; did you mean 'bytegrad'"),
        ("qadam", r"qadam needs one QAdamOptimizer among the optimizers; they are \['SGD'\]"),
        (8, "algorithm must be an Algorithm or the name of one, not int"),
    ):
        given: Any = wrong if rank == 0 else "gradient_allreduce"
        with pytest.raises((ValueError, TypeError) if rank == 0 else MismatchError, match=text):
            bagua.with_bagua(model, [optimizer], given)


def a_second_start_is_refused_whoever_made_the_first(rank: int) -> None:
    with pytest.raises(RuntimeError, match="init_process_group was called twice"):
        bagua.init_process_group()
    with pytest.raises(BaguaError, match="bagua is initialised already"):
        neutral.init()


CASES = cases_in(globals())

test = each_case(CASES, 2)


def test_every_name_that_a_plain_module_or_tensor_lists_can_be_read() -> None:
    module = torch.nn.Linear(1, 1)
    for name in dir(module):
        getattr(module, name)
    assert "bagua_ddp" not in dir(module)
    assert "with_bagua" in dir(module)
    assert not hasattr(torch.ones(1), "bagua_tensor_name")
    assert getattr(torch.ones(1), "bagua_module_name", None) is None


def comes_unless_it_is(rank: int, absent: int) -> tuple[str, tuple[int, ...]]:
    if rank == absent:
        return "", ()
    with pytest.raises(BaguaTimeoutError) as caught:
        bagua.init_process_group()
    return str(caught.value), caught.value.missing


@pytest.mark.slow
@pytest.mark.parametrize("absent", [0, 1])
def test_a_rank_that_does_not_come_to_the_environments_address_is_named_within_the_timeout(absent: int) -> None:
    found = make_world(2, env={"BAGUA_TIMEOUT": "2"}).run(comes_unless_it_is, absent)
    for rank, (text, missing) in enumerate(found):
        assert rank == absent or missing == (absent,), text


def uses_it_in_a_child(rank: int) -> str:
    bagua.init_process_group()
    model = torch.nn.Linear(3, 1)
    optimizer = wrapped(model)
    step(model, optimizer)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        said = "nothing"
        try:
            with torch.no_grad():
                model.eval()(torch.ones(1, 3))
            model.train()
            step(model, optimizer)
        except BaguaError as error:
            said = str(error)
        # Neither may end what is the parent's, nor this process.
        neutral.shutdown()
        bagua.destroy_process_group()
        os.write(write, said.encode())
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    step(model, optimizer)
    assert same_everywhere(*model.parameters())
    torch.distributed.barrier()
    bagua.destroy_process_group()
    return os.read(read, 1000).decode()


def test_a_forked_child_can_evaluate_a_wrapped_model_and_not_train_it() -> None:
    for said in make_world(2, env=ENVIRONMENT, timeout=150.0).run(uses_it_in_a_child):
        assert "this process was forked" in said


def steps_with_its_own_gradients(rank: int, how: str) -> tuple[str, bool]:
    bagua.init_process_group()
    model = torch.nn.Linear(3, 1)
    optimizer = wrapped(model)
    before = torch.zeros(0)

    def train() -> None:
        nonlocal before
        step(model, optimizer)
        before = model.weight.detach().clone()
        # The others may be in that first step still when the report of what comes now reaches them.
        while rank != 0:
            step(model, optimizer)
            before = model.weight.detach().clone()
        optimizer.zero_grad(set_to_none=how != "in place")
        loss = model(torch.ones(1, 3)).sum()
        if how == "closure":
            optimizer.step(lambda: torch.zeros(1, requires_grad=True).sum().backward())
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        for param, grad in zip(model.parameters(), gradients, strict=True):
            if param.grad is None:
                param.grad = grad
            else:
                param.grad.copy_(grad)
        optimizer.step()

    first = model.weight.detach().clone()
    with pytest.raises(BaguaError) as caught:
        train()
    assert isinstance(caught.value, PeerRaisedError) == (rank != 0)
    return str(caught.value), torch.equal(before if before.numel() else first, model.weight)


@pytest.mark.parametrize(
    "how", ["autograd.grad", *(pytest.param(each, marks=pytest.mark.slow) for each in ("in place", "closure"))]
)
def test_a_step_with_gradients_of_one_rank_alone_is_an_error_on_every_rank(how: str) -> None:
    for text, unchanged in make_world(2, env=ENVIRONMENT, timeout=150.0).run(steps_with_its_own_gradients, how):
        assert (
            "optimizer.step() on rank 0 would use a gradient of 'weight' of model 'Linear_0' that no backward" in text
        )
        assert unchanged


def leaves_out_a_backward_alone(rank: int) -> str:
    bagua.init_process_group()
    model = torch.nn.Linear(3, 1)
    optimizer = wrapped(model)
    step(model, optimizer)
    if rank == 0:
        optimizer.zero_grad()
        model(torch.ones(1, 3))
        optimizer.step()
    with pytest.raises(MismatchError) as caught:
        step(model, optimizer)
    return str(caught.value)


def test_a_rank_that_leaves_out_a_backward_alone_is_noticed_at_the_next_exchange() -> None:
    for rank, text in enumerate(make_world(2, env=ENVIRONMENT, timeout=150.0).run(leaves_out_a_backward_alone)):
        assert f"rank {rank} has called optimizer.step() {1 - rank} times after a forward of model 'Linear_0'" in text
        assert "if a rank leaves out a backward, all ranks must" in text
