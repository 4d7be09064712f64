"""SyncBatchNorm on several ranks equals BatchNorm on the concatenated batch."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import bagua.torch_api as bagua
from bagua.torch_api.contrib.sync_batchnorm import SyncBatchNorm
from tests.distributed.torch_ranks import cases_in, each_case, same_everywhere

TOLERANCE = {"rtol": 1e-6, "atol": 1e-6}
CHANNELS = 5


def batches(sizes: list[int], *shape: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Every rank's batch, the same on all ranks; channels differ in mean and scale."""
    generator = torch.Generator().manual_seed(len(shape) + sum(sizes))
    scale = torch.linspace(0.5, 3.0, CHANNELS).view(1, -1, *[1] * len(shape))
    return [
        (torch.randn(size, CHANNELS, *shape, generator=generator) * scale + 2 * scale - i).to(dtype)
        for i, size in enumerate(sizes)
    ]


def compare(rank: int, module: SyncBatchNorm, parts: list[torch.Tensor], group: list[int] | None = None) -> None:
    """Three training steps of the module, against a plain one on the concatenation of all parts."""
    members = group if group is not None else list(range(len(parts)))
    mine = members.index(rank)
    plain = nn.BatchNorm1d(
        CHANNELS, module.eps, module.momentum, module.affine, module.track_running_stats, dtype=torch.float64
    )
    if module.affine:
        with torch.no_grad():
            for one, other in ((module.weight, plain.weight), (module.bias, plain.bias)):
                one.copy_(torch.linspace(-1.0, 2.0, CHANNELS))
                other.copy_(one)
    for step in range(3):
        module.zero_grad()
        plain.zero_grad()
        xs = [(part + step).double().requires_grad_() for part in parts]
        x = (parts[mine] + step).requires_grad_()
        y = module(x)
        # BatchNorm1d takes any spatial size in one dimension.
        whole = plain(torch.cat([part.flatten(2) if part.dim() > 2 else part for part in xs]))
        expected = whole.split([len(part) for part in parts])[mine].reshape(y.shape)
        torch.testing.assert_close(y.double(), expected, **TOLERANCE)
        factor = torch.cos(torch.arange(whole.numel(), dtype=torch.float64)).view_as(whole)
        (whole * factor).sum().backward()
        (y * factor.split([len(part) for part in parts])[mine].reshape(y.shape).to(y.dtype)).sum().backward()
        gradient = xs[mine].grad
        assert x.grad is not None
        assert gradient is not None
        torch.testing.assert_close(x.grad.double(), gradient, **TOLERANCE)
        if module.affine:
            for one, other in ((module.weight, plain.weight), (module.bias, plain.bias)):
                total = one.grad.double()
                bagua.allreduce_inplace(total, comm=bagua.communication.to_bagua_process_group(module.process_group))
                torch.testing.assert_close(total, other.grad, **TOLERANCE)
        if module.track_running_stats:
            torch.testing.assert_close(module.running_mean.double(), plain.running_mean, **TOLERANCE)
            torch.testing.assert_close(module.running_var.double(), plain.running_var, **TOLERANCE)
            assert torch.equal(module.num_batches_tracked, plain.num_batches_tracked)


def equal_batches_of_every_shape(rank: int) -> None:
    for shape in ((), (7,), (3, 4), (2, 3, 2)):
        compare(rank, SyncBatchNorm(CHANNELS), batches([4] * bagua.get_world_size(), *shape))


def unequal_batches_are_weighted(rank: int) -> None:
    compare(rank, SyncBatchNorm(CHANNELS), batches([3 + 2 * i for i in range(bagua.get_world_size())], 3, 2))


def a_rank_may_have_no_sample_at_all(rank: int) -> None:
    compare(rank, SyncBatchNorm(CHANNELS), batches([0, *[3] * (bagua.get_world_size() - 1)], 2, 2))


def options_mean_what_they_mean_in_torch(rank: int) -> None:
    sizes = [4] * bagua.get_world_size()
    compare(rank, SyncBatchNorm(CHANNELS, affine=False), batches(sizes, 2))
    compare(rank, SyncBatchNorm(CHANNELS, momentum=None), batches(sizes, 2))
    compare(rank, SyncBatchNorm(CHANNELS, track_running_stats=False), batches(sizes, 2))
    compare(rank, SyncBatchNorm(CHANNELS, eps=0.1, momentum=0.3), batches(sizes, 2))


def half_precision_input_gets_half_precision_output(rank: int) -> None:
    parts = batches([4] * bagua.get_world_size(), 3)
    half = SyncBatchNorm(CHANNELS)
    x = parts[rank].bfloat16().requires_grad_()
    y = half(x)
    y.sum().backward()
    assert y.dtype == x.grad.dtype == torch.bfloat16
    full = nn.BatchNorm1d(CHANNELS)(torch.cat(parts).bfloat16().float()).split([4] * len(parts))[rank]
    torch.testing.assert_close(y.float(), full, rtol=0.01, atol=0.01)


def a_large_mean_does_not_cancel(rank: int) -> None:
    parts = [part.double() + 1e6 for part in batches([4] * bagua.get_world_size(), 3)]
    compare(rank, SyncBatchNorm(CHANNELS, dtype=torch.float64), parts)


def evaluation_does_not_communicate(rank: int) -> None:
    module = SyncBatchNorm(CHANNELS)
    module.eval()
    if rank == 0:
        x = batches([4], 3)[0]
        torch.testing.assert_close(module(x), nn.BatchNorm1d(CHANNELS).eval()(x))


def a_process_group_synchronises_its_members_only(rank: int) -> None:
    members = list(range(bagua.get_world_size()))[1:]
    group = bagua.new_group(members)
    module = SyncBatchNorm(CHANNELS, process_group=group)
    if rank in members:
        compare(rank, module, batches([4] * len(members), 3), members)
    else:
        with pytest.raises(ValueError, match="this rank is not in"):
            module(batches([4], 3)[0])


def too_few_values_are_an_error_on_every_rank(rank: int) -> None:
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        SyncBatchNorm(CHANNELS)(torch.randn(int(rank == 0), CHANNELS))


def wrong_input_is_refused_before_anything_is_sent(rank: int) -> None:
    if rank == 0:
        module = SyncBatchNorm(CHANNELS)
        with pytest.raises(ValueError, match="at least 2 dimensions"):
            module(torch.randn(CHANNELS))
        with pytest.raises(ValueError, match="of 5 channels got input of shape"):
            module(torch.randn(4, CHANNELS + 1))
        with pytest.raises(TypeError, match="floating-point"):
            module(torch.ones(4, CHANNELS, dtype=torch.int64))


def converting_keeps_parameters_and_buffers(rank: int) -> None:
    model = nn.Sequential(nn.Conv2d(3, CHANNELS, 3), nn.BatchNorm2d(CHANNELS), nn.Sequential(nn.BatchNorm2d(CHANNELS)))
    model[1].eval()
    before = dict(model.named_parameters()) | dict(model.named_buffers())
    converted = SyncBatchNorm.convert_sync_batchnorm(model)
    after = dict(converted.named_parameters()) | dict(converted.named_buffers())
    assert converted is model
    assert before.keys() == after.keys()
    assert all(before[name] is after[name] for name in before)
    assert isinstance(model[1], SyncBatchNorm)
    assert isinstance(model[2][0], SyncBatchNorm)
    assert (model[1].training, model[2][0].training) == (False, True)
    assert isinstance(SyncBatchNorm.convert_sync_batchnorm(nn.BatchNorm1d(3)), SyncBatchNorm)
    with pytest.raises(ValueError, match="lazy"):
        SyncBatchNorm.convert_sync_batchnorm(nn.LazyBatchNorm1d())


def a_converted_model_trains_like_one_on_the_whole_batch(rank: int) -> None:
    ranks = bagua.get_world_size()
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(6, CHANNELS), nn.BatchNorm1d(CHANNELS), nn.ReLU(), nn.Linear(CHANNELS, 1)).double()
    plain = copy.deepcopy(model)
    model = SyncBatchNorm.convert_sync_batchnorm(model)
    first = torch.optim.SGD(model.parameters(), lr=0.1)
    second = torch.optim.SGD(plain.parameters(), lr=0.1)
    model.with_bagua([first], bagua.algorithms.GradientAllReduceAlgorithm())
    for step in range(5):
        x = torch.randn(4 * ranks, 6, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        for network, optimizer, part in ((model, first, x.chunk(ranks)[rank]), (plain, second, x)):
            optimizer.zero_grad()
            network(part).square().mean().backward()
            optimizer.step()
    for one, other in zip(model.state_dict().values(), plain.state_dict().values(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)
    assert same_everywhere(*model.parameters())


CASES = cases_in(globals())

test = each_case(CASES, 2, 3, 4)
