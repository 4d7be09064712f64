"""Communicators as objects: memory in an arena, every collective as a method, abort."""

from __future__ import annotations

import os
import sys
import threading

import pytest
import torch

import bagua as neutral
import bagua.torch_api as bagua
from bagua.errors import AbortedError
from bagua.torch_api.process_group import Communicator, Handle
from bagua.verbs import Operation
from tests.distributed.torch_ranks import cases_in, each_case


def zero_copies() -> int:
    return sum(kind.get("zero_copy", 0) for kind in neutral.stats()["groups"]["world"]["ops"].values())


def tensors_in_an_arena_are_reduced_without_a_copy(rank: int) -> None:
    size = bagua.get_world_size()
    shared = bagua.empty((3, 30_000))
    assert (shared.dtype, shared.shape, shared.count_nonzero().item()) == (torch.float32, (3, 30_000), 0)
    halves = bagua.empty(70_000, dtype=torch.float16, group=bagua.new_group())
    for tensor in (shared, shared[1], halves):
        before = zero_copies()
        tensor.fill_(rank + 1)
        bagua.allreduce_inplace(tensor)
        assert torch.equal(tensor, torch.full_like(tensor, size * (size + 1) / 2))
        assert zero_copies() - before == (size > 1), tensor.shape
    before = zero_copies()
    bagua.allreduce_inplace(torch.ones(3, 30_000))
    assert zero_copies() == before


def an_arena_is_refused_before_any_communication(rank: int) -> None:
    with pytest.raises(TypeError, match=r"dtype torch\.float8"):
        bagua.empty(3, dtype=torch.float8_e4m3fn)
    for shape in (-1, (2, -3), (1 << 40, 1 << 40)):
        with pytest.raises(ValueError, match="cannot exist"):
            bagua.empty(shape)
    assert bagua.empty((2, 0)).shape == (2, 0)
    group = bagua.new_group([0])
    if rank != 0:
        with pytest.raises(ValueError, match="not in BaguaProcessGroup"):
            bagua.empty(3, group=group)
    else:
        assert bagua.empty(3, torch.int64, group).tolist() == [0, 0, 0]


def methods_outside_the_group_have_no_effect(rank: int) -> None:
    comm = bagua.new_group([0]).get_global_communicator()
    if rank == 0:
        return
    tensor = torch.ones(3)
    names = [name for name in bagua.communication.__all__ if hasattr(Communicator, name) and name != "empty"]
    assert len(names) == 23
    for name in names:
        if name == "broadcast_object":
            assert comm.broadcast_object(tensor) is tensor
            continue
        assert getattr(comm, name)(tensor) is None
        getattr(comm, name)(tensor, async_op=True).wait()
    assert tensor.tolist() == [1.0] * 3
    comm.abort()
    assert not comm.check_abort()
    assert (comm.rank(), comm.nranks(), comm.device_id()) == (-1, -1, -1)


def abort_from_another_thread_ends_a_blocked_call(rank: int) -> None:
    if bagua.get_world_size() == 1:
        # Nothing blocks without a peer.
        comm = bagua.new_group().get_global_communicator()
        comm.abort()
        assert comm.check_abort()
        return
    following = (rank + 1) % bagua.get_world_size()
    main = threading.get_ident()
    for blocking in (True, False):
        comm = bagua.new_group().get_global_communicator()

        def abort_when_blocked(comm: Communicator = comm) -> None:
            # The main thread's frame is that of the call which it does not leave.
            while sys._current_frames()[main].f_code not in (Operation.begin.__code__, wait_for.__code__):
                os.sched_yield()
            comm.abort()

        thread = threading.Thread(target=abort_when_blocked)
        assert not comm.check_abort()
        bagua.barrier()
        if rank == 0:
            thread.start()
        # Where rank 0 aborted before this rank began, the call itself raises.
        with pytest.raises(AbortedError):
            receive(comm, following, blocking)
        assert comm.check_abort()
        if rank == 0:
            thread.join()
        # The world is not aborted.
        bagua.barrier()


def receive(comm: Communicator, source: int, blocking: bool) -> None:
    pending = comm.recv(torch.zeros(3), source, async_op=not blocking)
    if pending is not None:
        wait_for(pending)


def wait_for(handle: Handle) -> None:
    handle.wait()


CASES = cases_in(globals())

test = each_case(CASES, 1, 2, 3, 4)
