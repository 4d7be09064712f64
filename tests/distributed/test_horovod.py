"""Horovod's API: every operation against an oracle that computes all ranks' tensors, gradients against plain torch."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

import bagua.horovod.torch as hvd
from bagua.errors import BaguaError, MismatchError
from bagua.torch_api.process_group import DTYPES
from tests.distributed.torch_ranks import cases_in, each_case
from tests.world import make_world

RANKS = 3
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
WHOLE = tuple(dtype for dtype in DTYPES if not (dtype.is_floating_point or dtype.is_complex or dtype is torch.bool))
#: Parameters and buffers may have this dtype. The collectives refuse it.
FLOAT8 = torch.float8_e4m3fn


def data(rank: int, *shape: int, dtype: torch.dtype = torch.float32, low: int = 0) -> torch.Tensor:
    """Returns the values that a rank contributes: small whole numbers, so that no dtype has to round."""
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


def factors_multiply_before_and_after(rank: int) -> None:
    mine, total = data(rank, 6), stacked(6).sum(0)
    result = hvd.allreduce(mine, op=hvd.Sum, prescale_factor=0.5, postscale_factor=3.0)
    torch.testing.assert_close(result, total * 1.5)
    whole = data(rank, 6, dtype=torch.int64)
    halves = sum((data(other, 6).double() * 0.5).trunc() for other in range(RANKS))
    assert torch.equal(hvd.allreduce(whole, op=hvd.Sum, prescale_factor=0.5), halves.long())


def fp16_compression_sends_float16_and_returns_the_dtype(rank: int) -> None:
    tensors = [torch.full((3,), 1.0001 + rank), torch.full((2,), 0.1, dtype=torch.float64), torch.tensor([rank])]
    half = [torch.full((3,), 1.0001 + other).half().float() for other in range(RANKS)]
    results = [hvd.allreduce(tensor, compression=hvd.Compression.fp16, op=hvd.Sum) for tensor in tensors]
    assert [result.dtype for result in results] == [torch.float32, torch.float64, torch.int64]
    torch.testing.assert_close(results[0], sum(half).half().float())
    assert float(results[1][0]) == float(torch.tensor(0.1).half() * 3)
    assert results[2].item() == 3


def tensors_with_gaps_conjugates_and_leaves_are_reduced(rank: int) -> None:
    whole = data(rank, 4, 3)
    expected = stacked(4, 3).sum(0)
    view = whole.t()[1:]
    hvd.allreduce_(view, op=hvd.Sum)
    assert torch.equal(view, expected.t()[1:])
    assert torch.equal(whole[:, 0], data(rank, 4, 3)[:, 0])
    assert hvd.allreduce(torch.tensor([1 + 2j]).conj(), op=hvd.Sum).tolist() == [3 - 6j]
    assert hvd.broadcast(torch.tensor([rank + 1j]).conj(), 1).tolist() == [1 - 1j]
    leaf = torch.nn.Parameter(data(rank, 4))
    hvd.allreduce_(leaf, op=hvd.Sum)
    assert torch.equal(leaf.detach(), stacked(4).sum(0))


# --- moves ------------------------------------------------------------------------------------------------------------


def allgather_joins_tensors_of_different_lengths(rank: int) -> None:
    for dtype, lengths in itertools.product(
        (*FLOATS, *WHOLE, torch.bool), ((2, 2, 2), (3, 0, 1), (0, 0, 4), (0, 0, 0))
    ):
        tensors = [data(other, lengths[other], 2, dtype=dtype) for other in range(RANKS)]
        expected = torch.cat(tensors)
        for result in (
            hvd.allgather(tensors[rank]),
            hvd.synchronize(hvd.allgather_async(tensors[rank])),
        ):
            assert result.dtype == dtype
            assert same(result, expected)


def broadcast_has_the_values_of_its_root(rank: int) -> None:
    for root, dtype, shape in itertools.product(range(RANKS), (*FLOATS, torch.bool, torch.int64), ((), (4,), (2, 3))):
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
    for dtype in (torch.float32, torch.bool, torch.uint16, torch.int64):
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
    mine = data(rank, 5).requires_grad_()
    result = hvd.allreduce(mine, op=hvd.Sum, prescale_factor=2.0, postscale_factor=0.5)
    expected = plain([(5,)] * RANKS, lambda *all_ranks: [sum(all_ranks)] * RANKS)[rank]
    torch.testing.assert_close(gradient(mine, result, weight(rank, 5)), expected)


def the_gradients_of_allgather_and_broadcast_are_the_mean_of_plain_torchs(rank: int) -> None:
    shapes: list[tuple[int, ...]] = [(2, 2), (0, 2), (3, 2)]
    mine = data(rank, *shapes[rank]).requires_grad_()
    expected = plain(shapes, lambda *all_ranks: [torch.cat(all_ranks)] * RANKS)[rank] / RANKS
    torch.testing.assert_close(gradient(mine, hvd.allgather(mine), weight(rank, 5, 2)), expected)
    for root in range(RANKS):
        mine = data(rank, 4).requires_grad_()
        expected = plain([(4,)] * RANKS, lambda *all_ranks, r=root: [all_ranks[r].clone() for _ in all_ranks])[rank]
        torch.testing.assert_close(gradient(mine, hvd.broadcast(mine, root), weight(rank, 4)), expected / RANKS)


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
    for wrong in (torch.ones(1), network(0).parameters(), {"a": 1}):
        raises(TypeError, r"model.state_dict\(\) or model.named_parameters\(\)", hvd.broadcast_parameters, wrong, 0)
    other = {"b" if rank == 1 else "a": torch.ones(2)}
    raises(MismatchError, "rank 0 has 'a' .* rank 1 has 'b'", hvd.broadcast_parameters, other, 0)


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


# --- what is refused --------------------------------------------------------------------------------------------------


def wrong_arguments_are_refused_before_anything_is_sent(rank: int) -> None:
    # On one rank alone: the others do not wait for it.
    if rank == 1:
        one = torch.ones(4)
        raises(ValueError, "give one of them", hvd.allreduce, one, average=True, op=hvd.Sum)
        raises(TypeError, "op must be hvd.Average", hvd.allreduce, one, op=1)
        raises(TypeError, "torch.Tensor", hvd.allreduce, [1.0])
        raises(TypeError, "float8", hvd.allreduce, one.to(FLOAT8))
        raises(TypeError, "bool", hvd.allreduce, one.bool())
        raises(NotImplementedError, "sparse", hvd.allreduce, one.to_sparse())
        raises(TypeError, "float8", hvd.broadcast, one.to(FLOAT8), 0)
        raises(TypeError, "0-d tensor", hvd.allgather, torch.tensor(1.0))
        raises(ValueError, "3 is not a rank of a group of 3", hvd.broadcast, one, 3)
        raises(ValueError, "4 rows cannot be divided among 3 ranks", hvd.alltoall, one)
        for splits in ([2, 2], [2, 2, 1], [-1, 2, 1]):
            raises(ValueError, "4 rows cannot be divided among 3 ranks by splits", hvd.alltoall, one, splits)
        raises(TypeError, "integer", hvd.alltoall, one, torch.ones(3))
    assert float(hvd.allreduce(torch.ones(1), op=hvd.Sum)) == 3.0


def what_is_not_there_says_what_to_use_instead(rank: int) -> None:
    raises(NotImplementedError, "use op=hvd.Average", hvd.allreduce, torch.ones(1), op=hvd.Adasum)
    raises(NotImplementedError, "rebuild", lambda: hvd.elastic.run)
    raises(NotImplementedError, "DistributedSampler", hvd.join)
    raises(NotImplementedError, "torchrun", hvd.run, print, np=2)
    raises(NotImplementedError, "to_dense", hvd.sparse_allreduce_async, torch.ones(1))
    raises(NotImplementedError, "bagua trace", hvd.start_timeline, "file")
    raises(NotImplementedError, "bagua trace", hvd.stop_timeline)
    raises(NotImplementedError, "new_group", hvd.init, comm=[0])
    raises(NotImplementedError, "new_group", hvd.init, process_sets="dynamic")
    raises(NotImplementedError, "new_group", hvd.ProcessSet, [0, 1])
    raises(NotImplementedError, "each tensor", hvd.grouped_allreduce, [torch.ones(1)])
    raises(NotImplementedError, "reduce_scatter", hvd.reducescatter, torch.ones(1))
    raises(NotImplementedError, "reduce_scatter", hvd.grouped_reducescatter_async, [torch.ones(1)])
    raises(NotImplementedError, "leave process_set out", lambda: hvd.global_process_set.size)
    raises(NotImplementedError, "sync_batchnorm", hvd.SyncBatchNorm, 2)
    assert issubclass(hvd.HorovodInternalError, RuntimeError)
    assert issubclass(BaguaError, hvd.HorovodInternalError)
    raises(NotImplementedError, "always False", hvd.nccl_built)
    raises(NotImplementedError, "always False", hvd.gloo_enabled)
    raises(AttributeError, "no attribute 'allreduc'", getattr, hvd, "allreduc")


CASES = cases_in(globals())


def begin(rank: int) -> None:
    hvd.init()


test_on_three_ranks = each_case(CASES, RANKS)


# --- joining and leaving ----------------------------------------------------------------------------------------------


def places(rank: int) -> list[tuple[int, ...]]:
    raises(ValueError, r"call hvd.init\(\) first", hvd.rank)
    raises(ValueError, r"call hvd.init\(\) first", hvd.allreduce, torch.ones(1))
    assert not hvd.is_initialized()
    found: list[Any] = []
    for _ in range(2):
        hvd.init()
        hvd.init()
        assert hvd.is_initialized()
        total = hvd.allreduce(torch.tensor([rank]), op=hvd.Sum).item()
        found.append(
            (hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size(), total)
        )
        hvd.shutdown()
        hvd.shutdown()
        assert not hvd.is_initialized()
    hvd.init()
    raises(MismatchError, "ranks disagree", hvd.allgather, torch.ones(2, 2 + (rank == 2)))
    return found


def test_init_joins_again_and_knows_the_places_on_two_hosts_and_rows_that_differ_are_an_error() -> None:
    results = make_world(3, hosts=[[0, 1], [2]], timeout=120.0).run(places)
    assert results == [[place] * 2 for place in ((0, 3, 0, 2, 0, 2, 3), (1, 3, 1, 2, 0, 1, 3), (2, 3, 0, 1, 1, 2, 3))]
