"""The collectives on the default group, or on the communicator or process group that is their ``comm``.

On a rank outside the group every collective returns without effect. The method of :class:`Communicator` of the same
name gets each one's text, which is written here alone: this is where an editor shows it to who calls one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from bagua.errors import BaguaError

from .process_group import AnyCommunicator, Communicator, Handle, NonMember, ProcessGroup, ReduceOp
from .process_group.state import group_state as _state

__all__ = [
    "allgather",
    "allgather_inplace",
    "allreduce",
    "allreduce_coalesced_inplace",
    "allreduce_inplace",
    "alltoall",
    "alltoall_inplace",
    "alltoall_v",
    "alltoall_v_inplace",
    "barrier",
    "broadcast",
    "broadcast_coalesced",
    "broadcast_object",
    "gather",
    "gather_inplace",
    "recv",
    "reduce",
    "reduce_inplace",
    "reduce_scatter",
    "reduce_scatter_inplace",
    "scatter",
    "scatter_inplace",
    "send",
]

Comm = AnyCommunicator | ProcessGroup | None


def default_group() -> ProcessGroup:
    """The default group. BaguaError without one."""
    if _state.default_group is None:
        raise BaguaError("there is no process group yet: call bagua.torch_api.init_process_group() first")
    return _state.default_group


def default_communicator() -> Communicator:
    """That of the default group. BaguaError without one."""
    world = default_group().get_global_communicator()
    assert isinstance(world, Communicator)
    return world


# Each function names the default communicator itself: a call of a function for it costs 4 % of a small collective.


def _of(comm: AnyCommunicator | ProcessGroup) -> AnyCommunicator:
    """The communicator of a process group."""
    if isinstance(comm, ProcessGroup):
        return comm.get_global_communicator()
    if not isinstance(comm, (Communicator, NonMember)):
        raise TypeError(f"comm must be a communicator or a process group, not {type(comm).__name__}")
    return comm


def send(tensor: torch.Tensor, dst: int, comm: Comm = None, *, async_op: bool = False) -> Handle | None:
    """Sends a tensor to rank ``dst``, which must receive as many elements."""
    return (_state.world or default_communicator() if comm is None else _of(comm)).send(tensor, dst, async_op=async_op)


def recv(tensor: torch.Tensor, src: int, comm: Comm = None, *, async_op: bool = False) -> Handle | None:
    """Receives a tensor from rank ``src``: its next message, beside the collectives of the group."""
    return (_state.world or default_communicator() if comm is None else _of(comm)).recv(tensor, src, async_op=async_op)


def broadcast(tensor: torch.Tensor, src: int = 0, comm: Comm = None, *, async_op: bool = False) -> Handle | None:
    """Every rank gets rank ``src``'s values, in place: ``tensor`` has one size and dtype on all ranks.

    Dtypes, ``async_op`` and errors are as in :func:`allreduce`.
    """
    return (_state.world or default_communicator() if comm is None else _of(comm)).broadcast(
        tensor, src, async_op=async_op
    )


def broadcast_coalesced(
    tensors: Sequence[torch.Tensor], src: int = 0, comm: Comm = None, *, async_op: bool = False
) -> Handle | None:
    """:func:`broadcast` of several tensors of one dtype in one message."""
    return (_state.world or default_communicator() if comm is None else _of(comm)).broadcast_coalesced(
        tensors, src, async_op=async_op
    )


def broadcast_object(obj: Any, src: int = 0, comm: Comm = None) -> Any:
    """Every rank gets rank ``src``'s object, by pickle. Unpickling runs what that rank has put in it.

    The other ranks' ``obj`` is ignored; on a rank outside the group it is returned. Errors are those of
    :func:`bagua.broadcast_object`: PeerRaisedError where rank ``src`` cannot pickle its object, which raises why.
    """
    return (_state.world or default_communicator() if comm is None else _of(comm)).broadcast_object(obj, src)


def reduce(
    send_tensor: torch.Tensor,
    recv_tensor: torch.Tensor,
    dst: int,
    op: ReduceOp = ReduceOp.SUM,
    comm: Comm = None,
    *,
    async_op: bool = False,
) -> Handle | None:
    """Rank ``dst`` gets the reduction of all ranks' tensors in ``recv_tensor``; the others' is not written.

    Sizes, dtypes, ``op``, ``async_op`` and errors are as in :func:`allreduce`.
    """
    return (_state.world or default_communicator() if comm is None else _of(comm)).reduce(
        send_tensor, recv_tensor, dst, op, async_op=async_op
    )


def reduce_inplace(
    tensor: torch.Tensor, dst: int, op: ReduceOp = ReduceOp.SUM, comm: Comm = None, *, async_op: bool = False
) -> Handle | None:
    """:func:`reduce` in place; the tensors of the other ranks do not change."""
    return (_state.world or default_communicator() if comm is None else _of(comm)).reduce_inplace(
        tensor, dst, op, async_op=async_op
    )


def allreduce(
    send_tensor: torch.Tensor,
    recv_tensor: torch.Tensor,
    op: ReduceOp = ReduceOp.SUM,
    comm: Comm = None,
    *,
    async_op: bool = False,
) -> Handle | None:
    """Every rank gets the reduction of all ranks' tensors in ``recv_tensor``, whose elements are overwritten.

    Both tensors have one number of elements and one dtype on all ranks (float16, bfloat16, float32, float64, complex64,
    complex128, bool, or integers of 8 to 64 bits), on the host or on one CUDA device; ``send_tensor`` keeps its
    elements. ``op``: sum by default; TypeError where it is not defined for the dtype.

    Returns ``None`` when it is done. With ``async_op`` a handle at once, with ``wait(timeout=None)``,
    ``then(callback)`` and ``is_completed()``; the tensors must not be read or written until it is done.

    ValueError and TypeError for arguments that cannot be used, before anything is sent. Then MismatchError where
    ranks disagree, BaguaTimeoutError, PeerLostError, PeerRaisedError or AbortedError, which end the group.
    """
    return (_state.world or default_communicator() if comm is None else _of(comm)).allreduce(
        send_tensor, recv_tensor, op, async_op=async_op
    )


def allreduce_inplace(
    tensor: torch.Tensor, op: ReduceOp = ReduceOp.SUM, comm: Comm = None, *, async_op: bool = False
) -> Handle | None:
    """:func:`allreduce` in place."""
    return (_state.world or default_communicator() if comm is None else _of(comm)).allreduce_inplace(
        tensor, op, async_op=async_op
    )


def allreduce_coalesced_inplace(
    tensors: Sequence[torch.Tensor], op: ReduceOp = ReduceOp.SUM, comm: Comm = None, *, async_op: bool = False
) -> Handle | None:
    """:func:`allreduce_inplace` of several tensors of one dtype in one message."""
    return (_state.world or default_communicator() if comm is None else _of(comm)).allreduce_coalesced_inplace(
        tensors, op, async_op=async_op
    )


def allgather(
    send_tensor: torch.Tensor, recv_tensor: torch.Tensor, comm: Comm = None, *, async_op: bool = False
) -> Handle | None:
    """Every rank gets every rank's tensor, concatenated in rank order in ``recv_tensor``, which is overwritten.

    ``recv_tensor`` has as many times the elements of ``send_tensor`` as there are ranks.
    Dtypes, ``async_op`` and errors are as in :func:`allreduce`.
    """
    return (_state.world or default_communicator() if comm is None else _of(comm)).allgather(
        send_tensor, recv_tensor, async_op=async_op
    )


def allgather_inplace(tensor: torch.Tensor, comm: Comm = None, *, async_op: bool = False) -> Handle | None:
    """:func:`allgather` in place: rank r's shard lies at r * (numel / nranks)."""
    return (_state.world or default_communicator() if comm is None else _of(comm)).allgather_inplace(
        tensor, async_op=async_op
    )


def gather(
    send_tensor: torch.Tensor, recv_tensor: torch.Tensor, dst: int, comm: Comm = None, *, async_op: bool = False
) -> Handle | None:
    """Rank ``dst`` gets every rank's tensor, concatenated in ``recv_tensor``; the others' is not written.

    There it has as many times the elements of ``send_tensor`` as there are ranks.
    Dtypes, ``async_op`` and errors are as in :func:`allreduce`.
    """
    return (_state.world or default_communicator() if comm is None else _of(comm)).gather(
        send_tensor, recv_tensor, dst, async_op=async_op
    )


def gather_inplace(
    tensor: torch.Tensor, count: int, dst: int, comm: Comm = None, *, async_op: bool = False
) -> Handle | None:
    """:func:`gather` in place: rank r's ``count`` elements lie at r * count of its tensor."""
    return (_state.world or default_communicator() if comm is None else _of(comm)).gather_inplace(
        tensor, count, dst, async_op=async_op
    )


def scatter(
    send_tensor: torch.Tensor, recv_tensor: torch.Tensor, src: int, comm: Comm = None, *, async_op: bool = False
) -> Handle | None:
    """Rank r gets the r-th shard of rank ``src``'s ``send_tensor``; the others' is ignored.

    There it has as many times the elements of ``recv_tensor``, which is overwritten, as there are ranks.
    Dtypes, ``async_op`` and errors are as in :func:`allreduce`.
    """
    return (_state.world or default_communicator() if comm is None else _of(comm)).scatter(
        send_tensor, recv_tensor, src, async_op=async_op
    )


def scatter_inplace(
    tensor: torch.Tensor, count: int, src: int, comm: Comm = None, *, async_op: bool = False
) -> Handle | None:
    """:func:`scatter` in place: rank r's ``count`` elements lie at r * count, in the sender's tensor and in its
    own.
    """
    return (_state.world or default_communicator() if comm is None else _of(comm)).scatter_inplace(
        tensor, count, src, async_op=async_op
    )


def reduce_scatter(
    send_tensor: torch.Tensor,
    recv_tensor: torch.Tensor,
    op: ReduceOp = ReduceOp.SUM,
    comm: Comm = None,
    *,
    async_op: bool = False,
) -> Handle | None:
    """Rank r gets the reduction of every rank's r-th shard in ``recv_tensor``, whose elements are overwritten.

    ``send_tensor`` has as many times its elements as there are ranks. Dtypes, ``op``, ``async_op`` and errors are
    as in :func:`allreduce`.
    """
    return (_state.world or default_communicator() if comm is None else _of(comm)).reduce_scatter(
        send_tensor, recv_tensor, op, async_op=async_op
    )


def reduce_scatter_inplace(
    tensor: torch.Tensor, op: ReduceOp = ReduceOp.SUM, comm: Comm = None, *, async_op: bool = False
) -> Handle | None:
    """:func:`reduce_scatter` in place: rank r's result lies at r * (numel / nranks)."""
    return (_state.world or default_communicator() if comm is None else _of(comm)).reduce_scatter_inplace(
        tensor, op, async_op=async_op
    )


def alltoall(
    send_tensor: torch.Tensor, recv_tensor: torch.Tensor, comm: Comm = None, *, async_op: bool = False
) -> Handle | None:
    """Rank r gets the r-th shard of every rank's tensor, concatenated in rank order in ``recv_tensor``.

    Both tensors have one size on all ranks, a multiple of their number; ``recv_tensor`` is overwritten.
    Dtypes, ``async_op`` and errors are as in :func:`allreduce`.
    """
    return (_state.world or default_communicator() if comm is None else _of(comm)).alltoall(
        send_tensor, recv_tensor, async_op=async_op
    )


def alltoall_inplace(tensor: torch.Tensor, comm: Comm = None, *, async_op: bool = False) -> Handle | None:
    """:func:`alltoall` in place."""
    return (_state.world or default_communicator() if comm is None else _of(comm)).alltoall_inplace(
        tensor, async_op=async_op
    )


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
    return (_state.world or default_communicator() if comm is None else _of(comm)).alltoall_v(
        send_tensor, send_counts, send_displs, recv_tensor, recv_counts, recv_displs, async_op=async_op
    )


def alltoall_v_inplace(
    tensor: torch.Tensor, counts: Sequence[int], displs: Sequence[int], comm: Comm = None, *, async_op: bool = False
) -> Handle | None:
    """:func:`alltoall_v` in place: the elements from rank r replace those sent to rank r."""
    return (_state.world or default_communicator() if comm is None else _of(comm)).alltoall_v_inplace(
        tensor, counts, displs, async_op=async_op
    )


def barrier(comm: Comm = None, *, async_op: bool = False) -> Handle | None:
    """Returns when every rank of the group has called it."""
    return (_state.world or default_communicator() if comm is None else _of(comm)).barrier(async_op=async_op)


for _name in __all__:
    getattr(Communicator, _name).__doc__ = globals()[_name].__doc__
