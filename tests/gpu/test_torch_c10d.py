"""The backend "bagua" of torch.distributed on CUDA tensors: collectives, messages, and streams."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist

import bagua.c10d  # noqa: F401
from tests.cuda.ranks import Ranks, on_ranks


@contextmanager
def joined() -> Iterator[dict[str, Any]]:
    torch.cuda.set_device(0)
    dist.init_process_group("bagua")
    yield {}
    dist.destroy_process_group()


def filled(rank: int, *shape: int) -> torch.Tensor:
    return torch.arange(float(torch.Size(shape).numel()), device="cuda").view(shape) + 10 * rank


def verbs(rank: int, size: int) -> None:
    with joined():
        total = sum(range(size)) * 10
        for async_op in (False, True):
            x = filled(rank, 4)
            finish(dist.all_reduce(x, async_op=async_op))
            assert x.tolist() == [size * i + total for i in range(4)]
            # Divided towards zero afterwards, as NCCL does.
            y = torch.full((3,), rank, device="cuda")
            finish(dist.all_reduce(y, dist.ReduceOp.AVG, async_op=async_op))
            assert y.tolist() == [sum(range(size)) // size] * 3
            x = filled(rank, 2, 3)
            finish(dist.all_reduce(x.t(), async_op=async_op))
            assert x.view(-1).tolist() == [size * i + total for i in range(6)]
            x = filled(rank, 4)
            finish(dist.broadcast(x, size - 1, async_op=async_op))
            assert x.tolist() == filled(size - 1, 4).tolist()
            finish(dist.reduce(x, 0, async_op=async_op))
            outs = [torch.empty(2, device="cuda") for _ in range(size)]
            finish(dist.all_gather(outs, filled(rank, 2), async_op=async_op))
            assert [out.tolist() for out in outs] == [[10 * peer, 10 * peer + 1] for peer in range(size)]
            whole = torch.empty(size * 2, device="cuda")
            finish(dist.all_gather_into_tensor(whole, filled(rank, 2), async_op=async_op))
            assert whole.view(size, 2).tolist() == [[10 * peer, 10 * peer + 1] for peer in range(size)]
            part = torch.empty(2, device="cuda")
            finish(dist.reduce_scatter_tensor(part, filled(rank, size * 2), async_op=async_op))
            assert part.tolist() == [size * (2 * rank + i) + total for i in range(2)]
            out = torch.empty(size * 2, device="cuda")
            finish(dist.all_to_all_single(out, filled(rank, size * 2), async_op=async_op))
            assert out.tolist() == [10 * peer + 2 * rank + i for peer in range(size) for i in range(2)]
            rows = [filled(peer, 3) for peer in range(size)] if rank == 0 else None
            mine = torch.empty(3, device="cuda")
            finish(dist.scatter(mine, rows, 0, async_op=async_op))
            assert mine.tolist() == filled(rank, 3).tolist()
            got = [torch.empty(3, device="cuda") for _ in range(size)] if rank == 0 else None
            finish(dist.gather(mine, got, 0, async_op=async_op))
            if got is not None:
                assert [each.tolist() for each in got] == [filled(peer, 3).tolist() for peer in range(size)]
        objects: list[Any] = [None] * size
        dist.all_gather_object(objects, rank)
        assert objects == list(range(size))
        # One group serves both.
        here = torch.ones(3)
        dist.all_reduce(here)
        assert here.tolist() == [size] * 3
        dist.barrier()


def finish(work: Any) -> None:
    if work is not None:
        assert work.wait()
        assert work.exception() is None


@pytest.mark.parametrize("size", [1, 2, 3])
def test_every_collective_takes_cuda_tensors(ranks: Ranks, size: int) -> None:
    ranks(size, verbs, size)


@on_ranks(2, joined)
def test_a_work_orders_the_stream_that_is_current_where_it_waits(rank: int) -> None:
    other, third = torch.cuda.Stream(), torch.cuda.Stream()
    with torch.cuda.stream(other):
        # Late work of the stream of the call, with and without copies afterwards.
        x, base = filled(rank, 1000), filled(rank, 4, 6)
        works = [dist.all_reduce(x, async_op=True), dist.all_reduce(base[:, 1:3], async_op=True)]
    with torch.cuda.stream(third):
        for work in works:
            work.wait()
        assert x[:3].tolist() == [10, 12, 14]
        assert base[1, :4].tolist() == [6 + 10 * rank, 24, 26, 9 + 10 * rank]
    works[1].synchronize()
    assert base[0, 1].item() == 12
    # Without a wait the results are copied.
    outs = [torch.zeros(2, device="cuda") for _ in range(2)]
    work = dist.all_gather(outs, filled(rank, 2), async_op=True)
    while not work.is_completed():
        pass
    assert outs[1].tolist() == [10, 11]
    # Dropped while it runs.
    for _ in range(3):
        dist.all_reduce(filled(rank, 10, 10).t(), async_op=True)
    dist.barrier()


@on_ranks(2, joined)
def test_messages_are_sent_and_received(rank: int) -> None:
    peer, other = 1 - rank, torch.cuda.Stream()
    for size in (4, 20_000):
        x, y = filled(rank, size), torch.zeros(size, device="cuda")
        sent = dist.isend(x, peer, tag=3)
        received = dist.irecv(y, peer, tag=3)
        assert sent is not None
        assert received is not None
        with torch.cuda.stream(other):
            received.wait()
            assert torch.equal(y, filled(peer, size))
        sent.wait()
    # Not contiguous; from any source.
    rows = torch.zeros(4, 2, device="cuda")
    sent = dist.isend(filled(rank, 4), peer)
    assert sent is not None
    assert dist.recv(rows[:, 0]) == peer
    sent.wait()
    assert torch.equal(rows[:, 0], filled(peer, 4))
    dist.barrier()
