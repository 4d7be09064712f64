"""Every collective of torch.distributed on the backend "bagua" beside gloo's, in the world and in a sub-group."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

from bagua.errors import BaguaTimeoutError
from tests.distributed.c10d_ranks import LIMIT, Pair, cases_in, each_case, run_cases, same
from tests.distributed.left_out import needs_backend_class, needs_torch

# Those that gloo adds up too.
DTYPES = (
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.uint8,
    torch.int8,
    torch.int32,
    torch.int64,
)
WITHOUT_GLOO = (torch.int16, torch.uint16, torch.uint32, torch.uint64)
ORDERED = (ReduceOp.SUM, ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.MAX)
BITWISE = (ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR)


def data(rank: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Returns the values that a rank contributes: small whole numbers, so that no type has to round."""
    generator = torch.Generator().manual_seed(31 * rank + sum(shape))
    return torch.randint(1, 4, shape, generator=generator).to(dtype)


def kinds() -> Iterator[tuple[torch.dtype, Any]]:
    yield from itertools.product(DTYPES, ORDERED)
    yield from itertools.product((torch.int32, torch.int64, torch.uint8, torch.int8), BITWISE)


def all_reduce_equals_gloo_for_every_type_and_operation(pair: Pair) -> None:
    for (dtype, op), async_op in itertools.product(kinds(), (False, True)):

        def verb(group: dist.ProcessGroup, dtype: Any = dtype, op: Any = op, async_op: bool = async_op) -> Any:
            tensor = data(pair.rank, 5, 3, dtype=dtype)
            work = dist.all_reduce(tensor, op, group=group, async_op=async_op)
            if async_op:
                work.wait()
            return tensor

        pair.both(verb)


def all_reduce_takes_tensors_that_are_not_contiguous(pair: Pair) -> None:
    tensor = data(pair.rank, 4, 6).t()
    expected = sum(data(rank, 4, 6).t() for rank in range(pair.size))
    dist.all_reduce(tensor, group=pair.ours)
    assert torch.equal(tensor, expected)
    assert not tensor.is_contiguous()
    work = dist.all_reduce(tensor, group=pair.ours, async_op=True)
    work.wait()
    assert torch.equal(tensor, expected * pair.size)


def avg_divides_once_and_cuts_integers_towards_zero(pair: Pair) -> None:
    whole = torch.tensor([-1, -5, 5, 7 * pair.rank], dtype=torch.int64)
    total = sum(torch.tensor([-1, -5, 5, 7 * rank]) for rank in range(pair.size))
    for async_op in (False, True):
        mine = whole.clone()
        work = dist.all_reduce(mine, ReduceOp.AVG, group=pair.ours, async_op=async_op)
        if async_op:
            work.wait()
        assert torch.equal(mine, torch.div(total, pair.size, rounding_mode="trunc"))
    for dtype in WITHOUT_GLOO:
        mine = torch.full((2,), torch.iinfo(dtype).max // pair.size, dtype=dtype)
        dist.all_reduce(mine, ReduceOp.AVG, group=pair.ours)
        assert mine.tolist() == [torch.iinfo(dtype).max // pair.size] * 2
    part = torch.zeros(1, dtype=torch.int32)
    pieces = torch.full((pair.size,), -(pair.rank + 1), dtype=torch.int32)
    dist.reduce_scatter_tensor(part, pieces, ReduceOp.AVG, group=pair.ours)
    assert part.item() == -((pair.size + 1) // 2)
    for dtype in (torch.float32, torch.complex64):
        tensor = data(pair.rank, 6, dtype=dtype)
        dist.all_reduce(tensor, ReduceOp.AVG, group=pair.ours)
        torch.testing.assert_close(tensor, sum(data(rank, 6, dtype=dtype) for rank in range(pair.size)) / pair.size)


def sparse_tensors_are_summed_as_gloo_does(pair: Pair) -> None:
    def verb(group: dist.ProcessGroup) -> torch.Tensor:
        rows = torch.tensor([[pair.rank, pair.rank + 1, 4][: pair.rank + 1]])
        tensor = torch.sparse_coo_tensor(rows, data(pair.rank, pair.rank + 1, 2), (5, 2))
        dist.all_reduce(tensor, group=group)
        return tensor

    pair.both(verb)


def what_cannot_be_added_is_refused_and_the_group_stays_usable(pair: Pair) -> None:
    for async_op in (False, True):
        options = {"group": pair.ours, "async_op": async_op}
        with pytest.raises(TypeError, match="not defined"):
            dist.all_reduce(torch.zeros(3).to(torch.float8_e4m3fn), **options)
        with pytest.raises((NotImplementedError, TypeError), match="PREMUL"):
            dist.all_reduce(torch.zeros(3), dist._make_nccl_premul_sum(2.0), **options)
        for tensor, op in ((torch.zeros(3), ReduceOp.BOR), (torch.zeros(3, dtype=torch.bool), ReduceOp.SUM)):
            with pytest.raises(TypeError, match="not defined"):
                dist.all_reduce(tensor, op, **options)
    with pytest.raises(NotImplementedError, match="SUM alone"):
        dist.all_reduce(torch.zeros(3).to_sparse(), ReduceOp.MAX, group=pair.ours)
    with pytest.raises(ValueError, match="elements"):
        dist.all_gather([torch.zeros(2) for _ in range(pair.size)], torch.zeros(3), group=pair.ours)
    tensor = torch.ones(3)
    dist.all_reduce(tensor, group=pair.ours)
    assert torch.equal(tensor, torch.full((3,), float(pair.size)))


def what_only_moves_takes_every_type(pair: Pair) -> None:
    for dtype in (torch.bool, torch.complex64, torch.float8_e4m3fn, *WITHOUT_GLOO, *DTYPES):
        tensors = [data(rank, 3, dtype=torch.float32).to(dtype) for rank in range(pair.size)]
        outputs = [torch.zeros(3).to(dtype) for _ in range(pair.size)]
        dist.all_gather(outputs, tensors[pair.rank], group=pair.ours)
        # Comparison of bytes: float8 has no equality.
        assert [t.view(torch.uint8).tolist() for t in outputs] == [t.view(torch.uint8).tolist() for t in tensors]
        mine = tensors[pair.rank].clone()
        dist.broadcast(mine, pair.world_rank(1), group=pair.ours)
        assert mine.view(torch.uint8).tolist() == tensors[1].view(torch.uint8).tolist()


def reduce_and_broadcast_equal_gloo(pair: Pair) -> None:
    for root in range(pair.size):

        def reduced(group: dist.ProcessGroup, root: int = root) -> Any:
            tensor = data(pair.rank, 7)
            dist.reduce(tensor, pair.world_rank(root), group=group)
            return tensor if pair.rank == root else None

        def sent(group: dist.ProcessGroup, root: int = root) -> Any:
            tensor = data(pair.rank, 7)
            dist.broadcast(tensor, pair.world_rank(root), group=group)
            return tensor

        pair.both(reduced)
        pair.both(sent)
        tensor = data(pair.rank, 7)
        dist.reduce(tensor, pair.world_rank(root), group=pair.ours)
        assert pair.rank == root or torch.equal(tensor, data(pair.rank, 7))


def gathering_equals_gloo(pair: Pair) -> None:
    def all_gather(group: dist.ProcessGroup) -> Any:
        outputs = [torch.zeros(2, 3) for _ in range(pair.size)]
        dist.all_gather(outputs, data(pair.rank, 2, 3), group=group)
        return outputs

    def into_tensor(group: dist.ProcessGroup) -> Any:
        output = torch.zeros(2 * pair.size, 3)
        dist.all_gather_into_tensor(output, data(pair.rank, 2, 3), group=group)
        return output

    def coalesced(group: dist.ProcessGroup) -> Any:
        inputs = [data(pair.rank, 2), data(pair.rank, 3)]
        outputs = [[torch.zeros(2), torch.zeros(3)] for _ in range(pair.size)]
        dist.all_gather_coalesced(outputs, inputs, group=group)
        return outputs

    def gather(group: dist.ProcessGroup) -> Any:
        outputs = [torch.zeros(4) for _ in range(pair.size)] if pair.rank == 1 else None
        dist.gather(data(pair.rank, 4), outputs, pair.world_rank(1), group=group)
        return outputs

    def in_place(group: dist.ProcessGroup) -> Any:
        output = torch.zeros(pair.size, 3)
        mine = output[pair.rank : pair.rank + 1]
        mine.copy_(data(pair.rank, 1, 3))
        dist.all_gather_into_tensor(output, mine, group=group)
        return output

    for verb in (all_gather, into_tensor, coalesced, gather, in_place):
        pair.both(verb)


def all_gather_takes_tensors_of_different_sizes(pair: Pair) -> None:
    # torch documents it; gloo refuses it.
    for dtype, sizes, async_op in itertools.product(
        (torch.float32, torch.int16, torch.complex64), ([2, 5, 1], [0, 3, 4]), (False, True)
    ):
        tensors = [data(rank, size, dtype=dtype) for rank, size in enumerate(sizes[: pair.size])]
        outputs = [torch.zeros_like(tensor) for tensor in tensors]
        work = dist.all_gather(outputs, tensors[pair.rank], group=pair.ours, async_op=async_op)
        if async_op:
            work.wait()
        assert same(outputs, tensors)
    outputs = [torch.zeros(rank + 1) for rank in range(pair.size)]
    with pytest.raises(ValueError, match=f"the output.{pair.rank}. has {pair.rank + 1} elements, the input 9"):
        dist.all_gather(outputs, torch.zeros(9), group=pair.ours)


def scattering_equals_gloo(pair: Pair) -> None:
    def scatter(group: dist.ProcessGroup) -> Any:
        output = torch.zeros(4)
        inputs = [data(rank + 50, 4) for rank in range(pair.size)] if pair.rank == 1 else None
        dist.scatter(output, inputs, pair.world_rank(1), group=group)
        return output

    pair.both(scatter)
    total = [sum(data(10 * rank + part, 4) for rank in range(pair.size)) for part in range(pair.size)]
    inputs = [data(10 * pair.rank + part, 4) for part in range(pair.size)]
    output = torch.zeros(4)
    dist.reduce_scatter(output, inputs, group=pair.ours)
    assert torch.equal(output, total[pair.rank])
    output = torch.zeros(4)
    dist.reduce_scatter_tensor(output, torch.cat(inputs), group=pair.ours)
    assert torch.equal(output, total[pair.rank])


@needs_backend_class("its gloo has no all_to_all of lists")
def all_to_all_equals_gloo(pair: Pair) -> None:
    def lists(group: dist.ProcessGroup) -> Any:
        outputs = [torch.zeros(2) for _ in range(pair.size)]
        dist.all_to_all(outputs, [data(pair.rank + part, 2) for part in range(pair.size)], group=group)
        return outputs

    def equal(group: dist.ProcessGroup) -> Any:
        output = torch.zeros(2 * pair.size, 3)
        dist.all_to_all_single(output, data(pair.rank, 2 * pair.size, 3), group=group)
        return output

    def splits(group: dist.ProcessGroup) -> Any:
        # Rank r sends r + part rows to each part.
        sends = [pair.rank + part for part in range(pair.size)]
        recvs = [rank + pair.rank for rank in range(pair.size)]
        output = torch.zeros(sum(recvs), 2)
        dist.all_to_all_single(output, data(pair.rank, sum(sends), 2), recvs, sends, group=group)
        return output

    for verb in (lists, equal, splits):
        pair.both(verb)
    # gloo takes no lists of different sizes.
    outputs = [torch.zeros(pair.rank + 1) for _ in range(pair.size)]
    dist.all_to_all(outputs, [data(pair.rank, part + 1) for part in range(pair.size)], group=pair.ours)
    assert same(outputs, [data(rank, pair.rank + 1) for rank in range(pair.size)])


def parts_of_different_sizes_are_reduced_and_scattered(pair: Pair) -> None:
    # Not beside gloo, whose reduce_scatter is newer than torch 2.5.
    sizes = [3, 0, 1, 2][: pair.size]
    rank_numbers = torch.arange(float(pair.size))
    for op, total in ((ReduceOp.SUM, torch.sum), (ReduceOp.MAX, torch.amax), (ReduceOp.AVG, torch.mean)):
        for out in (torch.zeros(sizes[pair.rank], 2), torch.zeros(2, sizes[pair.rank]).t()):
            parts = [torch.arange(2.0 * size).view(size, 2) + 10 * pair.rank for size in sizes]
            dist.reduce_scatter(out, parts, op, group=pair.ours)
            expected = total(torch.stack([parts[pair.rank] + 10 * (rank - pair.rank) for rank in rank_numbers]), 0)
            assert same(out, expected)
    # Averages of integers are divided afterwards.
    parts = [torch.full((size,), 3 + pair.rank) for size in sizes]
    out = torch.zeros(sizes[pair.rank], dtype=torch.int64)
    dist.reduce_scatter(out, parts, ReduceOp.AVG, group=pair.ours)
    assert out.tolist() == [sum(3 + rank for rank in range(pair.size)) // pair.size] * sizes[pair.rank]


@needs_torch((2, 15), "gloo takes such rows")
def all_to_all_refuses_rows_that_the_ranks_cannot_divide(pair: Pair) -> None:
    # The elements of each can be divided evenly.
    few, enough = torch.zeros(pair.size + 1, pair.size), torch.zeros(pair.size, pair.size + 1)
    for group, error in ((pair.ours, ValueError), (pair.gloo, RuntimeError)):
        for output, tensor, async_op in itertools.product((few, enough), (few, enough), (False, True)):
            if output is enough is tensor:
                continue
            with pytest.raises(error, match="divide"):
                dist.all_to_all_single(output, tensor, group=group, async_op=async_op)
        with pytest.raises(error, match="divide"):
            dist.all_to_all_single(few, enough, None, [1] * pair.size, group=group)
    # No rank has sent anything: the next operation is the first that the ranks compare.
    dist.barrier(group=pair.ours)


def a_message_to_oneself_is_refused_and_the_group_stays_usable(pair: Pair) -> None:
    x, own = torch.ones(2), pair.world_rank(pair.rank)
    both = [dist.P2POp(verb, x, own, pair.ours) for verb in (dist.isend, dist.irecv)]
    for call in (lambda: dist.batch_isend_irecv(both), lambda: dist.irecv(x, own, pair.ours)):
        with pytest.raises(ValueError, match="is this rank itself: copy the tensor"):
            call()
    pair.both(lambda group: (dist.all_reduce(y := torch.ones(2), group=group), y))


def a_receive_from_any_source_names_its_sender(pair: Pair) -> None:
    if pair.rank == 0:
        senders = set()
        for _ in range(pair.size - 1):
            tensor = torch.zeros(1, dtype=torch.int16)
            sender = dist.recv(tensor, group=pair.ours, tag=5)
            assert tensor.item() == sender
            senders.add(sender)
        assert senders == {pair.world_rank(rank) for rank in range(1, pair.size)}
    else:
        mine = torch.tensor([dist.get_rank()], dtype=torch.int16)
        dist.send(mine, pair.world_rank(0), group=pair.ours, tag=5)


def futures_complete_without_being_waited_for(pair: Pair) -> None:
    # One that copies its results, and one that does not.
    for tensor in (torch.ones(4), torch.ones(4, 2).t()):
        called = threading.Event()
        work = dist.all_reduce(tensor, group=pair.ours, async_op=True)
        future = work.get_future()
        after = future.then(lambda done, called=called: (called.set(), done.value()[0] * 2)[1])
        assert called.wait(20.0)
        assert torch.equal(after.wait(), torch.full(tensor.shape, 2.0 * pair.size))
        assert work.is_completed()
        assert work.is_success()
        assert torch.equal(tensor, torch.full(tensor.shape, float(pair.size)))


def a_continuation_may_wait_for_another_future(pair: Pair) -> None:
    def again(done: torch.futures.Future[Any]) -> Any:
        work = dist.all_reduce(done.value()[0], group=pair.ours, async_op=True)
        return work.get_future().wait()[0]

    first = dist.all_reduce(torch.ones(3), group=pair.ours, async_op=True)
    assert torch.equal(first.get_future().then(again).wait(), torch.full((3,), float(pair.size**2)))


def receive(pair: Pair, tag: int) -> torch.futures.Future[Any]:
    """The future of a message that the rank before sends by `send`."""
    before = pair.world_rank((pair.rank - 1) % pair.size)
    work = dist.irecv(torch.zeros(1), before, pair.ours, tag)
    assert work is not None
    future: torch.futures.Future[Any] = work.get_future()
    return future


def send(pair: Pair, *tags: int) -> None:
    """Sends messages when all ranks are here, so that no rank's message has come before."""
    dist.barrier(pair.ours)
    for tag in tags:
        dist.send(torch.full((1,), float(tag)), pair.world_rank((pair.rank + 1) % pair.size), pair.ours, tag)


def value(future: torch.futures.Future[Any]) -> float:
    """The value of a future that must be done within the limit of the world."""
    done = threading.Event()
    after = future.then(lambda ended: (done.set(), ended.value())[1])
    assert done.wait(LIMIT.total_seconds()), "the future is not done"
    found = after.wait()
    return float(found[0]) if isinstance(found, list) else float(found)


def a_continuation_of_a_continuation_may_wait_for_another_future(pair: Pair) -> None:
    chained: list[torch.futures.Future[Any]] = []
    has_chained = threading.Event()

    def chain(_: torch.futures.Future[Any]) -> None:
        first, second = receive(pair, 1), receive(pair, 2)
        chained.append(first.then(lambda _: second.wait()))
        has_chained.set()

    receive(pair, 0).then(chain)
    send(pair, 0)
    assert has_chained.wait(LIMIT.total_seconds()), "the continuation does not run"
    send(pair, 1, 2)
    assert value(chained[0]) == 2.0


def continuations_that_run_one_after_another_share_threads(pair: Pair) -> None:
    threads = set()
    for _ in range(20):
        end = receive(pair, 0).then(lambda _: threads.add(threading.current_thread()))
        send(pair, 0)
        end.wait()
    # It may be two or three: a thread is not idle yet when the future that it completes is done.
    assert threading.main_thread() not in threads
    assert len(threads) < 10


def a_wait_whose_time_passes_leaves_the_operation_running(pair: Pair) -> None:
    if pair.rank == 0:
        tensor = torch.zeros(2)
        work = dist.irecv(tensor, pair.world_rank(1), group=pair.ours, tag=8)
        with pytest.raises(BaguaTimeoutError):
            work.wait(timedelta(seconds=0.05))
        assert not work.is_completed()
        dist.send(torch.ones(1), pair.world_rank(1), group=pair.ours, tag=9)
        work.wait()
        assert torch.equal(tensor, torch.ones(2))
    elif pair.rank == 1:
        dist.recv(torch.zeros(1), pair.world_rank(0), group=pair.ours, tag=9)
        dist.send(torch.ones(2), pair.world_rank(0), group=pair.ours, tag=8)


def events_of(profile: Any) -> dict[str, Any]:
    """The events of Bagua in a profile, by name; each name once."""
    found = [event for event in profile.function_events if event.name.startswith("bagua:")]
    events = {event.name: event for event in found}
    assert len(events) == len(found), [event.name for event in found]
    return events


def operations_are_events_of_the_profiler(pair: Pair) -> None:
    with torch.autograd.profiler.profile(record_shapes=True) as profile:
        dist.all_reduce(torch.ones(3, 2), group=pair.ours)
        dist.all_gather([torch.zeros(2) for _ in range(pair.size)], torch.ones(2), group=pair.ours)
        if pair.rank == 0:
            work = dist.irecv(torch.zeros(2), pair.world_rank(1), group=pair.ours, tag=8)
            # Rank 1 sends when it has this: until then the receive lasts.
            dist.send(torch.ones(1), pair.world_rank(1), group=pair.ours, tag=9)
            work.wait()
        elif pair.rank == 1:
            dist.recv(torch.zeros(1), pair.world_rank(0), group=pair.ours, tag=9)
            dist.send(torch.ones(2), pair.world_rank(0), group=pair.ours, tag=8)
    events = events_of(profile)
    messages = {"bagua:send", "bagua:recv"} if pair.rank in (0, 1) else set()
    calls = {name: event for name, event in events.items() if not name.endswith(".wait")}
    assert calls.keys() == {"bagua:all_reduce", "bagua:all_gather", *messages}
    assert calls["bagua:all_reduce"].input_shapes == [[3, 2]]
    assert calls["bagua:all_gather"].input_shapes == [[2], [2 * pair.size]]
    for name in messages:
        assert events[f"{name}.wait"].time_range.start >= events[name].time_range.end
    if pair.rank == 0:
        assert events["bagua:recv.wait"].time_range.start >= events["bagua:send"].time_range.end


def no_event_is_open_when_its_profile_ends(pair: Pair) -> None:
    # torch would write the end of such an event into memory that it has freed.
    profiled = torch.autograd.profiler.profile
    if pair.rank == 0:
        room = [torch.zeros(2) for _ in range(3)]
        with profiled() as first:
            works = [dist.irecv(x, pair.world_rank(1), group=pair.ours, tag=tag) for tag, x in enumerate(room)]
            torch.empty(5)
        receives = [event for event in first.function_events if event.name == "bagua:recv"]
        (later,) = (event for event in first.function_events if event.name == "aten::empty")
        assert len(receives) == 3
        assert all(event.time_range.end <= later.time_range.start for event in receives)
        with profiled() as second:
            dist.send(torch.ones(1), pair.world_rank(1), group=pair.ours, tag=9)
            # Done in another profile than it began in, dropped there without a wait, and done after all profiles.
            works[0].wait()
            del works[1]
        assert "bagua:recv.wait" in events_of(second)
        assert "bagua:recv" not in events_of(second)
        works[-1].wait()
        dist.barrier(pair.ours)
        assert all(torch.equal(x, torch.ones(2)) for x in (room[0], room[2]))
    else:
        if pair.rank == 1:
            dist.recv(torch.zeros(1), pair.world_rank(0), group=pair.ours, tag=9)
            for tag in range(3):
                dist.send(torch.ones(2), pair.world_rank(0), group=pair.ours, tag=tag)
        dist.barrier(pair.ours)


CASES = cases_in(globals())


def in_the_world(rank: int) -> dict[str, str]:
    return run_cases(rank, CASES)


def in_a_sub_group(rank: int) -> dict[str, str]:
    return run_cases(rank, CASES, [0, 2])


test_in_the_world = each_case(CASES, 3, run=in_the_world)
test_in_a_sub_group = pytest.mark.slow(each_case(CASES, 3, run=in_a_sub_group))
