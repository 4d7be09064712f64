"""The verbs of bagua.torch_api on CUDA tensors: the bits of the CPU, in the order of torch's streams."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

import bagua
from bagua import torch_api as api
from bagua.torch_api import ReduceOp
from bagua.torch_api.communication import _get_default_group
from tests.cuda.ranks import Ranks, on_ranks
from tests.gpu.torch_ranks import in_torch, joined

SOME = ("float32", "bfloat16", "int64")


def values(rank: int, shape: Any, dtype: torch.dtype) -> torch.Tensor:
    """Random values of a rank, on the CPU."""
    random = torch.Generator().manual_seed(100 + rank)
    if dtype is torch.bool or not (dtype.is_floating_point or dtype.is_complex):
        return torch.randint(0, 2 if dtype is torch.bool else 50, shape, generator=random).to(dtype)
    made = torch.randn(shape, generator=random, dtype=torch.complex64 if dtype.is_complex else torch.float32).to(dtype)
    if not dtype.is_complex:
        made.view(-1)[::5] = [float("inf"), -0.0, float("nan"), 1e-40][rank % 4]
    return made


def bits(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.cpu().contiguous().view(-1).view(torch.uint8).tolist())


def both(verb: Callable[..., Any], *tensors: torch.Tensor) -> None:
    """Runs a verb on tensors of the CPU and on the device: what they hold afterwards is equal."""
    there = [tensor.cuda() for tensor in tensors]
    verb(*tensors)
    verb(*there)
    for mine, other in zip(tensors, there, strict=True):
        assert bits(other) == bits(mine)


def reduce_everything(rank: int, size: int) -> list[int]:
    ran = dict.fromkeys(SOME, 0)
    with joined():
        for name, op in itertools.product(SOME, ReduceOp):
            x = values(rank, (size * 2, 3), getattr(torch, name))
            try:
                api.allreduce_inplace(x.clone(), op)
            except TypeError:
                with pytest.raises(TypeError, match="not defined"):
                    api.allreduce_inplace(x.cuda(), op)
                continue
            out, part = torch.zeros_like(x), torch.zeros_like(x[:2])
            both(lambda x, op=op: api.allreduce_inplace(x, op), x.clone())
            both(lambda x, out, op=op: api.allreduce(x, out, op), x.clone(), out)
            both(lambda x, op=op: api.reduce_inplace(x, size - 1, op), x.clone())
            both(lambda x, out, op=op: api.reduce(x, out, 0, op), x.clone(), out)
            both(lambda x, out, op=op: api.reduce_scatter(x, out, op), x.clone(), part)
            both(lambda x, op=op: api.reduce_scatter_inplace(x, op), x.clone())
            both(lambda *x, op=op: api.allreduce_coalesced_inplace(x, op), x.clone(), x[:1].clone())
            ran[name] += 1
    return list(ran.values())


@pytest.mark.parametrize("size", [1, 2, 4])
def test_every_reduction_has_the_bits_of_the_cpu(ranks: Ranks, size: int) -> None:
    for ran in ranks(size, reduce_everything, size):
        assert min(ran) >= 3


def move_everything(rank: int, size: int) -> None:
    with joined():
        for name in SOME:
            for shape in ((3, 2), (0, 3)):
                move(rank, size, values(rank, shape, getattr(torch, name)))


def move(rank: int, size: int, x: torch.Tensor) -> None:
    rows = values(rank + size, (size, *x.shape), x.dtype)
    same, whole = torch.zeros_like(x), torch.zeros_like(rows)
    for root in range(size):
        both(lambda x, root=root: api.broadcast(x, root), x.clone())
        both(lambda *x, root=root: api.broadcast_coalesced(x, root), x.clone(), rows.clone())
        both(lambda x, out, root=root: api.gather(x, out, root), x, whole.clone())
        both(lambda x, root=root: api.gather_inplace(x, x.numel() // size, root), rows.clone())
        both(lambda x, out, root=root: api.scatter(x, out, root), rows, same.clone())
        both(lambda x, root=root: api.scatter_inplace(x, x.numel() // size, root), rows.clone())
    both(api.allgather, x, whole.clone())
    both(api.allgather_inplace, rows.clone())
    both(api.alltoall, rows, whole.clone())
    both(api.alltoall_inplace, rows.clone())
    counts = [1 + (rank + peer) % 3 for peer in range(size)]
    displs = [sum(counts[:peer]) for peer in range(size)]
    given = values(rank, (sum(counts),), x.dtype)
    both(lambda x, out: api.alltoall_v(x, counts, displs, out, counts, displs), given, torch.zeros_like(given))
    both(lambda x: api.alltoall_v_inplace(x, counts, displs), given)
    assert api.broadcast_object({"rank": rank}, size - 1) == {"rank": size - 1}
    api.barrier()


@pytest.mark.parametrize("size", [1, 2, 4])
def test_every_verb_that_moves_has_the_bits_of_the_cpu(ranks: Ranks, size: int) -> None:
    ranks(size, move_everything, size)


@on_ranks(2, in_torch)
def test_strides_are_taken_as_on_the_cpu(rank: int) -> None:
    base = values(rank, (4, 6), torch.float32)
    # A source may have any strides, here and there.
    both(lambda x, out: api.allreduce(x.t(), out), base, torch.zeros(6, 4))
    both(lambda x, out: api.allgather(x[:, 1:3], out), base, torch.zeros(2, 4, 2))
    wave = values(rank, (5,), torch.complex64)
    both(lambda x, out: api.allreduce(x.conj(), out), wave, torch.zeros_like(wave))
    # A part of a tensor is written alone.
    both(lambda x: api.allreduce_inplace(x[1:3]), base.clone())
    # One rank's part of the whole is in place.
    both(lambda x: api.allgather(x[2 * rank : 2 * rank + 2], x), base.clone())
    both(lambda x: api.reduce_scatter(x, x[2 * rank : 2 * rank + 2]), base.clone())
    x = base.cuda()
    for call in (
        lambda: api.allreduce_inplace(x.t()),
        lambda: api.allreduce(base.t().contiguous().cuda(), x.t()),
        lambda: api.broadcast(x[:, 1:3], 1 - rank),
    ):
        with pytest.raises(ValueError, match="not contiguous"):
            call()
    api.barrier()


@on_ranks(2, in_torch)
def test_operations_follow_torchs_current_streams(rank: int) -> None:
    main, other, third = torch.cuda.current_stream(), torch.cuda.Stream(), torch.cuda.Stream()
    for stream in (main, other):
        with torch.cuda.stream(stream):
            # The producer's work comes late, and so does the consumer's.
            x = torch.full((1000,), rank + 1.0, device="cuda")
            api.allreduce_inplace(x)
            x.mul_(2)
            assert x.tolist() == [6.0] * 1000
            # Rank 0 only gets: its result must not overtake the work on the tensor.
            x.fill_(rank)
            api.broadcast(x, 1)
            assert x.tolist() == [1.0] * 1000
    # A handle orders the stream that is current where it waits.
    with torch.cuda.stream(other):
        x, y = torch.ones(1000, device="cuda"), torch.ones(10, device="cuda")
        one, two = api.allreduce_inplace(x, async_op=True), api.allreduce_inplace(y, async_op=True)
    with torch.cuda.stream(third):
        one.wait()
        assert x.tolist() == [2.0] * 1000
    two.wait()
    assert y.tolist() == [2.0] * 10
    # In place three times, without a wait between.
    many = [api.allreduce_inplace(y, async_op=True) for _ in range(3)]
    many[-1].synchronize(30.0)
    assert all(handle.is_completed() for handle in many)
    many[-1].wait()
    assert y.tolist() == [16.0] * 10
    # Callbacks may use the result, and whoever waits for them sees their work.
    done, event = threading.Event(), torch.cuda.Event()

    def called(error: Exception | None) -> None:
        assert error is None
        y.add_(1)
        event.record()
        done.set()

    api.allreduce_inplace(y, async_op=True).then(called)
    assert done.wait(30.0)
    event.wait()
    assert y.tolist() == [33.0] * 10


@on_ranks(2, in_torch)
def test_tensors_that_travel_together_are_copied_back_in_order(rank: int) -> None:
    other, third = torch.cuda.Stream(), torch.cuda.Stream()
    with torch.cuda.stream(other):
        tensors = [torch.full((n,), rank + 1.0, device="cuda") for n in (3, 5)]
        handle = api.allreduce_coalesced_inplace(tensors, async_op=True)
    handle.wait()
    assert [each.tolist() for each in tensors] == [[3.0] * 3, [3.0] * 5]
    with torch.cuda.stream(third):
        handle.wait()
        assert tensors[1].tolist() == [3.0] * 5
    # The copies may come before a wait.
    done = threading.Event()
    with torch.cuda.stream(other):
        handle = api.broadcast_coalesced(tensors, 0, async_op=True)
        handle.then(lambda error: done.set())
    assert done.wait(30.0)
    handle.wait()
    assert tensors[0].tolist() == [3.0] * 3
    with pytest.raises(TypeError, match="cannot be coalesced"):
        api.allreduce_coalesced_inplace([tensors[0], torch.ones(3)])


def here_and_there(rank: int) -> str:
    with joined():
        x = torch.ones(4, device="cuda" if rank else "cpu")
        with pytest.raises(bagua.MismatchError) as raised:
            api.allreduce_inplace(x)
    return str(raised.value)


def test_the_cpu_on_one_rank_and_a_device_on_another_is_a_mismatch_on_both(ranks: Ranks) -> None:
    for text in ranks(2, here_and_there):
        assert "device" in text, text


@on_ranks(2, in_torch)
def test_autograd_sees_that_a_saved_tensor_was_written() -> None:
    x = torch.ones(4, device="cuda", requires_grad=True)
    y = x * 2
    z = y * y
    api.allreduce_inplace(y.detach())
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        z.sum().backward()


@on_ranks(2, in_torch)
def test_the_neutral_verbs_take_tensors_by_dlpack(rank: int) -> None:
    x = torch.full((4,), rank + 1.0, device="cuda")
    group = _get_default_group().get_global_communicator().group
    group.all_reduce(x)
    assert x.tolist() == [3.0] * 4
    # DLPack orders the stream that it is asked to.
    other = torch.cuda.Stream()
    y = torch.full((4,), rank + 1.0, device="cuda")
    group.all_reduce(y, stream=other.cuda_stream)
    torch.cuda.current_stream().wait_stream(other)
    assert y.tolist() == [3.0] * 4
