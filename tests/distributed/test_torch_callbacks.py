"""Callbacks of handles on tensors: what a `torch.futures.Future` is completed with."""

from __future__ import annotations

import threading

import pytest
import torch

import bagua.torch_api as bagua
from bagua.errors import AbortedError
from bagua.torch_api.communication import Handle
from tests.distributed.torch_ranks import cases_in, each_case


def future_of(handle: Handle | None, result: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
    """Returns a future of a handle, as docs/how-to/embedding.md describes."""
    assert handle is not None
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    handle.then(lambda error: future.set_result(result) if error is None else future.set_exception(error))
    return future


def a_future_gets_the_result(rank: int) -> None:
    futures = []
    for number in range(20):
        x = torch.full((100,), float(number))
        future = future_of(bagua.allreduce_inplace(x, async_op=True), x)
        futures.append(future.then(lambda done: done.value() + 1))
    for number, done in enumerate(torch.futures.wait_all(futures)):
        assert torch.equal(done, torch.full((100,), number * 2.0 + 1))


def a_future_gets_the_error(rank: int) -> None:
    comm = bagua.new_group().get_global_communicator()
    if rank == 0:
        future = future_of(bagua.barrier(comm, async_op=True), torch.ones(1))
        comm.raw.abort("by the test")
        with pytest.raises(AbortedError, match="by the test"):
            future.wait()
    # The other rank does not leave the group before.
    bagua.barrier()
    del comm


def tensors_that_travel_together_are_in_place_before_the_call(rank: int) -> None:
    first, second = torch.full((3,), 1.0 + rank), torch.full((2, 2), 10.0 + rank)
    handle = bagua.allreduce_coalesced_inplace([first, second], async_op=True)
    assert handle is not None
    future = future_of(handle, first)
    assert future.wait().tolist() == [3.0] * 3
    assert second.tolist() == [[21.0] * 2] * 2
    # The results are copied once: the tensors belong to the caller again.
    first.zero_()
    handle.wait()
    now = future_of(handle, first)
    assert now.done()
    assert first.tolist() == [0.0] * 3
    with pytest.raises(TypeError, match="is not callable"):
        handle.then(3)  # type: ignore[arg-type]


def a_wait_and_a_callback_on_two_threads_copy_once(rank: int) -> None:
    for _ in range(50):
        x = torch.ones(2)
        handle = bagua.allreduce_coalesced_inplace([x], async_op=True)
        assert handle is not None
        future = future_of(handle, x)
        waiter = threading.Thread(target=handle.wait)
        waiter.start()
        assert future.wait().tolist() == [2.0, 2.0]
        waiter.join()
        assert x.tolist() == [2.0, 2.0]


def a_rank_outside_the_group_is_called_at_once(rank: int) -> None:
    group = bagua.new_group([0])
    x = torch.ones(2)
    future = future_of(bagua.allreduce_inplace(x, comm=group, async_op=True), x)
    assert future.done() or rank == 0
    assert future.wait().tolist() == [1.0, 1.0]


CASES = cases_in(globals())

test_callbacks = each_case(CASES, 2)
