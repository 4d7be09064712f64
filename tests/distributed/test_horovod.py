"""Horovod's API: every operation against an oracle that computes all ranks' tensors, gradients against plain torch."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

import bagua.horovod.torch as hvd
from bagua.errors import BaguaError, MismatchError
from bagua.torch_api.process_group import DTYPES
from tests.distributed.torch_ranks import cases_in, each_case, same_everywhere
from tests.world import make_world

RANKS = 3
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
WHOLE = tuple(dtype for dtype in DTYPES if not (dtype.is_floating_point or dtype.is_complex or dtype is torch.bool))
#: The core has no code for it: it is moved as bytes.
FLOAT8 = torch.float8_e4m3fn


def data(rank: int, *shape: int, dtype: torch.dtype = torch.float32, low: int = 0) -> torch.Tensor:
    """What a rank contributes: small whole numbers, so that no dtype has to round."""
    generator = torch.Generator().manual_seed(100 * rank + sum(shape))
    return torch.randint(low, 4, shape, generator=generator).to(dtype)


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """torch.equal, which torch 2.5 lacks for float8."""
    if one.dtype == other.dtype == FLOAT8:
        one, other = one.view(torch.uint8), other.view(torch.uint8)
    return torch.equal(one, other)


def stacked(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.stack([data(rank, *shape, dtype=dtype) for rank in range(RANKS)])


def combined(values: torch.Tensor, op: Any) -> torch.Tensor:
    """The oracle of a reduction: all ranks' tensors along the first dimension."""
    wide = values.double() if values.is_floating_point() else values.long()
    if op is hvd.Min or op is hvd.Max:
        result = wide.amin(0) if op is hvd.Min else wide.amax(0)
    elif op is hvd.Product:
        result = wide.prod(0)
    else:
        result = wide.sum(0)
        if op is hvd.Average:
            result = result / len(wide) if values.is_floating_point() else result // len(wide)
    return result.to(values.dtype)


def raises(error: type[BaseException], text: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    with pytest.raises(error, match=text):
        function(*args, **kwargs)


# --- reductions -------------------------------------------------------------------------------------------------------


def allreduce_equals_the_oracle_for_every_dtype_and_operation(rank: int) -> None:
    for dtype, op in itertools.product((*FLOATS, *WHOLE), (hvd.Average, hvd.Sum, hvd.Min, hvd.Max, hvd.Product)):
        for shape in ((), (0,), (5,), (2, 3)):
            mine, expected = data(rank, *shape, dtype=dtype), combined(stacked(*shape, dtype=dtype), op)
            before = mine.clone()
            results = [
                hvd.allreduce(mine, op=op),
                hvd.synchronize(hvd.allreduce_async(mine, op=op, name="a name")),
            ]
            assert torch.equal(mine, before)
            for result in results:
                assert result.dtype == dtype
                torch.testing.assert_close(result, expected, msg=f"{dtype} {op} {shape}")
            assert hvd.allreduce_(mine, op=op) is mine
            assert torch.equal(mine, results[0])
            again = before.clone()
            handle = hvd.allreduce_async_(again, op=op)
            assert hvd.synchronize(handle) is again
            assert hvd.poll(handle)
            assert torch.equal(again, results[0])


def the_default_is_the_average_and_average_false_the_sum(rank: int) -> None:
    mine, all_ranks = data(rank, 4), stacked(4)
    torch.testing.assert_close(hvd.allreduce(mine), all_ranks.mean(0))
    torch.testing.assert_close(hvd.allreduce(mine, average=True), all_ranks.mean(0))
    torch.testing.assert_close(hvd.allreduce(mine, average=False), all_ranks.sum(0))
    torch.testing.assert_close(hvd.grouped_allreduce([mine], False)[0], all_ranks.sum(0))


def averages_of_negative_whole_numbers_are_cut_towards_zero(rank: int) -> None:
    mine = torch.tensor([-1, -4, 5, rank], dtype=torch.int32)
    mine[0] -= int(rank == 0)
    assert hvd.allreduce(mine).tolist() == [-1, -4, 5, 1]
    assert hvd.reducescatter(torch.tensor([-1, -1, -1 - rank]) - int(rank == 0), op=hvd.Average).tolist() == [
        (-1, -1, -2)[rank]
    ]


def factors_multiply_before_and_after(rank: int) -> None:
    mine, total = data(rank, 6), stacked(6).sum(0)
    result = hvd.allreduce(mine, op=hvd.Sum, prescale_factor=0.5, postscale_factor=3.0)
    torch.testing.assert_close(result, total * 1.5)
    whole = data(rank, 6, dtype=torch.int64)
    halves = sum((data(other, 6).double() * 0.5).trunc() for other in range(RANKS))
    assert torch.equal(hvd.allreduce(whole, op=hvd.Sum, prescale_factor=0.5), halves.long())
    shard = hvd.reducescatter(mine, op=hvd.Sum, prescale_factor=0.5, postscale_factor=3.0)
    torch.testing.assert_close(shard, (total * 1.5)[2 * rank : 2 * rank + 2])


def fp16_compression_sends_float16_and_returns_the_dtype(rank: int) -> None:
    tensors = [torch.full((3,), 1.0001 + rank), torch.full((2,), 0.1, dtype=torch.float64), torch.tensor([rank])]
    half = [torch.full((3,), 1.0001 + other).half().float() for other in range(RANKS)]
    results = hvd.grouped_allreduce(tensors, compression=hvd.Compression.fp16, op=hvd.Sum)
    assert [result.dtype for result in results] == [torch.float32, torch.float64, torch.int64]
    torch.testing.assert_close(results[0], sum(half).half().float())
    assert float(results[1][0]) == float(torch.tensor(0.1).half() * 3)
    assert results[2].item() == 3
    assert torch.equal(hvd.allreduce(tensors[0], compression=hvd.Compression.fp16, op=hvd.Sum), results[0])
    shard = hvd.reducescatter(tensors[0], compression=hvd.Compression.fp16, op=hvd.Sum)
    assert torch.equal(shard, results[0][:1])


def grouped_allreduce_has_the_results_of_single_ones(rank: int) -> None:
    tensors = [data(rank, 3), data(rank, 2, 2, dtype=torch.float64), data(rank, 5), data(rank, 4, dtype=torch.int64)]
    expected = [hvd.allreduce(tensor, op=hvd.Sum) for tensor in tensors]
    for results in (
        hvd.grouped_allreduce(tensors, op=hvd.Sum),
        hvd.synchronize(hvd.grouped_allreduce_async(tensors, op=hvd.Sum)),
    ):
        assert all(map(torch.equal, results, expected))
    copies = [tensor.clone() for tensor in tensors]
    again = [tensor.clone() for tensor in tensors]
    assert hvd.grouped_allreduce_(copies, op=hvd.Sum)[1] is copies[1]
    assert hvd.synchronize(hvd.grouped_allreduce_async_(again, op=hvd.Sum))[2] is again[2]
    assert all(map(torch.equal, copies, expected))
    assert all(map(torch.equal, again, expected))


def tensors_with_gaps_and_leaves_are_reduced_in_place(rank: int) -> None:
    whole = data(rank, 4, 3)
    expected = stacked(4, 3).sum(0)
    view = whole.t()[1:]
    hvd.allreduce_(view, op=hvd.Sum)
    assert torch.equal(view, expected.t()[1:])
    assert torch.equal(whole[:, 0], data(rank, 4, 3)[:, 0])
    leaf = torch.nn.Parameter(data(rank, 4))
    hvd.allreduce_(leaf, op=hvd.Sum)
    assert torch.equal(leaf.detach(), stacked(4).sum(0))


def reducescatter_gives_the_first_ranks_a_row_more(rank: int) -> None:
    for rows, op in itertools.product((0, 1, 2, 3, 5, 7), (hvd.Average, hvd.Sum, hvd.Max)):
        mine = data(rank, rows, 2)
        expected = combined(stacked(rows, 2), op).tensor_split(RANKS)[rank]
        results = [
            hvd.reducescatter(mine, op=op),
            hvd.synchronize(hvd.reducescatter_async(mine, op=op)),
            hvd.grouped_reducescatter([mine, mine], op=op)[1],
            hvd.synchronize(hvd.grouped_reducescatter_async([mine, mine], op=op))[0],
        ]
        for result in results:
            assert result.shape == expected.shape
            torch.testing.assert_close(result, expected)
        assert torch.equal(mine, data(rank, rows, 2))


# --- moves ------------------------------------------------------------------------------------------------------------


def allgather_joins_tensors_of_different_lengths(rank: int) -> None:
    for dtype, lengths in itertools.product(
        (*FLOATS, *WHOLE, FLOAT8, torch.bool), ((2, 2, 2), (3, 0, 1), (0, 0, 4), (0, 0, 0))
    ):
        tensors = [data(other, lengths[other], 2, dtype=dtype) for other in range(RANKS)]
        expected = torch.cat(tensors)
        for result in (
            hvd.allgather(tensors[rank]),
            hvd.synchronize(hvd.allgather_async(tensors[rank])),
            hvd.grouped_allgather([tensors[rank], tensors[rank][:0]])[0],
            hvd.synchronize(hvd.grouped_allgather_async([tensors[rank]]))[0],
        ):
            assert result.dtype == dtype
            assert same(result, expected)


def broadcast_has_the_values_of_its_root(rank: int) -> None:
    for root, dtype, shape in itertools.product(
        range(RANKS), (*FLOATS, FLOAT8, torch.bool, torch.int64), ((), (4,), (2, 3))
    ):
        mine, expected = data(rank, *shape, dtype=dtype), data(root, *shape, dtype=dtype)
        before = mine.clone()
        assert same(hvd.broadcast(mine, root), expected)
        assert same(hvd.synchronize(hvd.broadcast_async(mine, root)), expected)
        assert same(mine, before)
        assert hvd.broadcast_(mine, root) is mine
        assert same(mine, expected)
        assert hvd.synchronize(hvd.broadcast_async_(before, root)) is before
        assert same(before, expected)
    gaps = data(rank, 3, 4).t()
    hvd.broadcast_(gaps, 1)
    assert torch.equal(gaps, data(1, 3, 4).t())


def alltoall_sends_the_splits_and_says_what_came(rank: int) -> None:
    for dtype in (torch.float32, FLOAT8, torch.uint16, torch.int64):
        # Rank r sends r + p rows to rank p, and keeps one.
        tensors = [data(other, 3 * other + 4, 2, dtype=dtype) for other in range(RANKS)]
        expected = torch.cat(
            [tensor.split([other, other + 1, other + 2, 1])[rank] for other, tensor in enumerate(tensors)]
        )
        splits = [rank + peer for peer in range(RANKS)]
        for result, received in (
            hvd.alltoall(tensors[rank], torch.tensor(splits, dtype=torch.int32)),
            hvd.synchronize(hvd.alltoall_async(tensors[rank], splits)),
        ):
            assert same(result, expected)
            assert received.dtype == torch.int32
            assert received.tolist() == [other + rank for other in range(RANKS)]


def alltoall_without_splits_divides_evenly(rank: int) -> None:
    tensors = [data(other, 3 * (other + 1)) for other in range(RANKS)]
    expected = torch.cat([tensor.chunk(RANKS)[rank] for tensor in tensors])
    assert torch.equal(hvd.alltoall(tensors[rank]), expected)
    assert torch.equal(hvd.synchronize(hvd.alltoall_async(tensors[rank])), expected)


def handles_may_be_synchronized_in_another_order(rank: int) -> None:
    handles = [hvd.allreduce_async(torch.full((1000,), float(rank + turn)), op=hvd.Sum) for turn in range(8)]
    for turn in reversed(range(8)):
        assert float(hvd.synchronize(handles[turn])[-1]) == 3 + 3 * turn
    assert all(map(hvd.poll, handles))
    # A second time: the same result.
    assert float(hvd.synchronize(handles[0])[0]) == 3


# --- gradients --------------------------------------------------------------------------------------------------------


def weight(rank: int, *shape: int) -> torch.Tensor:
    """The gradient that arrives at a rank's result."""
    return data(rank + 10, *shape) + rank


def gradient(tensor: torch.Tensor, result: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    result.backward(grad)
    assert tensor.grad is not None
    return tensor.grad


def plain(shapes: list[tuple[int, ...]], function: Callable[..., list[torch.Tensor]]) -> list[torch.Tensor]:
    """The gradients of all ranks' tensors by plain torch: `function` makes all ranks' results of them."""
    leaves = [data(rank, *shape).requires_grad_() for rank, shape in enumerate(shapes)]
    results = function(*leaves)
    torch.autograd.backward(results, [weight(rank, *result.shape) for rank, result in enumerate(results)])
    return [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves]


def the_gradients_of_reductions_are_those_of_plain_torch(rank: int) -> None:
    for op, factor in ((hvd.Average, 1 / RANKS), (hvd.Sum, 1.0)):
        mine = data(rank, 5).requires_grad_()
        expected = plain([(5,)] * RANKS, lambda *all_ranks, f=factor: [sum(all_ranks) * f] * RANKS)[rank]
        torch.testing.assert_close(gradient(mine, hvd.allreduce(mine, op=op), weight(rank, 5)), expected)
        tensors = [data(rank, 5).requires_grad_(), data(rank, 5).requires_grad_()]
        first, second = hvd.grouped_allreduce(tensors, op=op)
        # The second result takes no part.
        torch.testing.assert_close(gradient(tensors[0], first, weight(rank, 5)), expected)
        assert not second.detach().requires_grad
    mine = data(rank, 5).requires_grad_()
    result = hvd.allreduce(mine, op=hvd.Sum, prescale_factor=2.0, postscale_factor=0.5)
    expected = plain([(5,)] * RANKS, lambda *all_ranks: [sum(all_ranks)] * RANKS)[rank]
    torch.testing.assert_close(gradient(mine, result, weight(rank, 5)), expected)


def the_gradient_of_reducescatter_is_that_of_the_average_or_of_all_ranks(rank: int) -> None:
    # As Horovod defines it: allgather of the gradients, for Sum times the number of ranks.
    grads = torch.cat(
        [weight(other, *shard.shape) for other, shard in enumerate(torch.empty(5, 2).tensor_split(RANKS))]
    )
    for op, factor in ((hvd.Average, 1), (hvd.Sum, RANKS)):
        mine = data(rank, 5, 2).requires_grad_()
        result = hvd.reducescatter(mine, op=op)
        torch.testing.assert_close(gradient(mine, result, weight(rank, *result.shape)), grads * factor)


def the_gradients_of_allgather_and_broadcast_are_the_mean_of_plain_torchs(rank: int) -> None:
    shapes: list[tuple[int, ...]] = [(2, 2), (0, 2), (3, 2)]
    mine = data(rank, *shapes[rank]).requires_grad_()
    expected = plain(shapes, lambda *all_ranks: [torch.cat(all_ranks)] * RANKS)[rank] / RANKS
    torch.testing.assert_close(gradient(mine, hvd.allgather(mine), weight(rank, 5, 2)), expected)
    for root in range(RANKS):
        mine = data(rank, 4).requires_grad_()
        expected = plain([(4,)] * RANKS, lambda *all_ranks, r=root: [all_ranks[r].clone() for _ in all_ranks])[rank]
        torch.testing.assert_close(gradient(mine, hvd.broadcast(mine, root), weight(rank, 4)), expected / RANKS)


def the_gradient_of_alltoall_is_that_of_plain_torch(rank: int) -> None:
    def by_torch(*tensors: torch.Tensor) -> list[torch.Tensor]:
        parts = [tensor.split([other, 1, 2, 1]) for other, tensor in enumerate(tensors)]
        return [torch.cat([part[peer] for part in parts]) for peer in range(RANKS)]

    shapes: list[tuple[int, ...]] = [(4 + other, 2) for other in range(RANKS)]
    mine = data(rank, *shapes[rank]).requires_grad_()
    result, received = hvd.alltoall(mine, [rank, 1, 2])
    assert not received.requires_grad
    torch.testing.assert_close(gradient(mine, result, weight(rank, *result.shape)), plain(shapes, by_torch)[rank])
    even = data(rank, 6).requires_grad_()
    assert torch.equal(gradient(even, hvd.alltoall(even), torch.ones(6)), torch.ones(6))


def min_max_and_product_have_no_gradient(rank: int) -> None:
    for op in (hvd.Min, hvd.Max, hvd.Product):
        result = hvd.allreduce(torch.ones(3, requires_grad=True), op=op)
        raises(NotImplementedError, "has no gradient: use Average or Sum", result.sum().backward)


# --- process sets -----------------------------------------------------------------------------------------------------


def a_process_set_communicates_among_its_ranks(rank: int) -> None:
    some = hvd.add_process_set([2, 0])
    other = hvd.add_process_set(hvd.ProcessSet([1, 2]))
    assert some.ranks == [0, 2]
    assert other.process_set_id == some.process_set_id + 1
    assert some.size() == 2
    assert some.included() == (rank != 1)
    for members in (some, other):
        if not members.included():
            raises(ValueError, f"rank {rank} is not in", hvd.allreduce, torch.ones(1), process_set=members)
            continue
        place = members.ranks.index(rank)
        assert members.rank() == place
        values = torch.stack([data(member, 4) for member in members.ranks])
        mine, root = data(rank, 4), members.ranks[1]
        torch.testing.assert_close(hvd.allreduce(mine, process_set=members), values.mean(0))
        assert torch.equal(hvd.allreduce(mine.int(), op=hvd.Average, process_set=members), values.int().sum(0) // 2)
        assert torch.equal(hvd.allgather(mine, process_set=members), values.view(-1))
        assert torch.equal(hvd.broadcast(mine, root, process_set=members), values[1])
        assert torch.equal(hvd.alltoall(mine, process_set=members), torch.cat([v.chunk(2)[place] for v in values]))
        shard = hvd.reducescatter(mine, op=hvd.Sum, process_set=members)
        assert torch.equal(shard, values.sum(0).chunk(2)[place])
        assert hvd.allgather_object(rank, process_set=members) == members.ranks
        assert hvd.broadcast_object(f"from {rank}", root, process_set=members) == f"from {root}"
        outside = ({0, 1, 2} - set(members.ranks)).pop()
        raises(ValueError, f"root_rank {outside} is not in", hvd.broadcast, mine, outside, process_set=members)
        hvd.barrier(process_set=members)
    raises(ValueError, "already", hvd.add_process_set, [0, 2])
    assert hvd.remove_process_set(some)
    assert not hvd.remove_process_set(some)
    assert not hvd.remove_process_set(hvd.global_process_set)
    raises(ValueError, "not registered", some.size)
    assert hvd.remove_process_set(other)
    assert hvd.global_process_set.ranks == [0, 1, 2]
    assert hvd.global_process_set.size() == 3
    assert hvd.global_process_set.rank() == rank
    assert hvd.global_process_set.included()


def ranks_that_make_no_process_set_are_refused(rank: int) -> None:
    raises(ValueError, "empty", hvd.ProcessSet, [])
    raises(ValueError, "twice", hvd.ProcessSet, [1, 1])
    raises(TypeError, "list of ranks", hvd.ProcessSet, 3)
    raises(ValueError, r"\[3\] are not in a job of 3", hvd.add_process_set, [0, 3])
    raises(ValueError, "not registered", hvd.allreduce, torch.ones(1), process_set=hvd.ProcessSet([0]))


# --- functions --------------------------------------------------------------------------------------------------------


def objects_travel_from_one_or_all(rank: int) -> None:
    assert hvd.broadcast_object({"rank": rank}, 2) == {"rank": 2}
    assert hvd.broadcast_object(None if rank else [1], name="a name") == [1]
    assert hvd.allgather_object("x" * rank) == ["", "x", "xx"]


def parameters_get_the_values_of_the_root(rank: int) -> None:
    def network(seed: int) -> torch.nn.Module:
        torch.manual_seed(seed)
        made = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2), torch.nn.Linear(2, 2).double())
        made.register_buffer("places", torch.full((2,), seed, dtype=FLOAT8))
        return made

    for root, take in itertools.product((0, 2), (lambda m: m.state_dict(), lambda m: m.named_parameters())):
        model, expected = network(rank), dict(take(network(root)))
        hvd.broadcast_parameters(take(model), root_rank=root)
        assert all(same(value, expected[name]) for name, value in dict(take(model)).items())
    hvd.broadcast_parameters([("nothing", None)], root_rank=0)
    raises(TypeError, "state_dict or named_parameters", hvd.broadcast_parameters, torch.ones(1), 0)
    raises(TypeError, "'a' is a int", hvd.broadcast_parameters, {"a": 1}, 0)
    raises(ValueError, "root_rank 3", hvd.broadcast_parameters, {}, 3)
    other = {"b" if rank == 1 else "a": torch.ones(2)}
    raises(MismatchError, "differ in names", hvd.broadcast_parameters, other, 0)


def optimizers_get_the_state_of_the_root(rank: int) -> None:
    def optimizer(seed: int, steps: int) -> torch.optim.Optimizer:
        torch.manual_seed(seed)
        params = [torch.nn.Parameter(torch.randn(3)), torch.nn.Parameter(torch.randn(2, 2))]
        made = torch.optim.AdamW(params, lr=0.1 + seed, betas=(0.5 + seed / 10, 0.9))
        for _ in range(steps):
            sum(param.square().sum() for param in params).backward()
            made.step()
        return made

    # The root's state may be the only one, and the others' may be more than the root's.
    for root, steps in ((1, lambda r: 3 * (r == 1)), (0, lambda r: r)):
        mine = optimizer(rank, steps(rank))
        expected = optimizer(root, steps(root)).state_dict()
        hvd.broadcast_optimizer_state(mine, root_rank=root)
        found = mine.state_dict()
        assert found["param_groups"] == expected["param_groups"]
        assert found["state"].keys() == expected["state"].keys()
        for key, state in expected["state"].items():
            assert all(torch.equal(found["state"][key][name], value) for name, value in state.items())
    raises(TypeError, "takes an optimizer", hvd.broadcast_optimizer_state, {}, 0)


def sync_batch_norm_is_batch_norm_on_all_samples(rank: int) -> None:
    samples = torch.randn(6, 2, generator=torch.Generator().manual_seed(3))
    plain_norm = torch.nn.BatchNorm1d(2)
    whole = samples.clone().requires_grad_()
    expected = plain_norm(whole)
    (expected * samples).sum().backward()
    norm = hvd.SyncBatchNorm(2)
    mine = samples[2 * rank : 2 * rank + 2].clone().requires_grad_()
    result = norm(mine)
    (result * mine.detach()).sum().backward()
    part = slice(2 * rank, 2 * rank + 2)
    torch.testing.assert_close(result, expected[part])
    torch.testing.assert_close(mine.grad, whole.grad[part])
    torch.testing.assert_close(norm.running_var, plain_norm.running_var)
    members = hvd.add_process_set([0, 1])
    if rank < 2:
        within = hvd.SyncBatchNorm(2, process_set=members)(samples[part])
        torch.testing.assert_close(within, torch.nn.BatchNorm1d(2)(samples[:4])[part])
    hvd.remove_process_set(members)
    raises(ValueError, "not registered", hvd.SyncBatchNorm, 2, process_set=members)


# --- what is refused --------------------------------------------------------------------------------------------------


def wrong_arguments_are_refused_before_anything_is_sent(rank: int) -> None:
    # On one rank alone: the others do not wait for it.
    if rank == 1:
        one = torch.ones(4)
        raises(ValueError, "give one of them", hvd.allreduce, one, average=True, op=hvd.Sum)
        raises(TypeError, "op is hvd.Average", hvd.allreduce, one, op=1)
        raises(TypeError, "torch.Tensor", hvd.allreduce, [1.0])
        raises(TypeError, "float8", hvd.allreduce, one.to(FLOAT8))
        raises(TypeError, "bool", hvd.allreduce, one.bool())
        raises(TypeError, "compression is", hvd.allreduce, one, compression="fp16")
        raises(TypeError, "process_set is", hvd.allreduce, one, process_set=[0])
        raises(ValueError, "not finite", hvd.allreduce, one, prescale_factor=float("nan"))
        raises(NotImplementedError, "sparse", hvd.allreduce, one.to_sparse())
        raises(ValueError, "empty", hvd.grouped_allreduce, [])
        raises(TypeError, "list of tensors", hvd.grouped_allreduce, one)
        raises(TypeError, r"tensors\[1\]", hvd.grouped_allreduce_async, [one, 2])
        raises(ValueError, "one dimension", hvd.allgather, torch.tensor(1.0))
        raises(ValueError, "one dimension", hvd.reducescatter, torch.tensor(1.0))
        raises(ValueError, "root_rank 3", hvd.broadcast, one, 3)
        raises(ValueError, "cannot divide 4 rows", hvd.alltoall, one)
        raises(ValueError, "2 splits for 3 ranks", hvd.alltoall, one, [2, 2])
        raises(ValueError, "with 4 rows", hvd.alltoall, one, [2, 2, 1])
        raises(ValueError, "with 4 rows", hvd.alltoall, one, [-1, 2, 1])
        raises(TypeError, "whole numbers", hvd.alltoall, one, torch.ones(3))
        raises(TypeError, "handle", hvd.synchronize, 3)
        raises(TypeError, "handle", hvd.poll, None)
    assert float(hvd.allreduce(torch.ones(1), op=hvd.Sum)) == 3.0


def what_is_not_there_says_what_to_use_instead(rank: int) -> None:
    raises(NotImplementedError, "use op=hvd.Average", hvd.allreduce, torch.ones(1), op=hvd.Adasum)
    raises(NotImplementedError, "rebuild", lambda: hvd.elastic.run)
    raises(NotImplementedError, "DistributedSampler", hvd.join)
    raises(NotImplementedError, "torchrun", hvd.run, print, np=2)
    raises(ImportError, "import bagua.horovod.torch as hvd", importlib.import_module, "bagua.horovod.tensorflow")
    raises(NotImplementedError, "sparse_as_dense", hvd.sparse_allreduce_async, torch.ones(1))
    raises(NotImplementedError, "bagua trace", hvd.start_timeline, "file")
    raises(NotImplementedError, "bagua trace", hvd.stop_timeline)
    raises(NotImplementedError, "ProcessSet", hvd.init, comm=[0])
    assert issubclass(hvd.HorovodInternalError, RuntimeError)
    assert issubclass(BaguaError, hvd.HorovodInternalError)
    for name in ("mpi", "gloo"):
        assert getattr(hvd, f"{name}_enabled")() is False
    for name in ("mpi", "gloo", "nccl", "ddl", "ccl", "cuda", "rocm"):
        assert getattr(hvd, f"{name}_built")() is False
    assert hvd.mpi_threads_supported() is False


def rows_that_differ_are_an_error_on_every_rank_and_the_job_goes_on(rank: int) -> None:
    raises(MismatchError, "allgather: rank", hvd.allgather, torch.ones(2, 2 + (rank == 2)))
    raises(hvd.HorovodInternalError, "allgather: rank", hvd.allgather, torch.ones(2).to(FLOATS[2 + (rank == 0)]))
    raises(MismatchError, "alltoall: rank", hvd.alltoall, torch.ones(3, 1 + (rank == 1)))
    assert same_everywhere(hvd.allgather(data(rank, 2)))


CASES = cases_in(globals())


def begin(rank: int) -> None:
    hvd.init()


test_on_three_ranks = each_case(CASES, RANKS)


# --- joining and leaving ----------------------------------------------------------------------------------------------


def places(rank: int) -> list[tuple[int, ...]]:
    raises(ValueError, r"call hvd.init\(\) first", hvd.rank)
    raises(ValueError, r"call hvd.init\(\) first", hvd.allreduce, torch.ones(1))
    raises(ValueError, '"dynamic"', hvd.init, process_sets="some")
    assert not hvd.is_initialized()
    found: list[Any] = []
    for _ in range(2):
        pair = hvd.ProcessSet([0, 2])
        hvd.init(process_sets=[pair])
        hvd.init()
        assert hvd.is_initialized()
        assert pair.included() == (rank != 1)
        total = hvd.allreduce(torch.tensor([rank]), op=hvd.Sum).item()
        found.append(
            (hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size(), total)
        )
        assert not hvd.is_homogeneous()
        hvd.shutdown()
        hvd.shutdown()
        assert not hvd.is_initialized()
        raises(ValueError, "hvd.init", pair.included)
    return found


def test_init_joins_twice_and_knows_the_places_on_two_hosts() -> None:
    results = make_world(3, hosts=[[0, 1], [2]], timeout=120.0).run(places)
    assert results == [[place] * 2 for place in ((0, 3, 0, 2, 0, 2, 3), (1, 3, 1, 2, 0, 1, 3), (2, 3, 0, 1, 1, 2, 3))]
