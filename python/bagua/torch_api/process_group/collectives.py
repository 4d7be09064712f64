"""Collectives of a communicator on torch tensors. Arguments are checked before any communication.

``src`` and ``dst`` are ranks in the group. With ``async_op=True`` a collective returns a handle at once, with
``wait(timeout=None)``, ``then(callback)`` and ``is_completed()``. Do not read or write the tensors until the operation
has completed. Docstrings come from the functions of the same names in ``default_collectives``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import torch

from bagua import extension, verbs
from bagua.group import Group
from bagua.handle import AnyHandle as Handle
from bagua.operand import Operand
from bagua.torch_operand import Adapter, check_kinds, check_pair, operation, reader, will_change

from .reduce_op import ReduceOp, check_op

T = TypeVar("T")

_TENSORS = Adapter()
_NAMES = ("send_tensor", "recv_tensor")


def _shard(count: int, n: int) -> int:
    if count % n:
        raise ValueError(f"tensor has {count} elements, which {n} ranks cannot divide evenly")
    return count // n


def _counts(counts: Sequence[int], displs: Sequence[int], numel: int, n: int, what: str) -> tuple[list[int], list[int]]:
    sizes, starts = [int(x) for x in counts], [int(x) for x in displs]
    if len(sizes) != n or len(starts) != n:
        raise ValueError(f"{what}: {len(sizes)} counts and {len(starts)} displacements for a group of {n}")
    for rank, (size, start) in enumerate(zip(sizes, starts, strict=True)):
        if size < 0 or start < 0 or start + size > numel:
            raise ValueError(f"{what}: {size} elements at {start} for rank {rank} do not fit in a tensor of {numel}")
    return sizes, starts


class Collectives:
    """Base class of ``Communicator``: the collectives that the ranks of one group run together.

    A collective increments the version counter of each tensor that it writes, so that a backward that needs the old
    values raises. Collectives of torch.distributed do not.
    """

    def __init__(self, group: Group) -> None:
        self.group = group
        #: The core's communicator, whose collectives take addresses.
        self.raw = group.communicator

    def rank(self) -> int:
        """Returns this process's rank in the group."""
        return self.raw.rank

    def nranks(self) -> int:
        """Returns the number of ranks in the group."""
        return self.raw.size

    def _peer(self, rank: int, what: str) -> int:
        if not 0 <= rank < self.raw.size:
            raise ValueError(f"{what} {rank} is not a rank of a group of {self.raw.size}")
        return rank

    def _begin(
        self, verb: verbs.Verb, src: Operand | None, dst: Operand | None, async_op: bool, **options: Any
    ) -> Handle | None:
        return operation(self.raw, verb, src, dst, **options).begin(async_op)

    def _run(
        self,
        verb: verbs.Verb,
        send: torch.Tensor | None,
        recv: torch.Tensor,
        async_op: bool,
        op: ReduceOp | None = None,
        root: int = 0,
    ) -> Handle | None:
        """Runs a verb on two tensors, or in place. Every rank writes to ``recv``."""
        if async_op and (begun := self.raw.try_begin(verb.code, reader, send, recv, op or 0, root)) is not None:
            return begun
        if send is None:
            mine = _TENSORS.write(recv, "tensor")
            src, dst = None, mine
            if verb.sends_all or verb.receives_all:
                _shard(mine.count, self.nranks())
        else:
            mine, dst = _TENSORS.read(send, _NAMES[0]), _TENSORS.write(recv, _NAMES[1])
            check_pair(verb, send, recv, self.nranks(), _NAMES)
            if verb is verbs.ALL_TO_ALL:
                src = mine
                _shard(mine.count, self.nranks())
            else:
                results = dst.results
                src, dst = verb.in_place(mine, dst, self.rank())
                dst.results = results
        number = 0 if op is None else check_op(op, dst.dtype)
        return self._begin(verb, src, dst, async_op, op=number, root=root)

    def send(self, tensor: torch.Tensor, dst: int, *, async_op: bool = False) -> Handle | None:
        to, held = self._peer(dst, "dst"), _TENSORS.read(tensor, "tensor")
        return verbs.send(self.raw, held, to).begin(async_op)

    def recv(self, tensor: torch.Tensor, src: int, *, async_op: bool = False) -> Handle | None:
        src, room = self._peer(src, "src"), _TENSORS.write(tensor, "tensor")
        will_change(room)
        return verbs.recv(self.raw, room, src).begin(async_op)

    def broadcast(self, tensor: torch.Tensor, src: int = 0, *, async_op: bool = False) -> Handle | None:
        if not async_op and self.raw.try_run(extension.BROADCAST, reader, None, tensor, 0, src):
            return None
        src = self._peer(src, "src")
        mine = (_TENSORS.read if self.rank() == src else _TENSORS.write)(tensor, "tensor")
        return self._begin(verbs.BROADCAST, None, mine, async_op, root=src)

    def broadcast_coalesced(
        self, tensors: Sequence[torch.Tensor], src: int = 0, *, async_op: bool = False
    ) -> Handle | None:
        if not tensors:
            raise ValueError("tensors is empty")
        src = self._peer(src, "src")
        return self._begin(verbs.BROADCAST, None, _TENSORS.joined(tensors, "tensors"), async_op, root=src)

    def broadcast_object(self, obj: Any, src: int = 0) -> Any:
        return self.group.broadcast_object(obj, src)

    def reduce(
        self,
        send_tensor: torch.Tensor,
        recv_tensor: torch.Tensor,
        dst: int,
        op: ReduceOp = ReduceOp.SUM,
        *,
        async_op: bool = False,
    ) -> Handle | None:
        if not async_op and self.raw.try_run(extension.REDUCE, reader, send_tensor, recv_tensor, op, dst):
            return None
        return self._run(verbs.REDUCE, send_tensor, recv_tensor, async_op, op, self._peer(dst, "dst"))

    def reduce_inplace(
        self, tensor: torch.Tensor, dst: int, op: ReduceOp = ReduceOp.SUM, *, async_op: bool = False
    ) -> Handle | None:
        if not async_op and self.raw.try_run(extension.REDUCE, reader, None, tensor, op, dst):
            return None
        return self._run(verbs.REDUCE, None, tensor, async_op, op, self._peer(dst, "dst"))

    def allreduce(
        self,
        send_tensor: torch.Tensor,
        recv_tensor: torch.Tensor,
        op: ReduceOp = ReduceOp.SUM,
        *,
        async_op: bool = False,
    ) -> Handle | None:
        if not async_op and self.raw.try_run(extension.ALL_REDUCE, reader, send_tensor, recv_tensor, op, 0):
            return None
        return self._run(verbs.ALL_REDUCE, send_tensor, recv_tensor, async_op, op)

    def allreduce_inplace(
        self, tensor: torch.Tensor, op: ReduceOp = ReduceOp.SUM, *, async_op: bool = False
    ) -> Handle | None:
        if not async_op and self.raw.try_run(extension.ALL_REDUCE, reader, None, tensor, op, 0):
            return None
        return self._run(verbs.ALL_REDUCE, None, tensor, async_op, op)

    def allreduce_coalesced_inplace(
        self, tensors: Sequence[torch.Tensor], op: ReduceOp = ReduceOp.SUM, *, async_op: bool = False
    ) -> Handle | None:
        if not tensors:
            raise ValueError("tensors is empty")
        flat = _TENSORS.joined(tensors, "tensors")
        return self._begin(verbs.ALL_REDUCE, None, flat, async_op, op=check_op(op, flat.dtype))

    def reduce_scatter(
        self,
        send_tensor: torch.Tensor,
        recv_tensor: torch.Tensor,
        op: ReduceOp = ReduceOp.SUM,
        *,
        async_op: bool = False,
    ) -> Handle | None:
        if not async_op and self.raw.try_run(extension.REDUCE_SCATTER, reader, send_tensor, recv_tensor, op, 0):
            return None
        return self._run(verbs.REDUCE_SCATTER, send_tensor, recv_tensor, async_op, op)

    def reduce_scatter_inplace(
        self, tensor: torch.Tensor, op: ReduceOp = ReduceOp.SUM, *, async_op: bool = False
    ) -> Handle | None:
        if not async_op and self.raw.try_run(extension.REDUCE_SCATTER, reader, None, tensor, op, 0):
            return None
        return self._run(verbs.REDUCE_SCATTER, None, tensor, async_op, op)

    def allgather(
        self, send_tensor: torch.Tensor, recv_tensor: torch.Tensor, *, async_op: bool = False
    ) -> Handle | None:
        if not async_op and self.raw.try_run(extension.ALL_GATHER, reader, send_tensor, recv_tensor, 0, 0):
            return None
        return self._run(verbs.ALL_GATHER, send_tensor, recv_tensor, async_op)

    def allgather_inplace(self, tensor: torch.Tensor, *, async_op: bool = False) -> Handle | None:
        if not async_op and self.raw.try_run(extension.ALL_GATHER, reader, None, tensor, 0, 0):
            return None
        return self._run(verbs.ALL_GATHER, None, tensor, async_op)

    def allgather_object(self, obj: T) -> list[T]:
        """Returns all ranks' objects in rank order, as :meth:`bagua.Group.all_gather_object`."""
        return self.group.all_gather_object(obj)

    def gather(
        self, send_tensor: torch.Tensor, recv_tensor: torch.Tensor, dst: int, *, async_op: bool = False
    ) -> Handle | None:
        src: Operand | None
        src, root = _TENSORS.read(send_tensor, _NAMES[0]), self._peer(dst, "dst")
        room = None
        if self.rank() == root:
            room = _TENSORS.write(recv_tensor, _NAMES[1])
            check_pair(verbs.GATHER, send_tensor, recv_tensor, self.nranks(), _NAMES)
            src, room = verbs.GATHER.in_place(src, room, root)
        return self._begin(verbs.GATHER, src, room, async_op, root=root)

    def gather_inplace(self, tensor: torch.Tensor, count: int, dst: int, *, async_op: bool = False) -> Handle | None:
        return self._in_place_with_room(verbs.GATHER, tensor, count, self._peer(dst, "dst"), async_op)

    def _in_place_with_room(
        self, verb: verbs.Verb, tensor: torch.Tensor, count: int, root: int, async_op: bool
    ) -> Handle | None:
        mine, n = _TENSORS.write(tensor, "tensor"), self.nranks()
        if count < 0 or mine.count < count * n:
            raise ValueError(f"tensor has {mine.count} elements, count {count} for {n} ranks needs {count * n}")
        return self._begin(verb, None, mine, async_op, root=root, count=count)

    def scatter(
        self, send_tensor: torch.Tensor, recv_tensor: torch.Tensor, src: int, *, async_op: bool = False
    ) -> Handle | None:
        room, root = _TENSORS.write(recv_tensor, _NAMES[1]), self._peer(src, "src")
        held = room.nothing()
        if self.rank() == root:
            held = _TENSORS.read(send_tensor, _NAMES[0])
            check_pair(verbs.SCATTER, send_tensor, recv_tensor, self.nranks(), _NAMES)
        return self._begin(verbs.SCATTER, held, room, async_op, root=root)

    def scatter_inplace(self, tensor: torch.Tensor, count: int, src: int, *, async_op: bool = False) -> Handle | None:
        return self._in_place_with_room(verbs.SCATTER, tensor, count, self._peer(src, "src"), async_op)

    def alltoall(
        self, send_tensor: torch.Tensor, recv_tensor: torch.Tensor, *, async_op: bool = False
    ) -> Handle | None:
        if not async_op and self.raw.try_run(extension.ALL_TO_ALL, reader, send_tensor, recv_tensor, 0, 0):
            return None
        return self._run(verbs.ALL_TO_ALL, send_tensor, recv_tensor, async_op)

    def alltoall_inplace(self, tensor: torch.Tensor, *, async_op: bool = False) -> Handle | None:
        if not async_op and self.raw.try_run(extension.ALL_TO_ALL, reader, None, tensor, 0, 0):
            return None
        return self._run(verbs.ALL_TO_ALL, None, tensor, async_op)

    def alltoall_v(
        self,
        send_tensor: torch.Tensor,
        send_counts: Sequence[int],
        send_displs: Sequence[int],
        recv_tensor: torch.Tensor,
        recv_counts: Sequence[int],
        recv_displs: Sequence[int],
        *,
        async_op: bool = False,
    ) -> Handle | None:
        mine, room = _TENSORS.read(send_tensor, _NAMES[0]), _TENSORS.write(recv_tensor, _NAMES[1])
        check_kinds(send_tensor, recv_tensor, _NAMES)
        sends = _counts(send_counts, send_displs, mine.count, self.nranks(), _NAMES[0])
        recvs = _counts(recv_counts, recv_displs, room.count, self.nranks(), _NAMES[1])
        will_change(room)
        return verbs.all_to_all_v(self.raw, mine, sends, room, recvs).begin(async_op)

    def alltoall_v_inplace(
        self, tensor: torch.Tensor, counts: Sequence[int], displs: Sequence[int], *, async_op: bool = False
    ) -> Handle | None:
        room = _TENSORS.write(tensor, "tensor")
        both = _counts(counts, displs, room.count, self.nranks(), "tensor")
        will_change(room)
        return verbs.all_to_all_v(self.raw, None, both, room, both).begin(async_op)

    def barrier(self, *, async_op: bool = False) -> Handle | None:
        return self._begin(verbs.BARRIER, None, None, async_op)
