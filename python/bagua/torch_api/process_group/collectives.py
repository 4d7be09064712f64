"""The collectives of a communicator on torch tensors: arguments are checked before any communication.

``src`` and ``dst`` are ranks of the group. With ``async_op=True`` a collective returns a handle with
``wait(timeout=None)``, ``then(callback)`` and ``is_completed()`` immediately; the tensors must not be read or written
until it is done.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from bagua import engine
from bagua import handle as handles
from bagua.handle import AnyHandle as Handle

from ..utils import flatten, unflatten
from .tensor_args import ReduceOp, check_op, own_shard, reader, same_kind, seen, source, target

if TYPE_CHECKING:
    from bagua.cuda.tensors import TensorPlace


def _require(send: int, recv: int, relation: str, right: bool) -> None:
    if not right:
        raise ValueError(f"send_tensor has {send} elements, recv_tensor {recv}: {relation}")


def _shard(count: int, n: int) -> int:
    if count % n:
        raise ValueError(f"tensor has {count} elements, which {n} ranks cannot divide evenly")
    return count // n


def _require_room(room: int, count: int, n: int) -> None:
    if count < 0 or room < count * n:
        raise ValueError(f"tensor has {room} elements, count {count} for {n} ranks needs {count * n}")


def _counts(counts: Sequence[int], displs: Sequence[int], numel: int, n: int, what: str) -> tuple[list[int], list[int]]:
    sizes, starts = [int(x) for x in counts], [int(x) for x in displs]
    if len(sizes) != n or len(starts) != n:
        raise ValueError(f"{what}: {len(sizes)} counts and {len(starts)} displacements for a group of {n}")
    for rank, (size, start) in enumerate(zip(sizes, starts, strict=True)):
        if size < 0 or start < 0 or start + size > numel:
            raise ValueError(f"{what}: {size} elements at {start} for rank {rank} do not fit in a tensor of {numel}")
    return sizes, starts


class Collectives:
    """Base of ``Communicator``: what the ranks of one group do together."""

    def __init__(self, raw: engine.Communicator) -> None:
        #: The collectives by address.
        self.raw = raw

    def rank(self) -> int:
        """This process's rank in the group."""
        return self.raw.rank

    def nranks(self) -> int:
        """The number of ranks in the group."""
        return self.raw.size

    def _peer(self, rank: int, what: str) -> int:
        if not 0 <= rank < self.raw.size:
            raise ValueError(f"{what} {rank} is not a rank of a group of {self.raw.size}")
        return rank

    def _at(self, on: torch.Tensor, verb: Callable[..., Any]) -> Callable[..., Handle | None]:
        """A verb by address, for the place of ``on`` and of the other tensors."""
        return self._on_device(on.device, verb) if on.is_cuda else verb

    def _on_device(self, device: torch.device, verb: Callable[..., Any]) -> Callable[..., Handle | None]:
        # Here, because importing bagua.cuda decides to which process CUDA belongs.
        from bagua.cuda.tensors import TensorPlace

        def run(*codes: Any, **options: Any) -> Handle | None:
            place = TensorPlace(device)
            return place.handle(verb(*codes, **options, place=place.call(self.raw)))

        return run

    def _message_at(self, on: torch.Tensor, verb: Callable[..., Any]) -> Callable[..., Handle | None]:
        """A message by address, for the place of ``on``."""
        if not on.is_cuda:
            return verb
        from bagua.cuda.tensors import TensorPlace

        def run(*codes: Any, **options: Any) -> Handle | None:
            place = TensorPlace(on.device)
            return place.handle(verb(*codes, **options, place=place.call_messages(self.raw)))

        return run

    # --- point to point -----------------------------------------------------------------------------------------------

    def send(self, tensor: torch.Tensor, dst: int, *, async_op: bool = False) -> Handle | None:
        """Sends a tensor to rank ``dst``, which must receive as many elements."""
        address, count, code, _, held = source(tensor, "tensor")
        send = self._message_at(held, self.raw.send)
        return send(address, count, code, self._peer(dst, "dst"), async_op=async_op, keep=held)

    def recv(self, tensor: torch.Tensor, src: int, *, async_op: bool = False) -> Handle | None:
        """Receives a tensor from rank ``src``: its next message, beside the collectives of the group."""
        src = self._peer(src, "src")
        _, count, code, _, _ = found = seen(tensor, "tensor")
        recv = self._message_at(tensor, self.raw.recv)
        return recv(target(found, "tensor"), count, code, src, async_op=async_op, keep=tensor)

    # --- broadcast ----------------------------------------------------------------------------------------------------

    def broadcast(self, tensor: torch.Tensor, src: int = 0, *, async_op: bool = False) -> Handle | None:
        """Every rank gets rank ``src``'s values, in place."""
        if not async_op and self.raw.try_run(engine.BROADCAST, reader, None, tensor, 0, src):
            return None
        src = self._peer(src, "src")
        if self.rank() == src:
            address, count, code, shape, held = source(tensor, "tensor")
        else:
            _, count, code, shape, held = found = seen(tensor, "tensor")
            address = target(found, "tensor")
        return self._at(tensor, self.raw.run)(
            engine.BROADCAST, None, address, count, code, 0, src, shape=shape, async_op=async_op, keep=held
        )

    def broadcast_coalesced(
        self, tensors: Sequence[torch.Tensor], src: int = 0, *, async_op: bool = False
    ) -> Handle | None:
        """:func:`broadcast` of several tensors of one dtype in one message."""
        return _coalesced(tensors, async_op, lambda flat: self.broadcast(flat, src, async_op=async_op))

    def broadcast_object(self, obj: Any, src: int = 0) -> Any:
        """Every rank gets rank ``src``'s object, by pickle.

        The other ranks' ``obj`` is ignored; on a rank outside the group it is returned.
        """
        mine = self.rank() == self._peer(src, "src")
        data = (
            torch.frombuffer(bytearray(pickle.dumps(obj)), dtype=torch.uint8)
            if mine
            else torch.empty(0, dtype=torch.uint8)
        )
        size = torch.tensor([data.numel()], dtype=torch.int64)
        self.broadcast(size, src)
        if not mine:
            data = torch.empty(int(size.item()), dtype=torch.uint8)
        self.broadcast(data, src)
        # Unpickling runs code of the sender: every member of the group has proved that it knows the job's secret.
        return obj if mine else pickle.loads(data.numpy().tobytes())

    # --- reductions ---------------------------------------------------------------------------------------------------

    def reduce(
        self,
        send_tensor: torch.Tensor,
        recv_tensor: torch.Tensor,
        dst: int,
        op: ReduceOp = ReduceOp.SUM,
        *,
        async_op: bool = False,
    ) -> Handle | None:
        """Rank ``dst`` gets the reduction of all ranks' tensors in ``recv_tensor``; the others' is not written."""
        if not async_op and self.raw.try_run(engine.REDUCE, reader, send_tensor, recv_tensor, op, dst):
            return None
        return self._reduction(send_tensor, recv_tensor, op, self._peer(dst, "dst"), async_op)

    def reduce_inplace(
        self, tensor: torch.Tensor, dst: int, op: ReduceOp = ReduceOp.SUM, *, async_op: bool = False
    ) -> Handle | None:
        """:func:`reduce` in place; the tensors of the other ranks do not change."""
        if not async_op and self.raw.try_run(engine.REDUCE, reader, None, tensor, op, dst):
            return None
        return self._reduction(None, tensor, op, self._peer(dst, "dst"), async_op)

    def allreduce(
        self,
        send_tensor: torch.Tensor,
        recv_tensor: torch.Tensor,
        op: ReduceOp = ReduceOp.SUM,
        *,
        async_op: bool = False,
    ) -> Handle | None:
        """Every rank gets the reduction of all ranks' tensors in ``recv_tensor``."""
        if not async_op and self.raw.try_run(engine.ALL_REDUCE, reader, send_tensor, recv_tensor, op, 0):
            return None
        return self._reduction(send_tensor, recv_tensor, op, None, async_op)

    def allreduce_inplace(
        self, tensor: torch.Tensor, op: ReduceOp = ReduceOp.SUM, *, async_op: bool = False
    ) -> Handle | None:
        """:func:`allreduce` in place."""
        if not async_op and self.raw.try_run(engine.ALL_REDUCE, reader, None, tensor, op, 0):
            return None
        return self._reduction(None, tensor, op, None, async_op)

    def _reduction(
        self, send: torch.Tensor | None, recv: torch.Tensor, op: ReduceOp, root: int | None, async_op: bool
    ) -> Handle | None:
        src: int | None
        held: torch.Tensor | None
        if send is None:
            _, count, code, shape, _ = found = seen(recv, "tensor")
            number = check_op(op, code)
            src, dst, held = None, target(found, "tensor"), None
        else:
            src, count, code, shape, held = source(send, "send_tensor")
            _, room, other, _, _ = found = seen(recv, "recv_tensor")
            same_kind(code, other, send, recv)
            _require(count, room, "they must be equal", count == room)
            number = check_op(op, code)
            dst = target(found, "recv_tensor")
            if src == dst:
                src = None
        keep = (held, recv)
        if root is not None:
            return self._at(recv, self.raw.run)(
                engine.REDUCE, src, dst, count, code, number, root, shape=shape, async_op=async_op, keep=keep
            )
        return self._at(recv, self.raw.run)(
            engine.ALL_REDUCE, src, dst, count, code, number, shape=shape, async_op=async_op, keep=keep
        )

    def allreduce_coalesced_inplace(
        self, tensors: Sequence[torch.Tensor], op: ReduceOp = ReduceOp.SUM, *, async_op: bool = False
    ) -> Handle | None:
        """:func:`allreduce_inplace` of several tensors of one dtype in one message."""
        return _coalesced(tensors, async_op, lambda flat: self.allreduce_inplace(flat, op, async_op=async_op))

    def reduce_scatter(
        self,
        send_tensor: torch.Tensor,
        recv_tensor: torch.Tensor,
        op: ReduceOp = ReduceOp.SUM,
        *,
        async_op: bool = False,
    ) -> Handle | None:
        """Rank r gets the reduction of every rank's r-th shard."""
        if not async_op and self.raw.try_run(engine.REDUCE_SCATTER, reader, send_tensor, recv_tensor, op, 0):
            return None
        n = self.nranks()
        whole, room, code, _, held = source(send_tensor, "send_tensor")
        _, count, other, _, _ = found = seen(recv_tensor, "recv_tensor")
        same_kind(code, other, send_tensor, recv_tensor)
        _require(room, count, f"{n} ranks need {count * n} to send", room == count * n)
        number = check_op(op, code)
        mine = target(found, "recv_tensor")
        inside = own_shard(mine, count, whole, self.rank(), code) is None
        src, dst = (None, whole) if inside else (whole, mine)
        return self._at(recv_tensor, self.raw.run)(
            engine.REDUCE_SCATTER,
            src,
            dst,
            count,
            code,
            number,
            async_op=async_op,
            keep=(held, recv_tensor),
        )

    def reduce_scatter_inplace(
        self, tensor: torch.Tensor, op: ReduceOp = ReduceOp.SUM, *, async_op: bool = False
    ) -> Handle | None:
        """:func:`reduce_scatter` in place: rank r's result lies at r * (numel / nranks)."""
        if not async_op and self.raw.try_run(engine.REDUCE_SCATTER, reader, None, tensor, op, 0):
            return None
        _, room, code, _, _ = found = seen(tensor, "tensor")
        count, number = _shard(room, self.nranks()), check_op(op, code)
        dst = target(found, "tensor")
        return self._at(tensor, self.raw.run)(
            engine.REDUCE_SCATTER, None, dst, count, code, number, async_op=async_op, keep=tensor
        )

    # --- gather and scatter -------------------------------------------------------------------------------------------

    def allgather(
        self, send_tensor: torch.Tensor, recv_tensor: torch.Tensor, *, async_op: bool = False
    ) -> Handle | None:
        """Every rank gets every rank's tensor, concatenated in ``recv_tensor``."""
        if not async_op and self.raw.try_run(engine.ALL_GATHER, reader, send_tensor, recv_tensor, 0, 0):
            return None
        n = self.nranks()
        address, count, code, _, held = source(send_tensor, "send_tensor")
        _, room, other, _, _ = found = seen(recv_tensor, "recv_tensor")
        same_kind(code, other, send_tensor, recv_tensor)
        _require(count, room, f"{n} ranks need {count * n} to receive", room == count * n)
        whole = target(found, "recv_tensor")
        mine = own_shard(address, count, whole, self.rank(), code)
        return self._at(recv_tensor, self.raw.run)(
            engine.ALL_GATHER, mine, whole, count, code, async_op=async_op, keep=(held, recv_tensor)
        )

    def allgather_inplace(self, tensor: torch.Tensor, *, async_op: bool = False) -> Handle | None:
        """:func:`allgather` in place: rank r's shard lies at r * (numel / nranks)."""
        if not async_op and self.raw.try_run(engine.ALL_GATHER, reader, None, tensor, 0, 0):
            return None
        _, room, code, _, _ = found = seen(tensor, "tensor")
        count = _shard(room, self.nranks())
        return self._at(tensor, self.raw.run)(
            engine.ALL_GATHER, None, target(found, "tensor"), count, code, async_op=async_op, keep=tensor
        )

    def gather(
        self, send_tensor: torch.Tensor, recv_tensor: torch.Tensor, dst: int, *, async_op: bool = False
    ) -> Handle | None:
        """Rank ``dst`` gets every rank's tensor, concatenated in ``recv_tensor``; the others' is not written."""
        address, count, code, _, held = source(send_tensor, "send_tensor")
        n, root = self.nranks(), self._peer(dst, "dst")
        mine: int | None = address
        whole, keep = None, None
        if self.rank() == root:
            _, room, other, _, keep = found = seen(recv_tensor, "recv_tensor")
            same_kind(code, other, send_tensor, recv_tensor)
            _require(count, room, f"{n} ranks need {count * n} to receive", room == count * n)
            whole = target(found, "recv_tensor")
            mine = own_shard(address, count, whole, root, code)
        return self._at(send_tensor, self.raw.run)(
            engine.GATHER, mine, whole, count, code, 0, root, async_op=async_op, keep=(held, keep)
        )

    def gather_inplace(self, tensor: torch.Tensor, count: int, dst: int, *, async_op: bool = False) -> Handle | None:
        """:func:`gather` in place: rank r's ``count`` elements lie at r * count of its tensor."""
        _, room, code, _, _ = found = seen(tensor, "tensor")
        root = self._peer(dst, "dst")
        _require_room(room, count, self.nranks())
        return self._at(tensor, self.raw.run)(
            engine.GATHER, None, target(found, "tensor"), count, code, 0, root, async_op=async_op, keep=tensor
        )

    def scatter(
        self, send_tensor: torch.Tensor, recv_tensor: torch.Tensor, src: int, *, async_op: bool = False
    ) -> Handle | None:
        """Rank r gets the r-th shard of rank ``src``'s ``send_tensor``; the others' is ignored."""
        _, count, code, _, _ = found = seen(recv_tensor, "recv_tensor")
        n, root = self.nranks(), self._peer(src, "src")
        # Read at the root only. None would mean in place.
        address, held = 0, None
        if self.rank() == root:
            address, whole, other, _, held = source(send_tensor, "send_tensor")
            same_kind(other, code, send_tensor, recv_tensor)
            _require(whole, count, f"{n} ranks need {count * n} to send", whole == count * n)
        mine = target(found, "recv_tensor")
        return self._at(recv_tensor, self.raw.run)(
            engine.SCATTER,
            address,
            mine,
            count,
            code,
            0,
            root,
            async_op=async_op,
            keep=(held, recv_tensor),
        )

    def scatter_inplace(self, tensor: torch.Tensor, count: int, src: int, *, async_op: bool = False) -> Handle | None:
        """:func:`scatter` in place: rank r's ``count`` elements lie at r * count, in the sender's tensor and in its
        own.
        """
        _, room, code, _, _ = found = seen(tensor, "tensor")
        root = self._peer(src, "src")
        _require_room(room, count, self.nranks())
        return self._at(tensor, self.raw.run)(
            engine.SCATTER, None, target(found, "tensor"), count, code, 0, root, async_op=async_op, keep=tensor
        )

    # --- all to all ---------------------------------------------------------------------------------------------------

    def alltoall(
        self, send_tensor: torch.Tensor, recv_tensor: torch.Tensor, *, async_op: bool = False
    ) -> Handle | None:
        """Rank r gets the r-th shard of every rank's tensor, concatenated in rank order."""
        if not async_op and self.raw.try_run(engine.ALL_TO_ALL, reader, send_tensor, recv_tensor, 0, 0):
            return None
        src, whole, code, _, held = source(send_tensor, "send_tensor")
        _, room, other, _, _ = found = seen(recv_tensor, "recv_tensor")
        same_kind(code, other, send_tensor, recv_tensor)
        _require(whole, room, "they must be equal", whole == room)
        count = _shard(whole, self.nranks())
        dst = target(found, "recv_tensor")
        return self._at(recv_tensor, self.raw.run)(
            engine.ALL_TO_ALL, src, dst, count, code, async_op=async_op, keep=(held, recv_tensor)
        )

    def alltoall_inplace(self, tensor: torch.Tensor, *, async_op: bool = False) -> Handle | None:
        """:func:`alltoall` in place."""
        if not async_op and self.raw.try_run(engine.ALL_TO_ALL, reader, None, tensor, 0, 0):
            return None
        _, whole, code, _, _ = found = seen(tensor, "tensor")
        count = _shard(whole, self.nranks())
        return self._at(tensor, self.raw.run)(
            engine.ALL_TO_ALL, None, target(found, "tensor"), count, code, async_op=async_op, keep=tensor
        )

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
        """Rank r gets ``send_counts[r]`` elements from ``send_displs[r]`` of every rank, at its ``recv_displs``."""
        n = self.nranks()
        src, whole, code, _, held = source(send_tensor, "send_tensor")
        _, room, other, _, _ = found = seen(recv_tensor, "recv_tensor")
        same_kind(code, other, send_tensor, recv_tensor)
        sends = _counts(send_counts, send_displs, whole, n, "send_tensor")
        recvs = _counts(recv_counts, recv_displs, room, n, "recv_tensor")
        dst, keep = target(found, "recv_tensor"), (held, recv_tensor)
        return self._at(recv_tensor, self.raw.all_to_all_v)(
            src,
            whole,
            dst,
            room,
            code,
            *sends,
            *recvs,
            async_op=async_op,
            keep=keep,
        )

    def alltoall_v_inplace(
        self, tensor: torch.Tensor, counts: Sequence[int], displs: Sequence[int], *, async_op: bool = False
    ) -> Handle | None:
        """:func:`alltoall_v` in place: the elements from rank r replace those sent to rank r."""
        _, size, code, _, _ = found = seen(tensor, "tensor")
        both = _counts(counts, displs, size, self.nranks(), "tensor")
        dst = target(found, "tensor")
        return self._at(tensor, self.raw.all_to_all_v)(
            None, size, dst, size, code, *both, *both, async_op=async_op, keep=tensor
        )

    def barrier(self, *, async_op: bool = False) -> Handle | None:
        """Returns when every rank of the group has called it."""
        return self.raw.run(engine.BARRIER, None, None, 0, engine.DTYPES["uint8"], async_op=async_op)


def _coalesced(tensors: Sequence[torch.Tensor], async_op: bool, collective: Any) -> Handle | None:
    if not tensors:
        raise ValueError("tensors is empty")
    for i, tensor in enumerate(tensors):
        seen(tensor, f"tensors[{i}]")
    kinds = {tensor.dtype for tensor in tensors}
    if len(kinds) > 1:
        raise TypeError(f"tensors of different dtypes cannot be coalesced: {sorted(map(str, kinds))}")
    place = _place_of(tensors)
    with torch.no_grad():
        flat = flatten([tensor.detach() for tensor in tensors])

    def copy_back() -> None:
        with torch.no_grad():
            for tensor, piece in zip(tensors, unflatten(flat, tensors), strict=True):
                # torch 2.5 gives those without elements another shape.
                if tensor.numel() > 0:
                    tensor.copy_(piece)

    handle = collective(flat)
    if not async_op:
        copy_back()
        return None
    return handles.Handle([handle], copy_back) if place is None else place.handle(handle.raw, copy_back)


def _place_of(tensors: Sequence[torch.Tensor]) -> TensorPlace | None:
    """Where tensors are that are to be one; None for the host. NotImplementedError while their stream is captured."""
    places = {tensor.device for tensor in tensors}
    if len(places) > 1:
        raise TypeError(f"tensors in different places cannot be coalesced: {sorted(map(str, places))}")
    device = places.pop()
    if device.type != "cuda":
        return None
    from bagua.cuda import tensors as on_device

    on_device.refuse_capture(device)
    return on_device.TensorPlace(device)
