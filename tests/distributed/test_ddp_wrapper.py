"""The wrapper's own promises beside those of ddp_parity.md, and an all_reduce with gradients, on three ranks."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint

import bagua as neutral
import bagua.torch_api as bagua
from bagua.errors import BaguaError
from bagua.torch_api.algorithms import Algorithm
from bagua.torch_api.data_parallel import DistributedDataParallel
from bagua.torch_api.data_parallel.functional import all_reduce
from tests.distributed.torch_ranks import cases_in, each_case, same_everywhere
from tests.distributed.training_models import Net


def calls() -> int:
    """Operations of this process so far, in all groups."""
    return sum(counted["calls"] for group in neutral.stats()["groups"].values() for counted in group["ops"].values())


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.randn(4, 8)).square().mean().backward()
    optimizer.step()


def arguments_that_are_not_supported_are_refused(rank: int) -> None:
    param = torch.nn.Parameter(torch.ones(1))
    refused: list[dict[str, Any]] = [
        {"dim": 1},
        {"mixed_precision": object()},
        {"delay_all_reduce_named_params": [("weight", param)]},
        {"param_to_hook_all_reduce": param},
    ]
    for options in refused:
        with pytest.raises(NotImplementedError, match=next(iter(options))):
            DistributedDataParallel(nn.Linear(2, 2), **options)
    for options in ({"device_ids": [0]}, {"output_device": 0}, {"bucket_cap_mb": 0.0}):
        with pytest.raises(ValueError, match=next(iter(options))):
            DistributedDataParallel(nn.Linear(2, 2), **options)
    with pytest.warns(DeprecationWarning, match="check_reduction"):
        DistributedDataParallel(nn.Linear(2, 2), check_reduction=True)
    with pytest.raises(BaguaError, match="no parameter that needs a gradient"):
        DistributedDataParallel(nn.ReLU())
    with pytest.raises(TypeError, match="module must be"):
        DistributedDataParallel(torch.ones(1))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="unexpected keyword argument 'compression'"):
        DistributedDataParallel(nn.Linear(2, 2), compression="fp16")  # type: ignore[call-arg]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        DistributedDataParallel(nn.Linear(2, 2), None, None, 0, False, static_graph=True)


def a_parameter_has_one_wrapper(rank: int) -> None:
    layer = nn.Linear(2, 2)
    first = DistributedDataParallel(layer)
    for again in (
        lambda: DistributedDataParallel(nn.Sequential(layer, nn.Linear(2, 2))),
        lambda: layer.with_bagua([], Algorithm.init("gradient_allreduce")),
    ):
        with pytest.raises(ValueError, match="already"):
            again()
    first(torch.ones(1, 2)).sum().backward()
    gc.disable()
    del first
    DistributedDataParallel(layer)
    gc.enable()


def attributes_of_the_wrapper_and_of_the_model(rank: int) -> None:
    net = Net()
    net.special = "of the model"
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    model = DistributedDataParallel(net, optimizers=[optimizer], bucket_cap_mb=0.001)
    assert model.module is net
    assert model.special == "of the model"
    assert model.body is net.body
    assert model.require_backward_grad_sync
    assert model.will_sync_module_buffers()
    with model.no_sync():
        assert not model.require_backward_grad_sync
    assert model.require_backward_grad_sync
    assert model.bagua_algorithm.name == "gradient_allreduce"
    assert model.bagua_optimizers == [optimizer]
    assert len(model.bagua_buckets) > 1
    assert model.bagua_module_name.startswith("Net_")
    assert not DistributedDataParallel(nn.Linear(2, 2)).will_sync_module_buffers()
    assert not DistributedDataParallel(Net(), broadcast_buffers=False).will_sync_module_buffers()
    with pytest.raises(AttributeError, match="nowhere"):
        _ = model.nowhere
    assert hasattr(model, "bagua_ddp")
    assert not hasattr(net, "bagua_ddp")


def states_have_the_prefix_and_both_kinds_are_taken(rank: int) -> None:
    model, plain = DistributedDataParallel(Net()), Net()
    assert list(model.state_dict()) == [f"module.{name}" for name in plain.state_dict()]
    outer = nn.ModuleDict({"inside": model})
    for taken in (plain.state_dict(), {f"module.{k}": v for k, v in plain.state_dict().items()}):
        for param in model.parameters():
            param.data.zero_()
        model.load_state_dict(taken)
        assert torch.equal(model.module.one.weight, plain.one.weight)
        for param in model.parameters():
            param.data.zero_()
        outer.load_state_dict({f"inside.{k}": v for k, v in taken.items()})
        assert torch.equal(model.module.one.weight, plain.one.weight)
    with pytest.raises(RuntimeError, match="Missing key"):
        model.load_state_dict({"one.weight": plain.one.weight})
    with pytest.raises(RuntimeError, match="Unexpected key"):
        model.load_state_dict({**plain.state_dict(), "other": torch.ones(1)})
    # The model has a part of that name itself.
    named = nn.ModuleDict({"module": nn.Linear(2, 2)})
    wrapped = DistributedDataParallel(named)
    wrapped.load_state_dict(wrapped.state_dict())
    wrapped.load_state_dict(named.state_dict())


class BackwardInside(nn.Module):
    """A forward with its backward, as with Lightning's manual optimization, and one more use of the buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.net(x)
        if self.training:
            found.square().mean().backward()
            with torch.no_grad():
                self.net(x + 1)
        return found


def trains_in_two_micro_batches(model: Any) -> None:
    with bagua.no_sync(model):
        model(torch.randn(4, 8)).sum().backward()
    model(torch.randn(4, 8)).sum().backward()


def trains_by_two_forwards(model: Any) -> None:
    (model(torch.randn(4, 8)) + model(torch.randn(4, 8))).sum().backward()


def trains_by_two_backwards(model: Any) -> None:
    first, second = (checkpoint(model.body, torch.randn(4, 8), use_reentrant=False) for _ in range(2))
    first.sum().backward()
    second.sum().backward()


def fails_and_trains(model: Any) -> None:
    with pytest.raises(RuntimeError, match="mat1"):
        model(torch.randn(4, 9))
    model(torch.randn(4, 8)).sum().backward()


STEPS: dict[str, tuple[Callable[[], nn.Module], Callable[[Any], object]]] = {
    "plain": (Net, lambda model: model(torch.randn(4, 8)).sum().backward()),
    "two micro-batches": (Net, trains_in_two_micro_batches),
    "two forwards": (Net, trains_by_two_forwards),
    "a checkpointed model": (
        Net,
        lambda model: checkpoint(model, torch.randn(4, 8), use_reentrant=False).sum().backward(),
    ),
    "two backwards of checkpoints": (Net, trains_by_two_backwards),
    "a forward that raises": (Net, fails_and_trains),
    "a backward inside the forward": (BackwardInside, lambda model: model(torch.randn(4, 8))),
}


def all_ranks_evaluate_alike_after_a_step(rank: int) -> None:
    for name, (make, trains) in STEPS.items():
        for wraps in (True, False):
            model: Any = make()
            options = {"find_unused_parameters": True}
            if wraps:
                model = DistributedDataParallel(model, **options)
            elif make is Net:
                model = model.with_bagua([], Algorithm.init("gradient_allreduce"), **options)
            else:
                continue
            for _ in range(2):
                trains(model)
                before = calls()
                model.eval()
                with torch.no_grad():
                    found = model(torch.ones(2, 8))
                assert calls() == before, name
                model.train()
                assert same_everywhere(found, *model.buffers()), (name, wraps)


def buffers_that_rank_0_changes_arrive_with_the_next_step(rank: int) -> None:
    model = DistributedDataParallel(Net(), find_unused_parameters=True)
    seen = next(name for name, buffer in model.named_buffers() if buffer.dtype == torch.int64)
    for step in range(2):
        model.get_buffer(seen).fill_(100 * step + rank)
        model(torch.randn(4, 8)).sum().backward()
        assert model.get_buffer(seen).item() == 100 * step + 1


def accumulation_communicates_nothing_but_buffers(rank: int) -> None:
    model = DistributedDataParallel(nn.Linear(8, 2))
    before = calls()
    with model.no_sync():
        model(torch.randn(2, 8)).sum().backward()
    assert calls() == before
    model.require_backward_grad_sync = False
    model(torch.randn(2, 8)).sum().backward()
    assert calls() == before
    model.require_backward_grad_sync = True
    model(torch.randn(2, 8)).sum().backward()
    assert calls() > before
    assert same_everywhere(model.module.weight.grad)


def a_gradient_that_one_rank_puts_there_counts_on_all(rank: int) -> None:
    model = DistributedDataParallel(Net(branches=True), find_unused_parameters=True)
    if rank == 1:
        model.never.weight.grad = torch.full((2, 2), 6.0)
    model(torch.randn(4, 8), 0).sum().backward()
    assert torch.equal(model.never.weight.grad, torch.full((2, 2), 6.0 / bagua.get_world_size()))


def parameters_that_change_are_an_error_of_the_next_forward(rank: int) -> None:
    model = DistributedDataParallel(Net())
    model.module.later = nn.Linear(2, 2)
    with pytest.raises(BaguaError, match=r"later\.weight"):
        model(torch.randn(4, 8))


def a_second_backward_of_one_forward_is_communicated(rank: int) -> None:
    model = DistributedDataParallel(nn.Linear(8, 2))
    made = model(torch.full((1, 8), 1.0 + rank))
    made[0, 0].backward(retain_graph=True)
    made[0, 1].backward()
    mean = sum(1.0 + r for r in range(bagua.get_world_size())) / bagua.get_world_size()
    assert torch.equal(model.module.weight.grad[1], torch.full((8,), mean))
    assert same_everywhere(model.module.weight.grad)


def gradients_of_a_part_that_is_called_alone_are_communicated(rank: int) -> None:
    model = DistributedDataParallel(Net(), find_unused_parameters=True)
    model.module.one(torch.randn(2, 8)).sum().backward()
    assert same_everywhere(model.one.weight.grad)
    assert model.other.weight.grad is None


def copies_train_together_or_not_at_all(rank: int) -> None:
    model = DistributedDataParallel(Net(), find_unused_parameters=True, bucket_cap_mb=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step(model, optimizer)
    if rank == 1:
        # As averages of weights are kept, by one rank.
        average = torch.optim.swa_utils.AveragedModel(model)
        average.update_parameters(model)
        average.eval()
        average(torch.randn(2, 8))
        assert average.module.module is not model.module
        assert not hasattr(average.module, "bagua_algorithm")
    kept = io.BytesIO()
    torch.save(model, kept)
    kept.seek(0)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.load(kept, weights_only=False)):
        assert list(other.state_dict()) == list(model.state_dict())
        with torch.no_grad():
            for param in other.parameters():
                param.add_(rank)
        step(other, torch.optim.SGD(other.parameters(), lr=0.1))
        assert same_everywhere(*other.parameters())
        assert other.bagua_module_name != model.bagua_module_name
    step(model, optimizer)
    assert same_everywhere(*model.parameters())
    apart = DistributedDataParallel(nn.Linear(2, 2), process_group=bagua.new_group())
    with pytest.raises(BaguaError, match="default group"):
        pickle.dumps(apart)
    assert copy.deepcopy(apart).process_group is apart.process_group


def groups_of_ours_and_of_torch(rank: int) -> None:
    for make in (bagua.new_group, dist.new_group):
        group: Any = make([0, 2])
        if rank != 1:
            model = DistributedDataParallel(nn.Linear(1, 1), process_group=group)
            model(torch.full((1, 1), float(rank))).backward()
            assert model.module.weight.grad.item() == 1.0
            assert model.process_group is group
            with model.join():
                for _ in range(1 + rank):
                    model(torch.full((1, 1), float(rank))).backward()
            model.zero_grad()
        bagua.barrier()
    mesh = DeviceMesh("cpu", list(range(bagua.get_world_size())))
    model = DistributedDataParallel(nn.Linear(1, 1), device_mesh=mesh)
    model(torch.full((1, 1), float(rank))).backward()
    assert model.module.weight.grad.item() == 1.0
    with pytest.raises(ValueError, match="both"):
        DistributedDataParallel(nn.Linear(1, 1), device_mesh=mesh, process_group=dist.group.WORLD)
    flat = DeviceMesh("cpu", [[rank] for rank in range(bagua.get_world_size())])
    with pytest.raises(ValueError, match="one dimension"):
        DistributedDataParallel(nn.Linear(1, 1), device_mesh=flat)


def other_algorithms_train_and_refuse_join_and_hooks(rank: int) -> None:
    for name, options in (("bytegrad", {"hierarchical": False}), ("powersgd", {"rank": 2}), ("local_sgd", {})):
        net = Net()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        model = DistributedDataParallel(net, optimizers=[optimizer], algorithm=Algorithm.init(name, **options))
        for _ in range(3):
            step(model, optimizer)
        assert model.bagua_algorithm.name == name
        with pytest.raises(NotImplementedError, match=name):
            model.join()
        with pytest.raises(NotImplementedError, match=name):
            model.register_comm_hook(None, default_hooks.allreduce_hook)
    with pytest.raises(TypeError, match="must be an Algorithm"):
        DistributedDataParallel(nn.Linear(2, 2), algorithm=3)  # type: ignore[arg-type]


def asynchronous_averaging_is_controlled_through_the_wrapper(rank: int) -> None:
    model = DistributedDataParallel(nn.Linear(8, 2), algorithm=Algorithm.init("async", sync_interval_ms=20))
    step(model, torch.optim.SGD(model.parameters(), lr=0.1))
    model.bagua_algorithm.synchronize(model)
    model.bagua_algorithm.abort(model)
    assert model.bagua_algorithm.stats()["state"] == "stopped"


def what_is_no_hook_is_refused(rank: int) -> None:
    model = DistributedDataParallel(nn.Linear(8, 2))
    with pytest.raises(TypeError, match="callable"):
        model.register_comm_hook(None, 3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="state and bucket"):
        model.register_comm_hook(None, lambda state: None)  # type: ignore[arg-type,misc]

    def wrong(state: Any, bucket: int) -> None: ...

    with pytest.raises(ValueError, match="GradBucket"):
        model.register_comm_hook(None, wrong)  # type: ignore[arg-type]

    def returns_nothing(state: Any, bucket: Any):  # type: ignore[no-untyped-def]
        seen.append((bucket.index(), bucket.is_last(), len(bucket.gradients()), len(bucket.parameters())))

    seen: list[tuple[int, bool, int, int]] = []
    model.register_comm_hook(None, returns_nothing)
    with pytest.raises(TypeError, match="Future"):
        model(torch.randn(2, 8)).sum().backward()
    assert seen == [(0, True, 2, 2)]
    with pytest.raises(BaguaError, match="already"):
        model.register_comm_hook(None, default_hooks.allreduce_hook)
    sparse = DistributedDataParallel(nn.Embedding(4, 2, sparse=True))
    with pytest.raises(NotImplementedError, match="sparse"):
        sparse.register_comm_hook(None, default_hooks.allreduce_hook)


def a_hook_that_raises_ends_the_backward(rank: int) -> None:
    def fails(state: Any, bucket: Any):  # type: ignore[no-untyped-def]
        if len(tries) == 0:
            tries.append(1)
            raise ZeroDivisionError("in the hook")
        return default_hooks.allreduce_hook(None, bucket)

    tries: list[int] = []
    model = DistributedDataParallel(nn.Linear(8, 2))
    model.register_comm_hook(None, fails)
    with pytest.raises(ZeroDivisionError, match="in the hook"):
        model(torch.randn(2, 8)).sum().backward()
    model.zero_grad()
    model(torch.randn(2, 8)).sum().backward()
    assert same_everywhere(model.module.weight.grad)


@pytest.mark.slow
def a_compiled_wrapper_and_a_wrapper_of_a_compiled_model_train(rank: int) -> None:
    for made in (
        torch.compile(DistributedDataParallel(Net()), backend="eager"),
        DistributedDataParallel(torch.compile(Net(), backend="eager")),
    ):
        optimizer = torch.optim.SGD(made.parameters(), lr=0.1)
        for _ in range(2):
            step(made, optimizer)
        assert same_everywhere(*made.parameters())


def an_export_holds_the_model_alone(rank: int) -> None:
    model = DistributedDataParallel(nn.Linear(8, 2))
    before = calls()
    traced = torch.jit.trace(model, torch.randn(1, 8))
    assert calls() == before
    assert torch.equal(traced(torch.ones(1, 8)), model.module(torch.ones(1, 8)))


def what_it_cannot_hold_is_refused(rank: int) -> None:
    with pytest.raises(ValueError, match="no shape yet"):
        DistributedDataParallel(nn.LazyLinear(2))
    with pytest.raises((NotImplementedError, TypeError, ValueError), match=r"'weight'.*meta"):
        DistributedDataParallel(nn.Linear(2, 2, device="meta"))
    mesh = DeviceMesh("cpu", list(range(bagua.get_world_size())))
    split = nn.Linear(2, 6)
    split.weight = nn.Parameter(distribute_tensor(split.weight.detach(), mesh, [Shard(0)]))
    with pytest.raises(NotImplementedError, match="'weight' is a DTensor"):
        DistributedDataParallel(split)


def unwrap_lets_the_model_train_alone(rank: int) -> None:
    model = DistributedDataParallel(nn.Linear(8, 2))
    bagua.unwrap(model)
    if rank == 0:
        model(torch.randn(2, 8)).sum().backward()
    again = DistributedDataParallel(model.module)
    step(again, torch.optim.SGD(again.parameters(), lr=0.1))
    assert same_everywhere(*again.parameters())


REDUCTIONS: dict[bagua.ReduceOp, Any] = {
    bagua.ReduceOp.SUM: lambda x: x.sum(0),
    bagua.ReduceOp.AVG: lambda x: x.mean(0),
    bagua.ReduceOp.MAX: lambda x: x.amax(0),
}


def everybodys(tensor: torch.Tensor, size: int, group: Any) -> torch.Tensor:
    whole = tensor.new_empty((size, *tensor.shape))
    bagua.allgather(tensor.detach().contiguous(), whole, group)
    return whole


def gradients_pass_through_an_all_reduce(rank: int) -> None:
    pair: Any = bagua.new_group([0, 2])
    for op, reduction in REDUCTIONS.items():
        for group, ranks in ((None, range(bagua.get_world_size())), (pair, [0, 2])):
            if rank not in ranks:
                with pytest.raises(ValueError, match="not in"):
                    all_reduce(torch.ones(1), op, group)
                continue
            # Small whole numbers: some elements are the maximum of several ranks; not contiguous.
            x = torch.randint(0, 3, (5, 7)).double().t().requires_grad_()
            factor = torch.randn(7, 5, dtype=torch.float64)
            given = x.detach().clone()
            result = all_reduce(x, op, group)
            (gradient,) = torch.autograd.grad((result * factor).sum(), x)
            # The oracle: one process with all ranks' tensors, whose loss is the sum of theirs.
            stacked = everybodys(x, len(ranks), group).requires_grad_()
            expected = reduction(stacked)
            (expected * everybodys(factor, len(ranks), group).sum(0)).sum().backward()
            assert torch.equal(x, given)
            torch.testing.assert_close(result, expected, rtol=0, atol=1e-12)
            torch.testing.assert_close(gradient, stacked.grad[list(ranks).index(rank)], rtol=0, atol=1e-12)


def what_an_all_reduce_has_no_gradient_for_is_refused(rank: int) -> None:
    before = calls()
    for op in set(bagua.ReduceOp) - set(REDUCTIONS):
        with pytest.raises(NotImplementedError, match=op.name):
            all_reduce(torch.ones(1), op)
    with pytest.raises(TypeError, match="ReduceOp"):
        all_reduce(torch.ones(1), dist.ReduceOp.SUM)  # type: ignore[arg-type]
    assert calls() == before
    whole = all_reduce(torch.tensor([1 + rank]))
    assert whole.item() == sum(1 + other for other in range(bagua.get_world_size()))
    assert all_reduce(torch.tensor(float("nan"), requires_grad=True), bagua.ReduceOp.MAX).isnan()


CASES = cases_in(globals())

test_the_wrapper = each_case(CASES, 3)
