"""Futures of the backend "bagua" on CUDA tensors: their values, their order and their errors."""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

import bagua.c10d  # noqa: F401
from tests.cases import attempt
from tests.cuda.driver import until
from tests.cuda.ranks import Ranks
from tests.gpu.test_torch_c10d import filled

#: So long a test waits for what comes at once.
SOON = 30.0
SIZE = 3
#: Whether a verb's options say that it is to be done when it returns.
HAS_ASYNC_OP = hasattr(dist.AllreduceOptions(), "asyncOp")


@contextmanager
def joined() -> Iterator[None]:
    torch.cuda.set_device(0)
    dist.init_process_group("bagua", timeout=timedelta(seconds=60))
    yield
    dist.destroy_process_group()


def started(tensor: torch.Tensor, **options: Any) -> torch.futures.Future[Any]:
    """The future of an all_reduce."""
    work = dist.all_reduce(tensor, async_op=True, **options)
    assert work is not None
    found: torch.futures.Future[Any] = work.get_future()
    return found


# --- values -----------------------------------------------------------------------------------------------------------


def values(rank: int) -> None:
    total = 10 * sum(range(SIZE))
    sums = [SIZE * i + total for i in range(4)]
    x = filled(rank, 4)
    work = dist.all_reduce(x, async_op=True)
    future = work.get_future()
    (found,) = future.wait()
    assert found is x
    assert x.tolist() == sums
    assert future.done()
    assert work.get_future() is future
    assert work.wait()
    # A chain, whose ends are on streams of their own.
    halves = started(filled(rank, 4)).then(lambda done: done.value()[0] / SIZE).then(lambda done: done.value() * 2)
    assert halves.wait().tolist() == [2 * each / SIZE for each in sums]
    # Of what is done already, too.
    assert future.then(lambda done: done.value()[0] + 1).wait().tolist() == [each + 1 for each in sums]
    together = torch.futures.collect_all([started(filled(rank, 4)), started(filled(rank, 4), op=dist.ReduceOp.MAX)])
    one, other = (each.wait()[0].tolist() for each in together.wait())
    assert (one, other) == (sums, filled(SIZE - 1, 4).tolist())
    assert [each[0].tolist() for each in torch.futures.wait_all([started(filled(rank, 4))] * 2)] == [sums] * 2
    # Copied to where they belong, behind the operation.
    base = filled(rank, 2, 3)
    (found,) = started(base.t()).wait()
    assert found.tolist() == [[SIZE * i + total, SIZE * (i + 3) + total] for i in range(3)]
    means = started(torch.full((3,), rank, device="cuda"), op=dist.ReduceOp.AVG).wait()[0]
    assert means.tolist() == [sum(range(SIZE)) // SIZE] * 3


def every_verb(rank: int) -> None:
    outs = [torch.zeros(2, device="cuda") for _ in range(SIZE)]
    found = dist.all_gather(outs, filled(rank, 2), async_op=True).get_future().wait()
    assert [each.tolist() for each in found] == [[10 * peer, 10 * peer + 1] for peer in range(SIZE)]
    part = torch.zeros(2, device="cuda")
    dist.reduce_scatter_tensor(part, filled(rank, SIZE * 2), async_op=True).get_future().wait()
    assert part.tolist() == [SIZE * (2 * rank + i) + 10 * sum(range(SIZE)) for i in range(2)]
    x = filled(rank, 4)
    dist.broadcast(x, SIZE - 1, async_op=True).get_future().wait()
    assert x.tolist() == filled(SIZE - 1, 4).tolist()
    out = torch.zeros(SIZE * 2, device="cuda")
    dist.all_to_all_single(out, filled(rank, SIZE * 2), async_op=True).get_future().wait()
    assert out.tolist() == [10 * peer + 2 * rank + i for peer in range(SIZE) for i in range(2)]
    got = [torch.zeros(3, device="cuda") for _ in range(SIZE)] if rank == 0 else None
    found = dist.gather(filled(rank, 3), got, 0, async_op=True).get_future().wait()
    assert [each.tolist() for each in found] == [filled(peer, 3).tolist() for peer in range(SIZE) if rank == 0]
    # Several operations, on the device and on the host, as one Work.
    with dist._coalescing_manager(async_ops=True) as several:
        parts = [filled(rank, 4), torch.ones(2), filled(rank, 2, 3).t()]
        for each in parts:
            dist.all_reduce(each)
    (work,) = several.works
    mine, host, strided = work.get_future().wait()
    assert (mine is parts[0], host is parts[1], strided is parts[2]) == (True, True, True)
    assert mine[0].item() == 10 * sum(range(SIZE))
    assert strided[1, 1].item() == SIZE * 4 + 10 * sum(range(SIZE))
    assert host.tolist() == [SIZE] * 2
    peer = (rank + 1) % SIZE
    sent = dist.isend(filled(rank, 4), peer)
    rows = torch.zeros(4, 2, device="cuda")
    dist.irecv(rows[:, 0], (rank - 1) % SIZE).get_future().wait()
    sent.get_future().wait()
    assert rows[:, 0].tolist() == filled((rank - 1) % SIZE, 4).tolist()
    assert dist.barrier(async_op=True).get_future().wait() == []


# --- order ------------------------------------------------------------------------------------------------------------


def order(rank: int) -> None:
    for view in (lambda x: x, lambda x: x.view(40, 25).t()):
        producer, one, other = (torch.cuda.Stream() for _ in range(3))
        with torch.cuda.stream(producer):
            # Late work, and a result that is copied afterwards.
            x = filled(rank, 1000)
            future = started(view(x))
        tripled = future.then(lambda done: done.value()[0] * 3)
        with torch.cuda.stream(one):
            future.wait()
            assert x[:3].tolist() == [30, 33, 36]
        with torch.cuda.stream(other):
            assert tripled.wait().reshape(-1)[0].item() == 90
        # What the continuation made belongs to the streams that wait for it.
        with torch.cuda.stream(one):
            doubled = tripled.then(lambda done: done.value() * 2).wait()
            del tripled
            assert doubled.reshape(-1)[0].item() == 180


def returned_at_once(rank: int) -> None:
    """A verb whose caller asked for it to be done when it returns."""
    options = dist.AllreduceOptions()
    options.asyncOp = False
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        x = filled(rank, 4)
        work = dist.group.WORLD.allreduce([x], options)
    assert work.get_future().then(lambda done: done.value()[0] * 2).wait().tolist() == [60, 66, 72, 78]


# --- threads ----------------------------------------------------------------------------------------------------------


def without_a_wait(rank: int) -> None:
    for make in (lambda: torch.ones(4, device="cuda"), lambda: torch.ones(4, 2, device="cuda").t()):
        called, kept = threading.Event(), []

        def keep(done: torch.futures.Future[Any], called: threading.Event = called, kept: Any = kept) -> None:
            kept.append(done.value()[0] * 2)
            kept.append(torch.cuda.current_stream().record_event())
            called.set()

        tensor = make()
        started(tensor).then(keep)
        assert called.wait(SOON)
        kept[1].wait()
        assert kept[0].unique().tolist() == [6]
        # Nor for the Work of a future that was dropped.
        work = dist.all_reduce(tensor, async_op=True)
        work.get_future()
        until(work.is_completed)
        assert work.is_success()
        assert tensor.unique().tolist() == [9]
        kept.clear()
    # Nor for the copies of a Work that was dropped.
    outs = [torch.zeros(2, device="cuda") for _ in range(SIZE)]
    dist.all_gather(outs, filled(rank, 2), async_op=True)
    until(lambda: [each.tolist() for each in outs] == [[10 * peer, 10 * peer + 1] for peer in range(SIZE)])


def continues(rank: int) -> None:
    def again(done: torch.futures.Future[Any]) -> torch.Tensor:
        (found,) = started(done.value()[0]).wait()
        # Until here on the stream of this continuation.
        return found + 1

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        x = filled(rank, 1000)
        end = started(x).then(again).then(lambda done: done.value() * 2)
    with torch.cuda.stream(torch.cuda.Stream()):
        assert end.wait()[:3].tolist() == [182, 200, 218]


def raises(rank: int) -> None:
    def wrong(done: torch.futures.Future[Any]) -> None:
        raise ZeroDivisionError("in the continuation")

    x = torch.ones(4, device="cuda")
    end = started(x).then(wrong)
    for each in (end, end.then(lambda done: done.value())):
        with pytest.raises(RuntimeError, match="ZeroDivisionError: in the continuation"):
            each.wait()
    assert started(x).wait()[0].tolist() == [9] * 4


CASES = {
    "values": values,
    "every verb": every_verb,
    "order": order,
    **({"returned at once": returned_at_once} if HAS_ASYNC_OP else {}),
    "without a wait": without_a_wait,
    "continues": continues,
    "raises": raises,
}


def run(rank: int) -> dict[str, str]:
    """Runs all cases on this rank. Returns what each raised, by name ("" if nothing)."""
    with joined():
        return attempt({name: functools.partial(case, rank) for name, case in CASES.items()}, dist.barrier)


def test_a_future_keeps_to_the_rules_of_torch(ranks: Ranks) -> None:
    for found in ranks(SIZE, run, timeout=120.0):
        assert {name: text for name, text in found.items() if text} == {}


def fails(rank: int) -> None:
    torch.cuda.set_device(0)
    dist.init_process_group("bagua", timeout=timedelta(seconds=60))
    dist.all_reduce(torch.ones(4, device="cuda"))
    if rank == 1:
        dist.recv(torch.empty(1), 0)
        dist.group.WORLD.abort()
        return
    # With and without a copy of the result.
    futures = [started(torch.ones(4, device="cuda")), started(torch.ones(4, 2, device="cuda").t())]
    ends = [future.then(lambda done: done.value()[0] * 2) for future in futures]
    dist.send(torch.empty(1), 1)
    for future in (*futures, *ends):
        with pytest.raises(RuntimeError, match=r"(?s)AbortedError.*torch.distributed aborted the group"):
            future.wait()
    # The device is as it was.
    assert (torch.ones(4, device="cuda") * 2).tolist() == [2] * 4
    dist.destroy_process_group()


def test_a_future_and_its_continuations_fail_when_the_operation_does(ranks: Ranks) -> None:
    ranks(2, fails)
