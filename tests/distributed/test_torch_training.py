"""with_bagua where it is easy to go wrong: what a model may be, and what a user may do between two steps.

What must be as with torch's DistributedDataParallel is in test_front_ends.py.
"""

from __future__ import annotations

import contextlib
import copy
import io
import os
import pickle
import threading

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import bagua.torch_api as bagua
from bagua.errors import BaguaError, MismatchError
from bagua.torch_api.bucket import BaguaBucket
from bagua.torch_api.communication import BaguaProcessGroup
from bagua.torch_api.data_parallel import DistributedDataParallel
from bagua.torch_api.data_parallel.bagua_distributed import BaguaDistributedDataParallel
from tests.distributed.torch_ranks import cases_in, each_case, same_everywhere
from tests.waits import until


def allreduce() -> bagua.algorithms.GradientAllReduceAlgorithm:
    return bagua.algorithms.GradientAllReduceAlgorithm()


def sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def wrapped(model: torch.nn.Module, **options: object) -> torch.optim.Optimizer:
    optimizer = sgd(model)
    model.with_bagua([optimizer], allreduce(), **options)
    return optimizer


def buffers_and_frozen_parameters_start_equal(rank: int) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2))
    model[0].weight.requires_grad_(False)
    model[1].running_mean.fill_(float(rank))
    model[1].num_batches_tracked.fill_(rank)
    model.register_buffer("phase", torch.full((2,), 1j * rank))
    model.register_buffer("small", torch.full((3,), rank, dtype=torch.float8_e4m3fn))
    wrapped(model)
    small = model.small.view(torch.uint8)
    assert same_everywhere(model[0].weight, model[1].running_mean, model[1].num_batches_tracked, small)
    assert torch.equal(model.phase, torch.zeros(2, dtype=torch.complex64))


def ignored_parameters_and_buffers_stay_apart(rank: int) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    model._bagua_params_and_buffers_to_ignore = ["0.bias"]
    model._ddp_params_and_buffers_to_ignore = ["1.running_mean"]
    with torch.no_grad():
        model[0].bias.fill_(float(rank))
        model[1].running_mean.fill_(float(rank))
    wrapped(model)
    assert model[0].bias.sum() == 4.0 * rank
    assert model[1].running_mean.sum() == 4.0 * rank
    (model(torch.randn(5, 3)) * (rank + 1)).square().sum().backward()
    assert same_everywhere(model[0].weight.grad)
    assert "0.bias" not in [name for name, _ in model.bagua_ddp.bagua_build_params()]


def checkpoints_are_waited_for_whole(rank: int) -> None:
    for use_reentrant in (True, False):
        for checkpointed in ((0, 1), (0,), (1,)):
            model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
            wrapped(model)
            y = torch.randn(2, 3, requires_grad=True)
            for i, layer in enumerate(model):
                y = checkpoint(layer, y, use_reentrant=use_reentrant) if i in checkpointed else layer(y)
            y.square().sum().backward()
            assert same_everywhere(*(parameter.grad for parameter in model.parameters()))


def threads() -> set[str]:
    """The threads of this process by number. One that was joined is listed for a moment more."""
    return set(os.listdir("/proc/self/task"))


def a_model_can_be_wrapped_again(rank: int) -> None:
    model = torch.nn.Linear(3, 2)
    optimizer = wrapped(model)
    counts: list[int] = []
    for average in (True, False, True):
        model.with_bagua([optimizer], bagua.algorithms.GradientAllReduceAlgorithm(average=average))
        counts.append(len(threads()))
        until(lambda: len(threads()) <= counts[0], "the thread of an earlier wrapping's engine ends")
        assert len(model._forward_pre_hooks) == 1
        assert len(model.weight._post_accumulate_grad_hooks) == 1
        assert len(optimizer._optimizer_step_post_hooks) == 1
        optimizer.zero_grad()
        model(torch.ones(1, 3)).sum().backward()
        assert model.bias.grad[0] == (1 if average else bagua.get_world_size())


def copies_of_a_model_are_plain_and_train_alone(rank: int) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    wrapped(model)
    model(torch.randn(5, 3)).square().sum().backward()
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.load(file, weights_only=False)):
        assert not hasattr(twin, "bagua_ddp")
        assert list(twin.state_dict()) == list(model.state_dict())
        assert not any(parameter.is_bagua_tensor() for parameter in twin.parameters())
        twin.zero_grad()
        (twin(torch.randn(5, 3)) * (rank + 1)).square().sum().backward()
        assert not same_everywhere(twin[0].weight.grad) or bagua.get_world_size() == 1
    assert list(model.state_dict())[:2] == ["0.weight", "0.bias"]
    model.zero_grad()
    model(torch.randn(5, 3)).square().sum().backward()
    assert same_everywhere(model[0].weight.grad)


def optimizer_state_becomes_that_of_rank_0(rank: int) -> None:
    kinds = (
        lambda p: torch.optim.Adam(p, lr=0.1 * (rank + 1)),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        lambda p: torch.optim.Rprop(p, lr=0.1),
    )
    for make in kinds:
        for fresh in (None, 0, 1):
            model = torch.nn.Linear(3, 2)
            optimizer = make(model.parameters())
            # One rank has nothing to send, or nothing to receive into.
            for _ in range(0 if rank == fresh else 1 + rank):
                model(torch.randn(2, 3)).sum().backward()
                optimizer.step()
            model.with_bagua([optimizer], allreduce())
            state = pickle.dumps(_plain(optimizer.state_dict()))
            assert bagua.broadcast_object(state) == state
            assert bool(optimizer.state) == (fresh != 0)
            model(torch.randn(2, 3)).sum().backward()
            optimizer.step()
            assert same_everywhere(model.weight)


def optimizer_state_keeps_its_dtypes(rank: int) -> None:
    model = torch.nn.Linear(3, 2, dtype=torch.bfloat16)
    optimizer = torch.optim.NAdam(model.parameters(), lr=0.1)
    for _ in range(2):
        # Again with a state.
        model.with_bagua([optimizer], allreduce())
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(2, 3, dtype=torch.bfloat16)).square().sum().backward()
            optimizer.step()
    # torch's load_state_dict would have made it bfloat16 on the ranks that receive it.
    assert optimizer.state[model.weight]["mu_product"].dtype is torch.float32
    assert same_everywhere(optimizer.state[model.weight]["mu_product"], model.weight.float())


def _plain(value: object) -> object:
    if isinstance(value, torch.Tensor):
        return (str(value.dtype), tuple(value.shape), value.tolist())
    if isinstance(value, dict):
        return {key: _plain(entry) for key, entry in value.items()}
    return [_plain(entry) for entry in value] if isinstance(value, (list, tuple)) else value


def models_that_differ_are_named_on_every_rank(rank: int) -> None:
    if bagua.get_world_size() == 1:
        return
    last = rank == bagua.get_world_size() - 1
    models = (
        torch.nn.Linear(3, 4 if last else 2),
        torch.nn.Linear(3, 2, bias=not last),
        torch.nn.Linear(3, 2, dtype=torch.float64 if last else torch.float32),
    )
    for model, said in zip(models, ("'weight' float32[2, 3]", "'bias'", "'weight' float64[2, 3]"), strict=True):
        with pytest.raises(MismatchError) as caught:
            wrapped(model)
        assert said in str(caught.value)
        assert f"rank {bagua.get_world_size() - 1} has" in str(caught.value)
    # The comparison comes before everything else, so nothing is broken.
    model = torch.nn.Linear(3, 2)
    with pytest.raises(MismatchError, match="bucket_size"):
        wrapped(model, bucket_size=100 + rank)
    wrapped(model)


def models_that_cannot_be_wrapped_are_refused(rank: int) -> None:
    with pytest.raises(ValueError, match="'weight' has no shape yet"):
        wrapped(torch.nn.LazyLinear(2))
    with pytest.raises(NotImplementedError, match="is on meta"):
        wrapped(torch.nn.Linear(2, 2, device="meta"))
    with pytest.raises(TypeError, match="algorithm must be an Algorithm"):
        torch.nn.Linear(2, 2).with_bagua([], 3)
    for buffer, error, text in (
        (torch.arange(3.0).expand(2, 3), ValueError, r"buffer 'extra' of shape \[2, 3\] is expanded"),
        (torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8), NotImplementedError, "'extra' is quantized"),
        (torch.nn.parameter.UninitializedBuffer(), ValueError, "buffer 'extra' has no shape yet"),
    ):
        model = torch.nn.Linear(2, 2)
        model.register_buffer("extra", buffer)
        with pytest.raises(error, match=text):
            wrapped(model)
    shared = torch.nn.Linear(2, 2)
    wrapped(shared)
    with pytest.raises(ValueError, match=r"'0.weight' is already communicated by model 'Linear"):
        wrapped(torch.nn.Sequential(shared))
    if bagua.get_world_size() > 1:
        # One rank's own mistake is raised on the others too, and the group stays usable.
        with pytest.raises(ValueError if rank == 0 else MismatchError, match="'weight' has no shape yet"):
            wrapped(torch.nn.LazyLinear(2) if rank == 0 else torch.nn.Linear(2, 2))
    wrapped(torch.nn.Linear(2, 2))


def parameters_that_come_or_change_later_are_named(rank: int) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    optimizer = wrapped(model)
    model[0].bias.requires_grad_(False)
    with pytest.raises(BaguaError, match=r"\['0.bias'\] no longer do.*or pass find_unused_parameters=True to freeze"):
        model(torch.ones(1, 3))
    model[0].bias.requires_grad_(True)
    model.append(torch.nn.Linear(3, 3))
    with pytest.raises(BaguaError, match=r"'2.weight', '2.bias'\] now need"):
        model(torch.ones(1, 3))
    model.with_bagua([optimizer], allreduce())
    model(torch.ones(1, 3)).sum().backward()
    assert same_everywhere(model[2].weight.grad)
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)
    with pytest.raises(BaguaError, match=r"'2.bias'\] are other Parameter objects"):
        model(torch.ones(1, 3))


def a_backward_that_broke_off_is_forgotten(rank: int) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    wrapped(model, bucket_size=1)
    handle = model[0].weight.register_hook(lambda grad: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(torch.ones(1, 3)).sum().backward()
    handle.remove()
    bagua.barrier()
    model.zero_grad()
    model(torch.full((1, 3), float(rank))).sum().backward()
    assert same_everywhere(*(parameter.grad for parameter in model.parameters()))


def an_error_of_the_communication_thread_surfaces_in_backward(rank: int) -> None:
    model = torch.nn.Linear(3, 2)
    wrapped(model)
    names: list[tuple[str, int]] = []
    main = threading.get_ident()
    for bucket in model.bagua_buckets:
        bucket.append_python_op(lambda name: names.append((name, threading.get_ident())))
    model(torch.ones(1, 3)).sum().backward()
    assert [name for name, _ in names] == [bucket.name for bucket in model.bagua_buckets]
    assert all(thread != main for _, thread in names)


def a_model_trains_on_a_sub_group(rank: int) -> None:
    size = bagua.get_world_size()
    ranks = list(range(1, size)) or [0]
    group = bagua.new_group(ranks)
    model = torch.nn.Linear(3, 2)
    if rank in ranks:
        optimizer = sgd(model)
        model.with_bagua([optimizer], allreduce(), process_group=group)
        (model(torch.ones(1, 3)) * rank).sum().backward()
        assert torch.allclose(model.bias.grad, torch.full((2,), sum(ranks) / len(ranks)))
    else:
        with pytest.raises(ValueError, match="this rank is not in"):
            model.with_bagua([sgd(model)], allreduce(), process_group=group)


def the_original_names_are_there(rank: int) -> None:
    model = torch.nn.Linear(3, 2)
    model.bagua_module_name = f"net_{id(model) * 0}"
    optimizer = wrapped(model)
    assert model.bagua_module_name == "net_0"
    assert model.bagua_optimizers == [optimizer]
    assert isinstance(model.bagua_algorithm, bagua.algorithms.AlgorithmImpl)
    assert [tensor.bagua_tensor_name for tensor in model.bagua_buckets[0].tensors] == ["bias", "weight"]
    with contextlib.suppress(AttributeError):
        assert torch.nn.Linear(2, 2).bagua_ddp is None
    assert bagua.communication.get_backend("net_0") is model.bagua_ddp.backend


class OfTheOriginal(bagua.algorithms.AlgorithmImpl):
    """Annotates as the algorithms of the original do."""

    def init_operations(self, bagua_ddp: BaguaDistributedDataParallel, bucket: BaguaBucket) -> None:
        assert isinstance(bagua_ddp, BaguaDistributedDataParallel)
        bucket.append_centralized_synchronous_op(hierarchical=False, average=True, group=self.process_group)


class OfTheOriginalAlgorithm(bagua.algorithms.Algorithm):
    def reify(self, process_group: BaguaProcessGroup) -> OfTheOriginal:
        return OfTheOriginal(process_group)


def an_algorithm_of_the_original_meets_the_class_that_it_imports(rank: int) -> None:
    for wrap in (
        lambda model: model.with_bagua([sgd(model)], OfTheOriginalAlgorithm()),
        lambda model: DistributedDataParallel(model, optimizers=[sgd(model)], algorithm=OfTheOriginalAlgorithm()),
    ):
        model = wrap(torch.nn.Linear(3, 2))
        assert isinstance(model.bagua_ddp, BaguaDistributedDataParallel)
        model(torch.full((1, 3), float(rank))).sum().backward()
        assert same_everywhere(*(param.grad for param in model.parameters()))


CASES = cases_in(globals())

test = each_case(CASES, 1, 2, 3, 4)
