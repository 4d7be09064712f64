"""The collectives on the default group, or on the communicator or process group that is their ``comm``.

On a rank outside the group every collective returns without effect. Each takes its text from the method of
:class:`Communicator` of the same name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

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
F = TypeVar("F", bound=Callable[..., Any])


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


def _documented(function: F) -> F:
    """Takes the text of the method of :class:`Communicator` that the function calls."""
    function.__doc__ = getattr(Communicator, function.__name__).__doc__
    return function


@_documented
def send(tensor: torch.Tensor, dst: int, comm: Comm = None, *, async_op: bool = False) -> Handle | None:
    return (_state.world or default_communicator() if comm is None else _of(comm)).send(tensor, dst, async_op=async_op)


@_documented
def recv(tensor: torch.Tensor, src: int, comm: Comm = None, *, async_op: bool = False) -> Handle | None:
    return (_state.world or default_communicator() if comm is None else _of(comm)).recv(tensor, src, async_op=async_op)


@_documented
def broadcast(tensor: torch.Tensor, src: int = 0, comm: Comm = None, *, async_op: bool = False) -> Handle | None:
    return (_state.world or default_communicator() if comm is None else _of(comm)).broadcast(
        tensor, src, async_op=async_op
    )


@_documented
def broadcast_coalesced(
    tensors: Sequence[torch.Tensor], src: int = 0, comm: Comm = None, *, async_op: bool = False
) -> Handle | None:
    return (_state.world or default_communicator() if comm is None else _of(comm)).broadcast_coalesced(
        tensors, src, async_op=async_op
    )


@_documented
def broadcast_object(obj: Any, src: int = 0, comm: Comm = None) -> Any:
    return (_state.world or default_communicator() if comm is None else _of(comm)).broadcast_object(obj, src)


@_documented
def reduce(
    send_tensor: torch.Tensor,
    recv_tensor: torch.Tensor,
    dst: int,
    op: ReduceOp = ReduceOp.SUM,
    comm: Comm = None,
    *,
    async_op: bool = False,
) -> Handle | None:
    return (_state.world or default_communicator() if comm is None else _of(comm)).reduce(
        send_tensor, recv_tensor, dst, op, async_op=async_op
    )


@_documented
def reduce_inplace(
    tensor: torch.Tensor, dst: int, op: ReduceOp = ReduceOp.SUM, comm: Comm = None, *, async_op: bool = False
) -> Handle | None:
    return (_state.world or default_communicator() if comm is None else _of(comm)).reduce_inplace(
        tensor, dst, op, async_op=async_op
    )


@_documented
def allreduce(
    send_tensor: torch.Tensor,
    recv_tensor: torch.Tensor,
    op: ReduceOp = ReduceOp.SUM,
    comm: Comm = None,
    *,
    async_op: bool = False,
) -> Handle | None:
    return (_state.world or default_communicator() if comm is None else _of(comm)).allreduce(
        send_tensor, recv_tensor, op, async_op=async_op
    )


@_documented
def allreduce_inplace(
    tensor: torch.Tensor, op: ReduceOp = ReduceOp.SUM, comm: Comm = None, *, async_op: bool = False
) -> Handle | None:
    return (_state.world or default_communicator() if comm is None else _of(comm)).allreduce_inplace(
        tensor, op, async_op=async_op
    )


@_documented
def allreduce_coalesced_inplace(
    tensors: Sequence[torch.Tensor], op: ReduceOp = ReduceOp.SUM, comm: Comm = None, *, async_op: bool = False
) -> Handle | None:
    return (_state.world or default_communicator() if comm is None else _of(comm)).allreduce_coalesced_inplace(
        tensors, op, async_op=async_op
    )


@_documented
def allgather(
    send_tensor: torch.Tensor, recv_tensor: torch.Tensor, comm: Comm = None, *, async_op: bool = False
) -> Handle | None:
    return (_state.world or default_communicator() if comm is None else _of(comm)).allgather(
        send_tensor, recv_tensor, async_op=async_op
    )


@_documented
def allgather_inplace(tensor: torch.Tensor, comm: Comm = None, *, async_op: bool = False) -> Handle | None:
    return (_state.world or default_communicator() if comm is None else _of(comm)).allgather_inplace(
        tensor, async_op=async_op
    )


@_documented
def gather(
    send_tensor: torch.Tensor, recv_tensor: torch.Tensor, dst: int, comm: Comm = None, *, async_op: bool = False
) -> Handle | None:
    return (_state.world or default_communicator() if comm is None else _of(comm)).gather(
        send_tensor, recv_tensor, dst, async_op=async_op
    )


@_documented
def gather_inplace(
    tensor: torch.Tensor, count: int, dst: int, comm: Comm = None, *, async_op: bool = False
) -> Handle | None:
    return (_state.world or default_communicator() if comm is None else _of(comm)).gather_inplace(
        tensor, count, dst, async_op=async_op
    )


@_documented
def scatter(
    send_tensor: torch.Tensor, recv_tensor: torch.Tensor, src: int, comm: Comm = None, *, async_op: bool = False
) -> Handle | None:
    return (_state.world or default_communicator() if comm is None else _of(comm)).scatter(
        send_tensor, recv_tensor, src, async_op=async_op
    )


@_documented
def scatter_inplace(
    tensor: torch.Tensor, count: int, src: int, comm: Comm = None, *, async_op: bool = False
) -> Handle | None:
    return (_state.world or default_communicator() if comm is None else _of(comm)).scatter_inplace(
        tensor, count, src, async_op=async_op
    )


@_documented
def reduce_scatter(
    send_tensor: torch.Tensor,
    recv_tensor: torch.Tensor,
    op: ReduceOp = ReduceOp.SUM,
    comm: Comm = None,
    *,
    async_op: bool = False,
) -> Handle | None:
    return (_state.world or default_communicator() if comm is None else _of(comm)).reduce_scatter(
        send_tensor, recv_tensor, op, async_op=async_op
    )


@_documented
def reduce_scatter_inplace(
    tensor: torch.Tensor, op: ReduceOp = ReduceOp.SUM, comm: Comm = None, *, async_op: bool = False
) -> Handle | None:
    return (_state.world or default_communicator() if comm is None else _of(comm)).reduce_scatter_inplace(
        tensor, op, async_op=async_op
    )


@_documented
def alltoall(
    send_tensor: torch.Tensor, recv_tensor: torch.Tensor, comm: Comm = None, *, async_op: bool = False
) -> Handle | None:
    return (_state.world or default_communicator() if comm is None else _of(comm)).alltoall(
        send_tensor, recv_tensor, async_op=async_op
    )


@_documented
def alltoall_inplace(tensor: torch.Tensor, comm: Comm = None, *, async_op: bool = False) -> Handle | None:
    return (_state.world or default_communicator() if comm is None else _of(comm)).alltoall_inplace(
        tensor, async_op=async_op
    )


@_documented
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
    return (_state.world or default_communicator() if comm is None else _of(comm)).alltoall_v(
        send_tensor, send_counts, send_displs, recv_tensor, recv_counts, recv_displs, async_op=async_op
    )


@_documented
def alltoall_v_inplace(
    tensor: torch.Tensor, counts: Sequence[int], displs: Sequence[int], comm: Comm = None, *, async_op: bool = False
) -> Handle | None:
    return (_state.world or default_communicator() if comm is None else _of(comm)).alltoall_v_inplace(
        tensor, counts, displs, async_op=async_op
    )


@_documented
def barrier(comm: Comm = None, *, async_op: bool = False) -> Handle | None:
    return (_state.world or default_communicator() if comm is None else _of(comm)).barrier(async_op=async_op)
