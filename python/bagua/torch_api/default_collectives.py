"""Collectives on the default process group, or on the communicator or process group given as ``comm``.

On a rank outside the group, every collective returns without effect. Each method of :class:`Communicator` gets its
docstring from the function of the same name in this file.
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
    """Returns the default group. Raises BaguaError if there is none."""
    if _state.default_group is None:
        raise BaguaError("there is no process group yet: call bagua.torch_api.init_process_group() first")
    return _state.default_group


def default_communicator() -> Communicator:
    """Returns the communicator of the default group. Raises BaguaError if there is none."""
    world = default_group().get_global_communicator()
    assert isinstance(world, Communicator)
    return world


# The functions below repeat this expression because a function call for it costs 4 % of a small collective.


def _of(comm: AnyCommunicator | ProcessGroup) -> AnyCommunicator:
    if isinstance(comm, ProcessGroup):
        return comm.get_global_communicator()
    if not isinstance(comm, (Communicator, NonMember)):
        raise TypeError(f"comm must be a communicator or a process group, not {type(comm).__name__}")
    return comm


def send(tensor: torch.Tensor, dst: int, comm: Comm = None, *, async_op: bool = False) -> Handle | None:
    """Sends a tensor to rank ``dst``, which must receive the same number of elements.

    Dtypes, ``async_op`` and errors are as in :func:`allreduce`.
    """
    return (_state.world or default_communicator() if comm is None else _of(comm)).send(tensor, dst, async_op=async_op)


def recv(tensor: torch.Tensor, src: int, comm: Comm = None, *, async_op: bool = False) -> Handle | None:
    """Receives the next message from rank ``src`` into ``tensor``. Collectives do not change the order of messages.

    Dtypes, ``async_op`` and errors are as in :func:`allreduce`.
    """
    return (_state.world or default_communicator() if comm is None else _of(comm)).recv(tensor, src, async_op=async_op)


def broadcast(tensor: torch.Tensor, src: int = 0, comm: Comm = None, *, async_op: bool = False) -> Handle | None:
    """Copies rank ``src``'s tensor to all ranks, in place. ``tensor`` has the same size and dtype on all ranks.

    Dtypes, ``async_op`` and errors are as in :func:`allreduce`.
    """
    return (_state.world or default_communicator() if comm is None else _of(comm)).broadcast(
        tensor, src, async_op=async_op
    )


def broadcast_coalesced(
    tensors: Sequence[torch.Tensor], src: int = 0, comm: Comm = None, *, async_op: bool = False
) -> Handle | None:
    """Broadcasts several tensors of one dtype in one message. Otherwise like :func:`broadcast`."""
    return (_state.world or default_communicator() if comm is None else _of(comm)).broadcast_coalesced(
        tensors, src, async_op=async_op
    )


def broadcast_object(obj: Any, src: int = 0, comm: Comm = None) -> Any:
    """Returns rank ``src``'s object on all ranks, sent as a pickle. Unpickling runs code that rank ``src`` chose.

    ``obj`` is ignored on other ranks of the group. A rank outside the group gets its own ``obj`` back. If rank ``src``
    cannot pickle its object, it raises the reason and the other ranks raise PeerRaisedError. Other errors are as in
    :func:`bagua.broadcast_object`.
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
    """Reduces all ranks' ``send_tensor`` into ``recv_tensor`` on rank ``dst``. On other ranks ``recv_tensor`` is not
    written.

    Sizes, dtypes, ``op``, ``async_op`` and errors are as in :func:`allreduce`.
    """
    return (_state.world or default_communicator() if comm is None else _of(comm)).reduce(
        send_tensor, recv_tensor, dst, op, async_op=async_op
    )


def reduce_inplace(
    tensor: torch.Tensor, dst: int, op: ReduceOp = ReduceOp.SUM, comm: Comm = None, *, async_op: bool = False
) -> Handle | None:
    """Reduces all ranks' tensors into ``tensor`` on rank ``dst``. The tensors of other ranks do not change.

    Otherwise like :func:`reduce`.
    """
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
    """Reduces all ranks' ``send_tensor`` element by element, and writes the result to ``recv_tensor`` on every rank.

    Both tensors have the same number of elements and the same dtype on all ranks: float16, bfloat16, float32, float64,
    complex64, complex128, bool, or integers of 8 to 64 bits. They are on the host or on one CUDA device.
    ``send_tensor`` does not change. ``op`` is a sum by default; TypeError is raised if it is not defined for the dtype.

    Returns None when the result is there. With ``async_op=True`` returns a handle at once, with ``wait(timeout=None)``,
    ``then(callback)`` and ``is_completed()``. Do not read or write the tensors until the operation has completed.

    Raises ValueError or TypeError for unusable arguments, before anything is sent. Raises MismatchError if ranks
    disagree, or BaguaTimeoutError, PeerLostError, PeerRaisedError or AbortedError. These errors end the group.
    """
    return (_state.world or default_communicator() if comm is None else _of(comm)).allreduce(
        send_tensor, recv_tensor, op, async_op=async_op
    )


def allreduce_inplace(
    tensor: torch.Tensor, op: ReduceOp = ReduceOp.SUM, comm: Comm = None, *, async_op: bool = False
) -> Handle | None:
    """Reduces all ranks' ``tensor`` element by element, in place on every rank. Otherwise like :func:`allreduce`."""
    return (_state.world or default_communicator() if comm is None else _of(comm)).allreduce_inplace(
        tensor, op, async_op=async_op
    )


def allreduce_coalesced_inplace(
    tensors: Sequence[torch.Tensor], op: ReduceOp = ReduceOp.SUM, comm: Comm = None, *, async_op: bool = False
) -> Handle | None:
    """Reduces several tensors of one dtype in one message, in place. Otherwise like :func:`allreduce`."""
    return (_state.world or default_communicator() if comm is None else _of(comm)).allreduce_coalesced_inplace(
        tensors, op, async_op=async_op
    )


def allgather(
    send_tensor: torch.Tensor, recv_tensor: torch.Tensor, comm: Comm = None, *, async_op: bool = False
) -> Handle | None:
    """Concatenates all ranks' ``send_tensor`` in rank order, and writes the result to ``recv_tensor`` on every rank.

    ``recv_tensor`` has the number of elements of ``send_tensor`` times the number of ranks. Dtypes, ``async_op`` and
    errors are as in :func:`allreduce`.
    """
    return (_state.world or default_communicator() if comm is None else _of(comm)).allgather(
        send_tensor, recv_tensor, async_op=async_op
    )


def allgather_inplace(tensor: torch.Tensor, comm: Comm = None, *, async_op: bool = False) -> Handle | None:
    """Gathers one shard of every rank, in place. Rank r's shard begins at element ``r * (tensor.numel() / nranks)``.

    Otherwise like :func:`allgather`.
    """
    return (_state.world or default_communicator() if comm is None else _of(comm)).allgather_inplace(
        tensor, async_op=async_op
    )


def gather(
    send_tensor: torch.Tensor, recv_tensor: torch.Tensor, dst: int, comm: Comm = None, *, async_op: bool = False
) -> Handle | None:
    """Concatenates all ranks' ``send_tensor`` in rank order into ``recv_tensor`` on rank ``dst``.

    On rank ``dst``, ``recv_tensor`` has the number of elements of ``send_tensor`` times the number of ranks. On other
    ranks ``recv_tensor`` is not written. Dtypes, ``async_op`` and errors are as in :func:`allreduce`.
    """
    return (_state.world or default_communicator() if comm is None else _of(comm)).gather(
        send_tensor, recv_tensor, dst, async_op=async_op
    )


def gather_inplace(
    tensor: torch.Tensor, count: int, dst: int, comm: Comm = None, *, async_op: bool = False
) -> Handle | None:
    """Gathers ``count`` elements of every rank in rank ``dst``'s tensor, in place.

    Rank r's elements begin at element ``r * count``, both in its own tensor and in rank ``dst``'s. Otherwise like
    :func:`gather`.
    """
    return (_state.world or default_communicator() if comm is None else _of(comm)).gather_inplace(
        tensor, count, dst, async_op=async_op
    )


def scatter(
    send_tensor: torch.Tensor, recv_tensor: torch.Tensor, src: int, comm: Comm = None, *, async_op: bool = False
) -> Handle | None:
    """Splits rank ``src``'s ``send_tensor`` into one shard per rank, and writes shard r to rank r's ``recv_tensor``.

    On rank ``src``, ``send_tensor`` has the number of elements of ``recv_tensor`` times the number of ranks. On other
    ranks ``send_tensor`` is ignored. Dtypes, ``async_op`` and errors are as in :func:`allreduce`.
    """
    return (_state.world or default_communicator() if comm is None else _of(comm)).scatter(
        send_tensor, recv_tensor, src, async_op=async_op
    )


def scatter_inplace(
    tensor: torch.Tensor, count: int, src: int, comm: Comm = None, *, async_op: bool = False
) -> Handle | None:
    """Scatters ``count`` elements to every rank from rank ``src``'s tensor, in place.

    Rank r's elements begin at element ``r * count``, both in rank ``src``'s tensor and in its own. Otherwise like
    :func:`scatter`.
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
    """Reduces all ranks' ``send_tensor`` element by element, and writes shard r of the result to rank r's
    ``recv_tensor``.

    ``send_tensor`` has the number of elements of ``recv_tensor`` times the number of ranks. Dtypes, ``op``,
    ``async_op`` and errors are as in :func:`allreduce`.
    """
    return (_state.world or default_communicator() if comm is None else _of(comm)).reduce_scatter(
        send_tensor, recv_tensor, op, async_op=async_op
    )


def reduce_scatter_inplace(
    tensor: torch.Tensor, op: ReduceOp = ReduceOp.SUM, comm: Comm = None, *, async_op: bool = False
) -> Handle | None:
    """Reduces and scatters in place. Rank r's result begins at element ``r * (tensor.numel() / nranks)``.

    Otherwise like :func:`reduce_scatter`.
    """
    return (_state.world or default_communicator() if comm is None else _of(comm)).reduce_scatter_inplace(
        tensor, op, async_op=async_op
    )


def alltoall(
    send_tensor: torch.Tensor, recv_tensor: torch.Tensor, comm: Comm = None, *, async_op: bool = False
) -> Handle | None:
    """Sends shard r of ``send_tensor`` to rank r, and concatenates the shards received in rank order in
    ``recv_tensor``.

    Both tensors have the same size on all ranks, a multiple of the number of ranks. Dtypes, ``async_op`` and errors are
    as in :func:`allreduce`.
    """
    return (_state.world or default_communicator() if comm is None else _of(comm)).alltoall(
        send_tensor, recv_tensor, async_op=async_op
    )


def alltoall_inplace(tensor: torch.Tensor, comm: Comm = None, *, async_op: bool = False) -> Handle | None:
    """Exchanges shards in place: the shard from rank r replaces the shard sent to it. See :func:`alltoall`."""
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
    """Sends a different number of elements to each rank, and receives a different number from each.

    ``send_counts[r]`` elements, beginning at ``send_displs[r]`` of ``send_tensor``, go to rank r. ``recv_counts[r]``
    elements from rank r are written to ``recv_tensor``, beginning at ``recv_displs[r]``. All four lists have one entry
    per rank and count elements. Dtypes, ``async_op`` and errors are as in :func:`allreduce`.
    """
    return (_state.world or default_communicator() if comm is None else _of(comm)).alltoall_v(
        send_tensor, send_counts, send_displs, recv_tensor, recv_counts, recv_displs, async_op=async_op
    )


def alltoall_v_inplace(
    tensor: torch.Tensor, counts: Sequence[int], displs: Sequence[int], comm: Comm = None, *, async_op: bool = False
) -> Handle | None:
    """Exchanges different numbers of elements in place: the elements from rank r replace those sent to rank r.

    ``counts[r]`` elements for rank r begin at element ``displs[r]``. Otherwise like :func:`alltoall_v`.
    """
    return (_state.world or default_communicator() if comm is None else _of(comm)).alltoall_v_inplace(
        tensor, counts, displs, async_op=async_op
    )


def barrier(comm: Comm = None, *, async_op: bool = False) -> Handle | None:
    """Blocks until every rank of the group has called this function. ``async_op=True`` returns a handle at once."""
    return (_state.world or default_communicator() if comm is None else _of(comm)).barrier(async_op=async_op)


for _name in __all__:
    getattr(Communicator, _name).__doc__ = globals()[_name].__doc__
