"""The collectives on tensors: arguments are checked here, before anything is sent, and go on by pointer.

``src`` and ``dst`` are ranks of the group. ``comm`` is what ``get_global_communicator()`` returns, or a process group,
or ``None`` for all ranks. On a rank that is not in the group every function returns without effect. ``async_op=True``
returns a handle with ``wait(timeout=None)`` and ``is_completed()`` at once; the tensors must not be touched until it is
done.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from enum import IntEnum
from typing import Any, Protocol

import torch

from .groups import AnyCommunicator, BaguaProcessGroup, Communicator, NonMember, _get_default_group
from .utils import flatten, unflatten


class ReduceOp(IntEnum):
    """How the elements of several ranks become one. The numbers are those of the original."""

    SUM = 0
    PRODUCT = 1
    MIN = 2
    MAX = 3
    BOR = 7
    BAND = 8
    BXOR = 9
    AVG = 10


#: What can travel, and the number by which the core knows it.
DTYPES: dict[torch.dtype, int] = {
    torch.float16: 0,
    torch.bfloat16: 1,
    torch.float32: 2,
    torch.float64: 3,
    torch.uint8: 4,
    torch.int8: 5,
    torch.int32: 6,
    torch.int64: 7,
    torch.bool: 8,
}

_BITWISE = (ReduceOp.BOR, ReduceOp.BAND, ReduceOp.BXOR)

Comm = AnyCommunicator | BaguaProcessGroup | None


class Handle(Protocol):
    """The outcome of an operation, now or later."""

    def wait(self, timeout: float | None = None) -> None:
        """Waits until it is done, or raises what went wrong; after ``timeout`` seconds BaguaTimeoutError."""

    def is_completed(self) -> bool:
        """True when it is done, well or not."""


class _Done:
    """The handle of an operation that had nothing to do."""

    def wait(self, timeout: float | None = None) -> None:
        """Returns at once."""

    def is_completed(self) -> bool:
        """True."""
        return True


class _Followed:
    """A handle with something left to do on the calling thread once it is done."""

    def __init__(self, handle: Handle, then: Any) -> None:
        self._handle = handle
        self._then = then

    def wait(self, timeout: float | None = None) -> None:
        """As in :class:`Handle`; then puts the results where they belong."""
        self._handle.wait(timeout)
        then, self._then = self._then, None
        if then is not None:
            then()

    def is_completed(self) -> bool:
        """True when the communication is done. The results are in place after :meth:`wait`."""
        return self._handle.is_completed()


def dtype_code(tensor: torch.Tensor, what: str) -> int:
    """The core's number for a tensor's element type."""
    code = DTYPES.get(tensor.dtype)
    if code is None:
        known = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
        raise TypeError(f"{what} has dtype {tensor.dtype}, which cannot be communicated; these can: {known}")
    return code


def check_on_cpu(tensor: torch.Tensor, what: str) -> None:
    """Refuses what does not lie in this process's ordinary memory."""
    if tensor.device.type != "cpu":
        raise NotImplementedError(f"{what} is on {tensor.device}: only CPU tensors can be communicated yet")
    if tensor.layout != torch.strided:
        raise NotImplementedError(f"{what} is {tensor.layout}: only dense tensors can be communicated yet")


def _check(tensor: torch.Tensor, what: str) -> int:
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{what} must be a torch.Tensor, not {type(tensor).__name__}")
    check_on_cpu(tensor, what)
    return dtype_code(tensor, what)


def _source(tensor: torch.Tensor, what: str) -> torch.Tensor:
    _check(tensor, what)
    # Strides do not travel, nor does a negation that torch has put off; a copy is what anybody would make of such a
    # tensor before sending it.
    return tensor.detach().contiguous().resolve_neg()


def _target(tensor: torch.Tensor, what: str) -> torch.Tensor:
    _check(tensor, what)
    if not tensor.is_contiguous():
        raise ValueError(
            f"{what} of shape {list(tensor.shape)} is not contiguous, so results cannot be written into it"
        )
    if tensor.is_neg():
        raise ValueError(f"{what} is the negation of another tensor, so results cannot be written into it")
    # Autograd must learn that values which it may have saved are about to change.
    torch.autograd.graph.increment_version(tensor)
    return tensor


def _same_dtype(send: torch.Tensor, recv: torch.Tensor) -> None:
    _check(recv, "recv_tensor")
    if send.dtype != recv.dtype:
        raise TypeError(f"send_tensor has dtype {send.dtype}, recv_tensor {recv.dtype}: they must be equal")


def _require(send: int, recv: int, relation: str, right: bool) -> None:
    if not right:
        raise ValueError(f"send_tensor has {send} elements, recv_tensor {recv}: {relation}")


def _part(part: torch.Tensor, whole: torch.Tensor, rank: int) -> int | None:
    """The part's address; None, which is in place for the core, where it is rank ``rank``'s part of ``whole`` itself.

    Whoever gives such a pair means what NCCL does with it.
    """
    place = whole.data_ptr() + rank * part.numel() * part.element_size()
    return None if part.numel() > 0 and part.data_ptr() == place else part.data_ptr()


def _chunk(tensor: torch.Tensor, n: int) -> int:
    if tensor.numel() % n:
        raise ValueError(f"tensor has {tensor.numel()} elements, which {n} ranks cannot divide evenly")
    return tensor.numel() // n


def _room(tensor: torch.Tensor, count: int, n: int) -> None:
    if count < 0 or tensor.numel() < count * n:
        raise ValueError(f"tensor has {tensor.numel()} elements, count {count} for {n} ranks needs {count * n}")


def check_op(op: ReduceOp | int, dtype: torch.dtype) -> int:
    """The core's number for a reduction, if it means something for this element type."""
    # An int, as torch.distributed's ReduceOp equals ours by number and means something else by it.
    if not isinstance(op, int):
        raise TypeError(f"op must be a bagua.torch_api.ReduceOp, not {op!r}")
    op = ReduceOp(op)
    floating = dtype.is_floating_point
    if (
        (op is ReduceOp.AVG and not floating)
        or (op is ReduceOp.SUM and dtype is torch.bool)
        or (op in _BITWISE and floating)
    ):
        raise TypeError(f"{op.name} of {str(dtype).removeprefix('torch.')} is not defined")
    return int(op)


def _member(comm: Comm) -> Communicator | None:
    if comm is None:
        comm = _get_default_group()
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
    return _Done() if async_op else None


def send(tensor: torch.Tensor, dst: int, comm: Comm = None, *, async_op: bool = False) -> Handle | None:
    """Sends a tensor to rank ``dst``, which must :func:`recv` as much."""
    if (c := _member(comm)) is None:
        return _absent(async_op)
    t = _source(tensor, "tensor")
    return c.raw.send(t.data_ptr(), t.numel(), DTYPES[t.dtype], _peer(dst, c, "dst"), async_op=async_op, keep=t)


def recv(tensor: torch.Tensor, src: int, comm: Comm = None, *, async_op: bool = False) -> Handle | None:
    """Receives into a tensor what rank ``src`` sends."""
    if (c := _member(comm)) is None:
        return _absent(async_op)
    src = _peer(src, c, "src")
    t = _target(tensor, "tensor")
    return c.raw.recv(t.data_ptr(), t.numel(), DTYPES[t.dtype], src, async_op=async_op, keep=t)


def broadcast(tensor: torch.Tensor, src: int = 0, comm: Comm = None, *, async_op: bool = False) -> Handle | None:
    """Every rank gets rank ``src``'s values, in place."""
    if (c := _member(comm)) is None:
        return _absent(async_op)
    src = _peer(src, c, "src")
    t = _source(tensor, "tensor") if c.rank() == src else _target(tensor, "tensor")
    return c.raw.broadcast(
        t.data_ptr(), t.numel(), DTYPES[t.dtype], src, shape=tuple(t.shape), async_op=async_op, keep=t
    )


def _coalesced(tensors: Sequence[torch.Tensor], async_op: bool, verb: Any) -> Handle | None:
    if not tensors:
        raise ValueError("tensors is empty")
    for i, tensor in enumerate(tensors):
        _check(tensor, f"tensors[{i}]")
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
    return _reduction(c, send_tensor, recv_tensor, op, _peer(dst, c, "dst"), async_op)


def reduce_inplace(
    tensor: torch.Tensor, dst: int, op: ReduceOp = ReduceOp.SUM, comm: Comm = None, *, async_op: bool = False
) -> Handle | None:
    """:func:`reduce` in place; the tensors of the other ranks do not change."""
    if (c := _member(comm)) is None:
        return _absent(async_op)
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
    return _reduction(c, send_tensor, recv_tensor, op, None, async_op)


def allreduce_inplace(
    tensor: torch.Tensor, op: ReduceOp = ReduceOp.SUM, comm: Comm = None, *, async_op: bool = False
) -> Handle | None:
    """:func:`allreduce` in place."""
    if (c := _member(comm)) is None:
        return _absent(async_op)
    return _reduction(c, None, tensor, op, None, async_op)


def _reduction(
    c: Communicator, send: torch.Tensor | None, recv: torch.Tensor, op: ReduceOp, root: int | None, async_op: bool
) -> Handle | None:
    source = None if send is None else _source(send, "send_tensor")
    if source is None:
        _check(recv, "tensor")
    else:
        _same_dtype(source, recv)
        _require(source.numel(), recv.numel(), "they must be equal", source.numel() == recv.numel())
    code = check_op(op, recv.dtype)
    target = _target(recv, "tensor" if send is None else "recv_tensor")
    if source is not None and source.data_ptr() == target.data_ptr():
        source = None
    pointers = (None if source is None else source.data_ptr(), target.data_ptr(), target.numel(), DTYPES[target.dtype])
    shape, keep = tuple((target if source is None else source).shape), (source, target)
    if root is None:
        return c.raw.all_reduce(*pointers, code, shape=shape, async_op=async_op, keep=keep)
    return c.raw.reduce(*pointers, code, root, shape=shape, async_op=async_op, keep=keep)


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
    source, n = _source(send_tensor, "send_tensor"), c.nranks()
    _same_dtype(source, recv_tensor)
    count, room = source.numel(), recv_tensor.numel()
    _require(count, room, f"{n} ranks need {count * n} to receive", room == count * n)
    target = _target(recv_tensor, "recv_tensor")
    mine = _part(source, target, c.rank())
    return c.raw.all_gather(
        mine, target.data_ptr(), count, DTYPES[source.dtype], async_op=async_op, keep=(source, target)
    )


def allgather_inplace(tensor: torch.Tensor, comm: Comm = None, *, async_op: bool = False) -> Handle | None:
    """:func:`allgather` in place: rank r's chunk lies at r * (numel / nranks)."""
    if (c := _member(comm)) is None:
        return _absent(async_op)
    code, count = _check(tensor, "tensor"), _chunk(tensor, c.nranks())
    target = _target(tensor, "tensor")
    return c.raw.all_gather(None, target.data_ptr(), count, code, async_op=async_op, keep=target)


def gather(
    send_tensor: torch.Tensor, recv_tensor: torch.Tensor, dst: int, comm: Comm = None, *, async_op: bool = False
) -> Handle | None:
    """Rank ``dst`` gets every rank's tensor, one after the other in ``recv_tensor``, which the others keep as it is."""
    if (c := _member(comm)) is None:
        return _absent(async_op)
    source, n, root = _source(send_tensor, "send_tensor"), c.nranks(), _peer(dst, c, "dst")
    count, target = source.numel(), None
    if c.rank() == root:
        _same_dtype(source, recv_tensor)
        room = recv_tensor.numel()
        _require(count, room, f"{n} ranks need {count * n} to receive", room == count * n)
        target = _target(recv_tensor, "recv_tensor")
    return c.raw.gather(
        source.data_ptr() if target is None else _part(source, target, c.rank()),
        None if target is None else target.data_ptr(),
        count,
        DTYPES[source.dtype],
        root,
        async_op=async_op,
        keep=(source, target),
    )


def gather_inplace(
    tensor: torch.Tensor, count: int, dst: int, comm: Comm = None, *, async_op: bool = False
) -> Handle | None:
    """:func:`gather` in place: rank r's ``count`` elements lie at r * count of its tensor."""
    if (c := _member(comm)) is None:
        return _absent(async_op)
    code, root = _check(tensor, "tensor"), _peer(dst, c, "dst")
    _room(tensor, count, c.nranks())
    target = _target(tensor, "tensor")
    return c.raw.gather(None, target.data_ptr(), count, code, root, async_op=async_op, keep=target)


def scatter(
    send_tensor: torch.Tensor, recv_tensor: torch.Tensor, src: int, comm: Comm = None, *, async_op: bool = False
) -> Handle | None:
    """Rank r gets the r-th part of rank ``src``'s ``send_tensor``; the others' is ignored."""
    if (c := _member(comm)) is None:
        return _absent(async_op)
    code, n, root = _check(recv_tensor, "recv_tensor"), c.nranks(), _peer(src, c, "src")
    count, source = recv_tensor.numel(), None
    if c.rank() == root:
        source = _source(send_tensor, "send_tensor")
        _same_dtype(source, recv_tensor)
        _require(source.numel(), count, f"{n} ranks need {count * n} to send", source.numel() == count * n)
    target = _target(recv_tensor, "recv_tensor")
    return c.raw.scatter(
        # Only the sender's is read; None would mean in place.
        0 if source is None else source.data_ptr(),
        target.data_ptr(),
        count,
        code,
        root,
        async_op=async_op,
        keep=(source, target),
    )


def scatter_inplace(
    tensor: torch.Tensor, count: int, src: int, comm: Comm = None, *, async_op: bool = False
) -> Handle | None:
    """:func:`scatter` in place: rank r's ``count`` elements lie at r * count, of the sender's tensor and of its own."""
    if (c := _member(comm)) is None:
        return _absent(async_op)
    code, root = _check(tensor, "tensor"), _peer(src, c, "src")
    _room(tensor, count, c.nranks())
    target = _target(tensor, "tensor")
    return c.raw.scatter(None, target.data_ptr(), count, code, root, async_op=async_op, keep=target)


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
    source, n = _source(send_tensor, "send_tensor"), c.nranks()
    _same_dtype(source, recv_tensor)
    count = recv_tensor.numel()
    _require(source.numel(), count, f"{n} ranks need {count * n} to send", source.numel() == count * n)
    code = check_op(op, source.dtype)
    target = _target(recv_tensor, "recv_tensor")
    inside = _part(target, source, c.rank()) is None
    return c.raw.reduce_scatter(
        None if inside else source.data_ptr(),
        source.data_ptr() if inside else target.data_ptr(),
        count,
        DTYPES[source.dtype],
        code,
        async_op=async_op,
        keep=(source, target),
    )


def reduce_scatter_inplace(
    tensor: torch.Tensor, op: ReduceOp = ReduceOp.SUM, comm: Comm = None, *, async_op: bool = False
) -> Handle | None:
    """:func:`reduce_scatter` in place: rank r's result lies at r * (numel / nranks)."""
    if (c := _member(comm)) is None:
        return _absent(async_op)
    dtype, count, code = _check(tensor, "tensor"), _chunk(tensor, c.nranks()), check_op(op, tensor.dtype)
    target = _target(tensor, "tensor")
    return c.raw.reduce_scatter(None, target.data_ptr(), count, dtype, code, async_op=async_op, keep=target)


def alltoall(
    send_tensor: torch.Tensor, recv_tensor: torch.Tensor, comm: Comm = None, *, async_op: bool = False
) -> Handle | None:
    """Rank r gets the r-th part of every rank's tensor, one after the other."""
    if (c := _member(comm)) is None:
        return _absent(async_op)
    source = _source(send_tensor, "send_tensor")
    _same_dtype(source, recv_tensor)
    _require(source.numel(), recv_tensor.numel(), "they must be equal", source.numel() == recv_tensor.numel())
    count = _chunk(source, c.nranks())
    target = _target(recv_tensor, "recv_tensor")
    return c.raw.all_to_all(
        source.data_ptr(), target.data_ptr(), count, DTYPES[source.dtype], async_op=async_op, keep=(source, target)
    )


def alltoall_inplace(tensor: torch.Tensor, comm: Comm = None, *, async_op: bool = False) -> Handle | None:
    """:func:`alltoall` in place."""
    if (c := _member(comm)) is None:
        return _absent(async_op)
    code, count = _check(tensor, "tensor"), _chunk(tensor, c.nranks())
    target = _target(tensor, "tensor")
    return c.raw.all_to_all(None, target.data_ptr(), count, code, async_op=async_op, keep=target)


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
    source, n = _source(send_tensor, "send_tensor"), c.nranks()
    _same_dtype(source, recv_tensor)
    sends = _parts(send_counts, send_displs, source.numel(), n, "send_tensor")
    recvs = _parts(recv_counts, recv_displs, recv_tensor.numel(), n, "recv_tensor")
    target = _target(recv_tensor, "recv_tensor")
    return c.raw.all_to_all_v(
        source.data_ptr(),
        source.numel(),
        target.data_ptr(),
        target.numel(),
        DTYPES[source.dtype],
        *sends,
        *recvs,
        async_op=async_op,
        keep=(source, target),
    )


def alltoall_v_inplace(
    tensor: torch.Tensor, counts: Sequence[int], displs: Sequence[int], comm: Comm = None, *, async_op: bool = False
) -> Handle | None:
    """:func:`alltoall_v` in place: what came from rank r replaces what went to it."""
    if (c := _member(comm)) is None:
        return _absent(async_op)
    code = _check(tensor, "tensor")
    parts = _parts(counts, displs, tensor.numel(), c.nranks(), "tensor")
    target, size = _target(tensor, "tensor"), tensor.numel()
    return c.raw.all_to_all_v(None, size, target.data_ptr(), size, code, *parts, *parts, async_op=async_op, keep=target)


def barrier(comm: Comm = None, *, async_op: bool = False) -> Handle | None:
    """Returns when every rank of the group has called it."""
    if (c := _member(comm)) is None:
        return _absent(async_op)
    return c.raw.barrier(async_op=async_op)
