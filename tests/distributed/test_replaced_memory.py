"""A caller gives a tensor other memory (`tensor.data = ...`) while an asynchronous operation works on the first."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import bagua.torch_api as bagua
from bagua.group import default
from bagua.torch_api.bucket import BaguaBucket
from bagua.torch_api.communication import get_backend
from tests.distributed.torch_ranks import cases_in, each_case

#: More than a message that is done before it is received.
COUNT = 1 << 16
#: Of the message that begins the other ranks' part.
TAG = 7


#: The group of the backend "bagua".
GROUPS: list[Any] = []


def begin(_: int) -> None:
    GROUPS.append(dist.new_group(backend="bagua"))


class Lent:
    """A tensor of ones, and a reference that dies with its memory."""

    def __init__(self, count: int = COUNT) -> None:
        memory = np.ones(count, np.float32)
        self.tensor = torch.from_numpy(memory)
        self._memory = weakref.ref(memory)

    def replace(self) -> None:
        self.tensor.data = torch.zeros(self.tensor.numel())

    def is_freed(self) -> bool:
        return self._memory() is None


def check(start: Callable[[list[torch.Tensor]], Any], rank: int, *given: int | Lent) -> None:
    """The first rank replaces the memory before the others take part."""
    lent = [Lent(each) if isinstance(each, int) else each for each in given]
    group, sign = default(required=True), np.zeros(1)
    if rank != 0:
        group.recv(sign, 0, tag=TAG)
    handle = start([each.tensor for each in lent])
    if rank == 0:
        for each in lent:
            each.replace()
        assert not any(each.is_freed() for each in lent), "the memory of a running operation was freed"
        for peer in range(1, bagua.get_world_size()):
            group.send(sign, peer, tag=TAG)
    handle.wait()
    del handle
    # The communication thread has let go of the memory. The interpreter frees it at the next call into the extension.
    bagua.barrier()
    if rank == 0:
        assert all(each.is_freed() for each in lent), "the memory was kept after the operation"
        assert not any(each.tensor.any() for each in lent), "memory was written that no operation has"


class Marked(torch.Tensor):
    """A subclass, which the bindings do not read."""


def collectives_of_torch_api(rank: int) -> None:
    size = bagua.get_world_size()
    check(lambda x: bagua.allreduce_inplace(x[0], async_op=True), rank, COUNT)
    check(lambda x: bagua.allreduce_inplace(x[0].as_subclass(Marked), async_op=True), rank, COUNT)
    check(lambda x: bagua.allreduce(x[0], x[1], async_op=True), rank, COUNT, COUNT)
    check(lambda x: bagua.allgather(x[0], x[1], async_op=True), rank, COUNT, size * COUNT)


def collectives_of_torch_distributed(rank: int) -> None:
    ours, size = GROUPS[0], bagua.get_world_size()
    check(lambda x: dist.all_reduce(x[0], group=ours, async_op=True), rank, COUNT)
    check(lambda x: dist.broadcast(x[0], 1, group=ours, async_op=True), rank, COUNT)
    check(lambda x: dist.all_gather_into_tensor(x[1], x[0], group=ours, async_op=True), rank, COUNT, size * COUNT)


def collectives_of_groups(rank: int) -> None:
    group = default(required=True)
    check(lambda x: group.all_reduce(x[0], async_op=True), rank, COUNT)
    check(lambda x: group.broadcast(x[0], 1, async_op=True), rank, COUNT)


def messages(rank: int) -> None:
    if bagua.get_world_size() > 2:
        return
    check(lambda x: (bagua.recv if rank else bagua.send)(x[0], 1 - rank, async_op=True), rank, COUNT)
    check(lambda x: (dist.irecv if rank else dist.isend)(x[0], 1 - rank, group=GROUPS[0]), rank, COUNT)


def buckets(rank: int) -> None:
    lent = Lent()
    memory = lent.tensor.data
    # The bucket keeps the memory that a tensor has now, and the engine that which it has when it is marked.
    lent.replace()
    lent.tensor.ensure_bagua_tensor("weight", "replaced")  # type: ignore[attr-defined]
    bucket = BaguaBucket([lent.tensor], "replaced", flatten=False)
    bucket.append_centralized_synchronous_op()
    backend = get_backend("replaced")
    backend.register_ordered_buckets([bucket])
    lent.tensor.data = memory
    del memory

    class Engine:
        def __init__(self, tensors: list[torch.Tensor]) -> None:
            backend.mark_communication_ready(tensors[0])

        def wait(self) -> None:
            backend.wait_pending_comm_ops()

    check(Engine, rank, lent)


CASES = cases_in(globals())

test = each_case(CASES, 2, 3)
