"""The collectives on tensors: arguments are checked here, before anything is sent, and go on by pointer.

``src`` and ``dst`` are ranks of the group. ``comm`` is what ``get_global_communicator()`` returns, or a process group,
or ``None`` for all ranks. On a rank that is not in the group every function returns without effect. ``async_op=True``
returns a handle with ``wait(timeout=None)``, ``then(callback)`` and ``is_completed()`` at once; the tensors must not be
touched until it is done.
"""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from bagua import engine

from . import groups
from .groups import AnyCommunicator, BaguaProcessGroup, Communicator, NonMember
from .operands import DTYPES as DTYPES
from .operands import ReduceOp as ReduceOp
from .operands import check_on_cpu as check_on_cpu
from .operands import check_op, look, part, same_dtype, seen, source, target
from .operands import dtype_code as dtype_code
from .utils import flatten, unflatten

# Codes of the verbs that the core does on plain tensors in one call: several times faster on small ones.
_ALL_REDUCE, _REDUCE, _BROADCAST, _ALL_GATHER, _REDUCE_SCATTER, _ALL_TO_ALL = 1, 2, 3, 4, 7, 8

Comm = AnyCommunicator | BaguaProcessGroup | None


class Handle(Protocol):
    """The outcome of an operation, now or later."""

    def wait(self, timeout: float | None = None) -> None:
        """Waits until it is done, or raises what went wrong; after ``timeout`` seconds BaguaTimeoutError."""

    def then(self, callback: Callable[[Exception | None], object], /) -> None:
        """Calls ``callback(error)`` once when it is done: ``error`` is ``None``, or what :meth:`wait` raises.

        The call happens here when it is done already, otherwise on a thread that calls the callbacks of all handles. An
        exception of the callback goes to ``sys.unraisablehook``.
        """

    def is_completed(self) -> bool:
        """True when it is done, well or not."""


class _Followed:
    """The handle of an operation whose results are copied to where they belong once it is done."""

    def __init__(self, handle: Handle, put_back: Callable[[], None]) -> None:
        self._handle = handle
        # None once it ran.
        self._put_back: Callable[[], None] | None = put_back
        self._lock = threading.Lock()

    def _finish(self) -> None:
        # Another thread that waits returns after the copy, too.
        with self._lock:
            put_back, self._put_back = self._put_back, None
            if put_back is not None:
                put_back()

    def wait(self, timeout: float | None = None) -> None:
        """As in :class:`Handle`; then copies the results, if no other thread did."""
        self._handle.wait(timeout)
        self._finish()

    def then(self, callback: Callable[[Exception | None], object], /) -> None:
        """As in :class:`Handle`; the results are copied before the call."""
        if not callable(callback):
            raise TypeError(f"{callback!r} is not callable")

        def finish(error: Exception | None) -> None:
            if error is None:
                try:
                    self._finish()
                except Exception as failure:
                    error = failure
            callback(error)

        self._handle.then(finish)

    def is_completed(self) -> bool:
        """True when the communication is done. The results are in place after :meth:`wait`."""
        return self._handle.is_completed()


def _require(send: int, recv: int, relation: str, right: bool) -> None:
    if not right:
        raise ValueError(f"send_tensor has {send} elements, recv_tensor {recv}: {relation}")


def _chunk(count: int, n: int) -> int:
    if count % n:
        raise ValueError(f"tensor has {count} elements, which {n} ranks cannot divide evenly")
    return count // n


def _room(room: int, count: int, n: int) -> None:
    if count < 0 or room < count * n:
        raise ValueError(f"tensor has {room} elements, count {count} for {n} ranks needs {count * n}")


def _member(comm: Comm) -> Communicator | None:
    if comm is None:
        if (world := groups.state.world) is not None:
            return world
        comm = groups._get_default_group()
    if isinstance(comm, BaguaProcessGroup):
        comm = comm.get_global_communicator()
    if isinstance(comm, NonMember):
        return None
    if not isinstance(comm, Communicator):
        raise TypeError(f"comm must be a communicator or a process group, not {type(comm).__name__}")
    return comm


def _peer(rank: int, comm: Communicator, what: str) -> int:
    if not 0 <= rank < comm.nranks():
        raise ValueError(f"{what} {rank} is not a rank of a group of {comm.nranks()}")
    return rank


def _absent(async_op: bool) -> Handle | None:
    return engine.Handle.completed() if async_op else None


def send(tensor: torch.Tensor, dst: int, comm: Comm = None, *, async_op: bool = False) -> Handle | None:
    """Sends a tensor to rank ``dst``, which must :func:`recv` as much."""
    if (c := _member(comm)) is None:
        return _absent(async_op)
    address, count, code, _, held = source(tensor, "tensor")
    return c.raw.send(address, count, code, _peer(dst, c, "dst"), async_op=async_op, keep=held)


def recv(tensor: torch.Tensor, src: int, comm: Comm = None, *, async_op: bool = False) -> Handle | None:
    """Receives into a tensor what rank ``src`` sends."""
    if (c := _member(comm)) is None:
        return _absent(async_op)
    src = _peer(src, c, "src")
    _, count, code, _, _ = found = seen(tensor, "tensor")
    return c.raw.recv(target(found, "tensor"), count, code, src, async_op=async_op, keep=tensor)


def broadcast(tensor: torch.Tensor, src: int = 0, comm: Comm = None, *, async_op: bool = False) -> Handle | None:
    """Every rank gets rank ``src``'s values, in place."""
    if (c := _member(comm)) is None:
        return _absent(async_op)
    if not async_op and c.raw.at_once(_BROADCAST, look, None, tensor, 0, src):
        return None
    src = _peer(src, c, "src")
    if c.rank() == src:
        address, count, code, shape, held = source(tensor, "tensor")
    else:
        _, count, code, shape, held = found = seen(tensor, "tensor")
        address = target(found, "tensor")
    return c.raw.broadcast(address, count, code, src, shape=shape, async_op=async_op, keep=held)


def _coalesced(tensors: Sequence[torch.Tensor], async_op: bool, verb: Any) -> Handle | None:
    if not tensors:
        raise ValueError("tensors is empty")
    for i, tensor in enumerate(tensors):
        seen(tensor, f"tensors[{i}]")
    kinds = {tensor.dtype for tensor in tensors}
    if len(kinds) > 1:
        raise TypeError(f"tensors of different dtypes cannot be coalesced: {sorted(map(str, kinds))}")
    with torch.no_grad():
        flat = flatten([tensor.detach() for tensor in tensors])

    def put_back() -> None:
        with torch.no_grad():
            for tensor, piece in zip(tensors, unflatten(flat, tensors), strict=True):
                tensor.copy_(piece)

    handle = verb(flat)
    if async_op:
        return _Followed(handle, put_back)
    put_back()
    return None


def broadcast_coalesced(
    tensors: Sequence[torch.Tensor], src: int = 0, comm: Comm = None, *, async_op: bool = False
) -> Handle | None:
    """:func:`broadcast` of several tensors of one dtype in one message."""
    if (c := _member(comm)) is None:
        return _absent(async_op)
    return _coalesced(tensors, async_op, lambda flat: broadcast(flat, src, c, async_op=async_op))


def broadcast_object(obj: Any, src: int = 0, comm: Comm = None) -> Any:
    """Every rank gets rank ``src``'s object, by pickle.

    The other ranks' ``obj`` is ignored; a non-member gets its own back.
    """
    if (c := _member(comm)) is None:
        return obj
    mine = c.rank() == _peer(src, c, "src")
    data = (
        torch.frombuffer(bytearray(pickle.dumps(obj)), dtype=torch.uint8) if mine else torch.empty(0, dtype=torch.uint8)
    )
    size = torch.tensor([data.numel()], dtype=torch.int64)
    broadcast(size, src, c)
    if not mine:
        data = torch.empty(int(size.item()), dtype=torch.uint8)
    broadcast(data, src, c)
    # Pickle is as safe as its sender: the members of a group have proved that they know the job's secret.
    return obj if mine else pickle.loads(data.numpy().tobytes())


def reduce(
    send_tensor: torch.Tensor,
    recv_tensor: torch.Tensor,
    dst: int,
    op: ReduceOp = ReduceOp.SUM,
    comm: Comm = None,
    *,
    async_op: bool = False,
) -> Handle | None:
    """Rank ``dst`` gets the combination of all in ``recv_tensor``, which the others keep as it is."""
    if (c := _member(comm)) is None:
        return _absent(async_op)
    if not async_op and c.raw.at_once(_REDUCE, look, send_tensor, recv_tensor, op, dst):
        return None
    return _reduction(c, send_tensor, recv_tensor, op, _peer(dst, c, "dst"), async_op)


def reduce_inplace(
    tensor: torch.Tensor, dst: int, op: ReduceOp = ReduceOp.SUM, comm: Comm = None, *, async_op: bool = False
) -> Handle | None:
    """:func:`reduce` in place; the tensors of the other ranks do not change."""
    if (c := _member(comm)) is None:
        return _absent(async_op)
    if not async_op and c.raw.at_once(_REDUCE, look, None, tensor, op, dst):
        return None
    return _reduction(c, None, tensor, op, _peer(dst, c, "dst"), async_op)


def allreduce(
    send_tensor: torch.Tensor,
    recv_tensor: torch.Tensor,
    op: ReduceOp = ReduceOp.SUM,
    comm: Comm = None,
    *,
    async_op: bool = False,
) -> Handle | None:
    """Every rank gets the combination of all in ``recv_tensor``."""
    if (c := _member(comm)) is None:
        return _absent(async_op)
    if not async_op and c.raw.at_once(_ALL_REDUCE, look, send_tensor, recv_tensor, op, 0):
        return None
    return _reduction(c, send_tensor, recv_tensor, op, None, async_op)


def allreduce_inplace(
    tensor: torch.Tensor, op: ReduceOp = ReduceOp.SUM, comm: Comm = None, *, async_op: bool = False
) -> Handle | None:
    """:func:`allreduce` in place."""
    if (c := _member(comm)) is None:
        return _absent(async_op)
    if not async_op and c.raw.at_once(_ALL_REDUCE, look, None, tensor, op, 0):
        return None
    return _reduction(c, None, tensor, op, None, async_op)


def _reduction(
    c: Communicator, send: torch.Tensor | None, recv: torch.Tensor, op: ReduceOp, root: int | None, async_op: bool
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
        same_dtype(code, other)
        _require(count, room, "they must be equal", count == room)
        number = check_op(op, code)
        dst = target(found, "recv_tensor")
        if src == dst:
            src = None
    keep = (held, recv)
    if root is not None:
        return c.raw.reduce(src, dst, count, code, number, root, shape=shape, async_op=async_op, keep=keep)
    return c.raw.all_reduce(src, dst, count, code, number, shape=shape, async_op=async_op, keep=keep)


def allreduce_coalesced_inplace(
    tensors: Sequence[torch.Tensor], op: ReduceOp = ReduceOp.SUM, comm: Comm = None, *, async_op: bool = False
) -> Handle | None:
    """:func:`allreduce_inplace` of several tensors of one dtype in one message."""
    if (c := _member(comm)) is None:
        return _absent(async_op)
    return _coalesced(tensors, async_op, lambda flat: allreduce_inplace(flat, op, c, async_op=async_op))


def allgather(
    send_tensor: torch.Tensor, recv_tensor: torch.Tensor, comm: Comm = None, *, async_op: bool = False
) -> Handle | None:
    """Every rank gets every rank's tensor, one after the other in ``recv_tensor``."""
    if (c := _member(comm)) is None:
        return _absent(async_op)
    if not async_op and c.raw.at_once(_ALL_GATHER, look, send_tensor, recv_tensor, 0, 0):
        return None
    n = c.nranks()
    address, count, code, _, held = source(send_tensor, "send_tensor")
    _, room, other, _, _ = found = seen(recv_tensor, "recv_tensor")
    same_dtype(code, other)
    _require(count, room, f"{n} ranks need {count * n} to receive", room == count * n)
    whole = target(found, "recv_tensor")
    mine = part(address, count, whole, c.rank(), code)
    return c.raw.all_gather(mine, whole, count, code, async_op=async_op, keep=(held, recv_tensor))


def allgather_inplace(tensor: torch.Tensor, comm: Comm = None, *, async_op: bool = False) -> Handle | None:
    """:func:`allgather` in place: rank r's chunk lies at r * (numel / nranks)."""
    if (c := _member(comm)) is None:
        return _absent(async_op)
    if not async_op and c.raw.at_once(_ALL_GATHER, look, None, tensor, 0, 0):
        return None
    _, room, code, _, _ = found = seen(tensor, "tensor")
    count = _chunk(room, c.nranks())
    return c.raw.all_gather(None, target(found, "tensor"), count, code, async_op=async_op, keep=tensor)


def gather(
    send_tensor: torch.Tensor, recv_tensor: torch.Tensor, dst: int, comm: Comm = None, *, async_op: bool = False
) -> Handle | None:
    """Rank ``dst`` gets every rank's tensor, one after the other in ``recv_tensor``, which the others keep as it is."""
    if (c := _member(comm)) is None:
        return _absent(async_op)
    address, count, code, _, held = source(send_tensor, "send_tensor")
    n, root = c.nranks(), _peer(dst, c, "dst")
    mine: int | None = address
    whole, keep = None, None
    if c.rank() == root:
        _, room, other, _, keep = found = seen(recv_tensor, "recv_tensor")
        same_dtype(code, other)
        _require(count, room, f"{n} ranks need {count * n} to receive", room == count * n)
        whole = target(found, "recv_tensor")
        mine = part(address, count, whole, root, code)
    return c.raw.gather(mine, whole, count, code, root, async_op=async_op, keep=(held, keep))


def gather_inplace(
    tensor: torch.Tensor, count: int, dst: int, comm: Comm = None, *, async_op: bool = False
) -> Handle | None:
    """:func:`gather` in place: rank r's ``count`` elements lie at r * count of its tensor."""
    if (c := _member(comm)) is None:
        return _absent(async_op)
    _, room, code, _, _ = found = seen(tensor, "tensor")
    root = _peer(dst, c, "dst")
    _room(room, count, c.nranks())
    return c.raw.gather(None, target(found, "tensor"), count, code, root, async_op=async_op, keep=tensor)


def scatter(
    send_tensor: torch.Tensor, recv_tensor: torch.Tensor, src: int, comm: Comm = None, *, async_op: bool = False
) -> Handle | None:
    """Rank r gets the r-th part of rank ``src``'s ``send_tensor``; the others' is ignored."""
    if (c := _member(comm)) is None:
        return _absent(async_op)
    _, count, code, _, _ = found = seen(recv_tensor, "recv_tensor")
    n, root = c.nranks(), _peer(src, c, "src")
    # Only the sender's is read; None would mean in place.
    address, held = 0, None
    if c.rank() == root:
        address, whole, other, _, held = source(send_tensor, "send_tensor")
        same_dtype(other, code)
        _require(whole, count, f"{n} ranks need {count * n} to send", whole == count * n)
    mine = target(found, "recv_tensor")
    return c.raw.scatter(address, mine, count, code, root, async_op=async_op, keep=(held, recv_tensor))


def scatter_inplace(
    tensor: torch.Tensor, count: int, src: int, comm: Comm = None, *, async_op: bool = False
) -> Handle | None:
    """:func:`scatter` in place: rank r's ``count`` elements lie at r * count, of the sender's tensor and of its own."""
    if (c := _member(comm)) is None:
        return _absent(async_op)
    _, room, code, _, _ = found = seen(tensor, "tensor")
    root = _peer(src, c, "src")
    _room(room, count, c.nranks())
    return c.raw.scatter(None, target(found, "tensor"), count, code, root, async_op=async_op, keep=tensor)


def reduce_scatter(
    send_tensor: torch.Tensor,
    recv_tensor: torch.Tensor,
    op: ReduceOp = ReduceOp.SUM,
    comm: Comm = None,
    *,
    async_op: bool = False,
) -> Handle | None:
    """Rank r gets the combination of every rank's r-th part."""
    if (c := _member(comm)) is None:
        return _absent(async_op)
    if not async_op and c.raw.at_once(_REDUCE_SCATTER, look, send_tensor, recv_tensor, op, 0):
        return None
    n = c.nranks()
    whole, room, code, _, held = source(send_tensor, "send_tensor")
    _, count, other, _, _ = found = seen(recv_tensor, "recv_tensor")
    same_dtype(code, other)
    _require(room, count, f"{n} ranks need {count * n} to send", room == count * n)
    number = check_op(op, code)
    mine = target(found, "recv_tensor")
    inside = part(mine, count, whole, c.rank(), code) is None
    src, dst = (None, whole) if inside else (whole, mine)
    return c.raw.reduce_scatter(src, dst, count, code, number, async_op=async_op, keep=(held, recv_tensor))


def reduce_scatter_inplace(
    tensor: torch.Tensor, op: ReduceOp = ReduceOp.SUM, comm: Comm = None, *, async_op: bool = False
) -> Handle | None:
    """:func:`reduce_scatter` in place: rank r's result lies at r * (numel / nranks)."""
    if (c := _member(comm)) is None:
        return _absent(async_op)
    if not async_op and c.raw.at_once(_REDUCE_SCATTER, look, None, tensor, op, 0):
        return None
    _, room, code, _, _ = found = seen(tensor, "tensor")
    count, number = _chunk(room, c.nranks()), check_op(op, code)
    return c.raw.reduce_scatter(None, target(found, "tensor"), count, code, number, async_op=async_op, keep=tensor)


def alltoall(
    send_tensor: torch.Tensor, recv_tensor: torch.Tensor, comm: Comm = None, *, async_op: bool = False
) -> Handle | None:
    """Rank r gets the r-th part of every rank's tensor, one after the other."""
    if (c := _member(comm)) is None:
        return _absent(async_op)
    if not async_op and c.raw.at_once(_ALL_TO_ALL, look, send_tensor, recv_tensor, 0, 0):
        return None
    src, whole, code, _, held = source(send_tensor, "send_tensor")
    _, room, other, _, _ = found = seen(recv_tensor, "recv_tensor")
    same_dtype(code, other)
    _require(whole, room, "they must be equal", whole == room)
    count = _chunk(whole, c.nranks())
    dst = target(found, "recv_tensor")
    return c.raw.all_to_all(src, dst, count, code, async_op=async_op, keep=(held, recv_tensor))


def alltoall_inplace(tensor: torch.Tensor, comm: Comm = None, *, async_op: bool = False) -> Handle | None:
    """:func:`alltoall` in place."""
    if (c := _member(comm)) is None:
        return _absent(async_op)
    if not async_op and c.raw.at_once(_ALL_TO_ALL, look, None, tensor, 0, 0):
        return None
    _, whole, code, _, _ = found = seen(tensor, "tensor")
    count = _chunk(whole, c.nranks())
    return c.raw.all_to_all(None, target(found, "tensor"), count, code, async_op=async_op, keep=tensor)


def _parts(counts: Sequence[int], displs: Sequence[int], numel: int, n: int, what: str) -> tuple[list[int], list[int]]:
    sizes, starts = [int(x) for x in counts], [int(x) for x in displs]
    if len(sizes) != n or len(starts) != n:
        raise ValueError(f"{what}: {len(sizes)} counts and {len(starts)} displacements for a group of {n}")
    for rank, (size, start) in enumerate(zip(sizes, starts, strict=True)):
        if size < 0 or start < 0 or start + size > numel:
            raise ValueError(f"{what}: {size} elements at {start} for rank {rank} do not fit in a tensor of {numel}")
    return sizes, starts


def alltoall_v(
    send_tensor: torch.Tensor,
    send_counts: Sequence[int],
    send_displs: Sequence[int],
    recv_tensor: torch.Tensor,
    recv_counts: Sequence[int],
    recv_displs: Sequence[int],
    comm: Comm = None,
    *,
    async_op: bool = False,
) -> Handle | None:
    """Rank r gets ``send_counts[r]`` elements from ``send_displs[r]`` of every rank, at its ``recv_displs``."""
    if (c := _member(comm)) is None:
        return _absent(async_op)
    n = c.nranks()
    src, whole, code, _, held = source(send_tensor, "send_tensor")
    _, room, other, _, _ = found = seen(recv_tensor, "recv_tensor")
    same_dtype(code, other)
    sends = _parts(send_counts, send_displs, whole, n, "send_tensor")
    recvs = _parts(recv_counts, recv_displs, room, n, "recv_tensor")
    dst = target(found, "recv_tensor")
    return c.raw.all_to_all_v(src, whole, dst, room, code, *sends, *recvs, async_op=async_op, keep=(held, recv_tensor))


def alltoall_v_inplace(
    tensor: torch.Tensor, counts: Sequence[int], displs: Sequence[int], comm: Comm = None, *, async_op: bool = False
) -> Handle | None:
    """:func:`alltoall_v` in place: what came from rank r replaces what went to it."""
    if (c := _member(comm)) is None:
        return _absent(async_op)
    _, size, code, _, _ = found = seen(tensor, "tensor")
    parts = _parts(counts, displs, size, c.nranks(), "tensor")
    dst = target(found, "tensor")
    return c.raw.all_to_all_v(None, size, dst, size, code, *parts, *parts, async_op=async_op, keep=tensor)


def barrier(comm: Comm = None, *, async_op: bool = False) -> Handle | None:
    """Returns when every rank of the group has called it."""
    if (c := _member(comm)) is None:
        return _absent(async_op)
    return c.raw.barrier(async_op=async_op)
