"""The verbs as functions on the default group: each is the method of `Group` of the same name.

Made from the methods by tests/unit/test_default_group.py, so that readers of the sources find signatures and texts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, overload

from bagua import group
from bagua.arrays import Array, ArrayT, ResultT
from bagua.collectives import Op
from bagua.handle import Handle
from bagua.messages import Options

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = [
    "all_gather",
    "all_reduce",
    "all_to_all",
    "all_to_all_v",
    "barrier",
    "broadcast",
    "exchange",
    "gather",
    "recv",
    "reduce",
    "reduce_scatter",
    "scatter",
    "send",
]

# Of any type, because no overload of a verb takes a bool.
_default: Callable[[], Any] = partial(group.default, required=True)


@overload
def all_reduce(
    x: ArrayT,
    op: Op = "sum",
    *,
    out: ArrayT | None = None,
    async_op: Literal[False] = False,
    **options: Unpack[Options],
) -> ArrayT: ...
@overload
def all_reduce(
    x: ArrayT, op: Op = "sum", *, out: ArrayT | None = None, async_op: Literal[True], **options: Unpack[Options]
) -> Handle[ArrayT]: ...
def all_reduce(
    x: ArrayT,
    op: Op = "sum",
    *,
    out: ArrayT | None = None,
    async_op: bool = False,
    timeout: float | None = None,
    stream: int | None = None,
) -> Any:
    """Combines all ranks' arrays, element by element in rank order; every rank gets the result.

    `x`: a NumPy array, or anything with DLPack or the buffer protocol, of any shape, which is equal on all ranks.
    Its elements are float16, bfloat16, float32, float64, int8, uint8, int32, int64, bool, complex64 or complex128.
    They are overwritten by the result unless `out` is given.

    `op`: "sum" (no bool), "avg" (float and complex), "min", "max" (no complex), "product", "band", "bor" or "bxor"
    (integers and bool). Half-precision sums are accumulated in float32.

    `out`: a writable array of the same shape, type and device for the result; `x` then keeps its elements, and may
    be read-only or strided.

    `async_op`: return a `Handle` at once. Its `wait()` returns the result; until then the arrays must not be
    read or written.

    `timeout`: seconds, else BaguaTimeoutError; None: the group's.

    `stream`: of arrays on a CUDA device, a CUstream as an integer by DLPack's numbers; None is the legacy stream.
    The verb begins after the work that the stream has, and work that it gets afterwards sees the result. Without
    effect on the host.

    Returns `out`, or `x` without it. Every rank of the group calls it, in the same order as its other verbs.

    Raises TypeError or ValueError for arguments that cannot be used, before anything is sent. Then MismatchError
    where ranks disagree, BaguaTimeoutError, PeerLostError, PeerRaisedError or AbortedError; the group can only be
    left afterwards.
    """
    return _default().all_reduce(x, op, out=out, async_op=async_op, timeout=timeout, stream=stream)


@overload
def reduce(
    x: ArrayT,
    dst: int = 0,
    op: Op = "sum",
    *,
    out: ArrayT | None = None,
    async_op: Literal[False] = False,
    **options: Unpack[Options],
) -> ArrayT | None: ...
@overload
def reduce(
    x: ArrayT,
    dst: int = 0,
    op: Op = "sum",
    *,
    out: ArrayT | None = None,
    async_op: Literal[True],
    **options: Unpack[Options],
) -> Handle[ArrayT | None]: ...
def reduce(
    x: ArrayT,
    dst: int = 0,
    op: Op = "sum",
    *,
    out: ArrayT | None = None,
    async_op: bool = False,
    timeout: float | None = None,
    stream: int | None = None,
) -> Any:
    """As `all_reduce`, but only rank `dst` gets the result: in `out`, or in `x` without it.

    On the other ranks `x` keeps its elements, `out` is not used, and the result is None.
    """
    return _default().reduce(x, dst, op, out=out, async_op=async_op, timeout=timeout, stream=stream)


@overload
def reduce_scatter(
    x: Array,
    op: Op = "sum",
    *,
    out: ResultT | None = None,
    async_op: Literal[False] = False,
    **options: Unpack[Options],
) -> ResultT: ...
@overload
def reduce_scatter(
    x: Array, op: Op = "sum", *, out: ResultT | None = None, async_op: Literal[True], **options: Unpack[Options]
) -> Handle[ResultT]: ...
def reduce_scatter(
    x: Array,
    op: Op = "sum",
    *,
    out: ResultT | None = None,
    async_op: bool = False,
    timeout: float | None = None,
    stream: int | None = None,
) -> Any:
    """Rank r gets the combination of all ranks' r-th part of `x`, whose first dimension is divided among the ranks.

    `x` of shape (n, ...) is equal in shape on all ranks, and n a multiple of their number (else ValueError). It
    keeps its elements. Returns `out` of shape (n / size, ...), or a new NumPy array without it; `out` may be this
    rank's part of `x` itself. Types, `op`, `async_op`, `timeout`, `stream` and errors are as in `all_reduce`.
    """
    return _default().reduce_scatter(x, op, out=out, async_op=async_op, timeout=timeout, stream=stream)


@overload
def broadcast(
    x: ArrayT, src: int = 0, *, out: ArrayT | None = None, async_op: Literal[False] = False, **options: Unpack[Options]
) -> ArrayT: ...
@overload
def broadcast(
    x: ArrayT, src: int = 0, *, out: ArrayT | None = None, async_op: Literal[True], **options: Unpack[Options]
) -> Handle[ArrayT]: ...
def broadcast(
    x: ArrayT,
    src: int = 0,
    *,
    out: ArrayT | None = None,
    async_op: bool = False,
    timeout: float | None = None,
    stream: int | None = None,
) -> Any:
    """Every rank gets rank `src`'s array: in `out`, or in `x` without it, and returns that.

    `x` has one shape and type on all ranks; its elements are overwritten on every rank but `src` unless `out` is
    given. Types, `out`, `async_op`, `timeout`, `stream` and errors are as in `all_reduce`.
    """
    return _default().broadcast(x, src, out=out, async_op=async_op, timeout=timeout, stream=stream)


@overload
def gather(
    x: Array, dst: int = 0, *, out: ResultT | None = None, async_op: Literal[False] = False, **options: Unpack[Options]
) -> ResultT | None: ...
@overload
def gather(
    x: Array, dst: int = 0, *, out: ResultT | None = None, async_op: Literal[True], **options: Unpack[Options]
) -> Handle[ResultT | None]: ...
def gather(
    x: Array,
    dst: int = 0,
    *,
    out: ResultT | None = None,
    async_op: bool = False,
    timeout: float | None = None,
    stream: int | None = None,
) -> Any:
    """Rank `dst` gets all ranks' arrays, stacked along a new first dimension; the others get None.

    `x` has one size and type on all ranks, and keeps its elements. Returns, on `dst`, `out` of shape
    (size, *x.shape), or a new NumPy array without it; the others' `out` is not used. Types, `async_op`, `timeout`,
    `stream` and errors are as in `all_reduce`.
    """
    return _default().gather(x, dst, out=out, async_op=async_op, timeout=timeout, stream=stream)


@overload
def scatter(
    x: Array | None = None,
    src: int = 0,
    *,
    out: ResultT | None = None,
    async_op: Literal[False] = False,
    **options: Unpack[Options],
) -> ResultT: ...
@overload
def scatter(
    x: Array | None = None,
    src: int = 0,
    *,
    out: ResultT | None = None,
    async_op: Literal[True],
    **options: Unpack[Options],
) -> Handle[ResultT]: ...
def scatter(
    x: Array | None = None,
    src: int = 0,
    *,
    out: ResultT | None = None,
    async_op: bool = False,
    timeout: float | None = None,
    stream: int | None = None,
) -> Any:
    """Rank r gets the r-th row of rank `src`'s `x`, whose first dimension is the number of ranks.

    The other ranks give no `x`, and an `out` of the shape and type of a row, whose elements are overwritten
    (ValueError without it); on `src` the result is a new NumPy array without `out`. `x` keeps its elements. Returns
    the row. Types, `async_op`, `timeout`, `stream` and errors are as in `all_reduce`.
    """
    return _default().scatter(x, src, out=out, async_op=async_op, timeout=timeout, stream=stream)


@overload
def all_gather(
    x: Array, *, out: ResultT | None = None, async_op: Literal[False] = False, **options: Unpack[Options]
) -> ResultT: ...
@overload
def all_gather(
    x: Array, *, out: ResultT | None = None, async_op: Literal[True], **options: Unpack[Options]
) -> Handle[ResultT]: ...
def all_gather(
    x: Array,
    *,
    out: ResultT | None = None,
    async_op: bool = False,
    timeout: float | None = None,
    stream: int | None = None,
) -> Any:
    """Every rank gets all ranks' arrays, stacked along a new first dimension.

    `x` has one size and type on all ranks, and keeps its elements. Returns `out` of shape (size, *x.shape), or a
    new NumPy array without it; `x` may be this rank's part of `out` itself. Types, `async_op`, `timeout`, `stream`
    and errors are as in `all_reduce`.
    """
    return _default().all_gather(x, out=out, async_op=async_op, timeout=timeout, stream=stream)


@overload
def all_to_all(
    x: ArrayT, *, out: ArrayT | None = None, async_op: Literal[False] = False, **options: Unpack[Options]
) -> ArrayT: ...
@overload
def all_to_all(
    x: ArrayT, *, out: ArrayT | None = None, async_op: Literal[True], **options: Unpack[Options]
) -> Handle[ArrayT]: ...
def all_to_all(
    x: ArrayT,
    *,
    out: ArrayT | None = None,
    async_op: bool = False,
    timeout: float | None = None,
    stream: int | None = None,
) -> Any:
    """Rank r gets the r-th part of every rank's array, in rank order.

    The first dimension of `x` is a multiple of the number of ranks (else ValueError) and is divided among them.
    Returns `out`, of the shape of `x`; without it `x`, whose elements are overwritten. Types, `out`, `async_op`,
    `timeout`, `stream` and errors are as in `all_reduce`.
    """
    return _default().all_to_all(x, out=out, async_op=async_op, timeout=timeout, stream=stream)


@overload
def barrier(*, async_op: Literal[False] = False, timeout: float | None = None) -> None: ...
@overload
def barrier(*, async_op: Literal[True], timeout: float | None = None) -> Handle[None]: ...
def barrier(*, async_op: bool = False, timeout: float | None = None) -> Any:
    """Returns when every rank has called it; with `async_op` a `Handle`, whose `wait()` does.

    `timeout` and errors are as in `all_reduce`.
    """
    return _default().barrier(async_op=async_op, timeout=timeout)


@overload
def all_to_all_v(
    x: Array,
    send_counts: Sequence[int],
    recv_counts: Sequence[int],
    *,
    send_displs: Sequence[int] | None = None,
    recv_displs: Sequence[int] | None = None,
    out: ResultT | None = None,
    async_op: Literal[False] = False,
    **options: Unpack[Options],
) -> ResultT: ...
@overload
def all_to_all_v(
    x: Array,
    send_counts: Sequence[int],
    recv_counts: Sequence[int],
    *,
    send_displs: Sequence[int] | None = None,
    recv_displs: Sequence[int] | None = None,
    out: ResultT | None = None,
    async_op: Literal[True],
    **options: Unpack[Options],
) -> Handle[ResultT]: ...
def all_to_all_v(
    x: Array,
    send_counts: Sequence[int],
    recv_counts: Sequence[int],
    *,
    send_displs: Sequence[int] | None = None,
    recv_displs: Sequence[int] | None = None,
    out: ResultT | None = None,
    async_op: bool = False,
    timeout: float | None = None,
    stream: int | None = None,
) -> Any:
    """Rank r gets `send_counts[r]` elements of every rank's `x`, as MPI_Alltoallv.

    Counts and displacements are in elements of the flattened arrays, one per rank; without displacements the parts
    follow each other. `recv_counts[r]` must be what rank r sends to this rank. `x` keeps its elements.

    Returns `out`, of any shape and the type of `x`, with the parts at `recv_displs`; without it a new NumPy array
    of one dimension. Types, `async_op`, `timeout`, `stream` and errors are as in `all_reduce`; ValueError also when
    a part is not within its array or two parts of the result overlap.
    """
    return _default().all_to_all_v(
        x,
        send_counts,
        recv_counts,
        send_displs=send_displs,
        recv_displs=recv_displs,
        out=out,
        async_op=async_op,
        timeout=timeout,
        stream=stream,
    )


@overload
def exchange(
    sends: Sequence[tuple[int, Array]],
    recvs: Sequence[tuple[int, Array]],
    *,
    tag: int = 0,
    async_op: Literal[False] = False,
    **options: Unpack[Options],
) -> list[Any]: ...
@overload
def exchange(
    sends: Sequence[tuple[int, Array]],
    recvs: Sequence[tuple[int, Array]],
    *,
    tag: int = 0,
    async_op: Literal[True],
    **options: Unpack[Options],
) -> Handle[list[Any]]: ...
def exchange(
    sends: Sequence[tuple[int, Array]],
    recvs: Sequence[tuple[int, Array]],
    *,
    tag: int = 0,
    async_op: bool = False,
    timeout: float | None = None,
    stream: int | None = None,
) -> Any:
    """Many messages at once, as a group of ncclSend and ncclRecv: `(peer, array)` for each.

    All arrays have one element type, and are all on the host or all on one CUDA device; else TypeError. Messages to
    one peer arrive in the order given; the peer may take one with `recv`, too. Only the ranks named take part.

    Returns the arrays of `recvs`, whose elements are overwritten. `async_op`, `timeout`, `stream` and errors are as
    in `all_reduce`, `tag` is as in `send`.
    """
    return _default().exchange(sends, recvs, tag=tag, async_op=async_op, timeout=timeout, stream=stream)


@overload
def send(x: Array, dst: int, *, tag: int = 0, async_op: Literal[False] = False, **options: Unpack[Options]) -> None: ...
@overload
def send(x: Array, dst: int, *, tag: int = 0, async_op: Literal[True], **options: Unpack[Options]) -> Handle[None]: ...
def send(
    x: Array, dst: int, *, tag: int = 0, async_op: bool = False, timeout: float | None = None, stream: int | None = None
) -> Any:
    """Sends the array to rank `dst`, whose receive has the same `tag` (0 to 2**32 - 1).

    Messages do not wait for collectives of the group, nor collectives for messages. One of up to 16 KiB is done
    when it is sent, a longer one when the receiver has it. An array on a CUDA device is copied through host
    memory, and may be received on the host.

    Returns None. `x` may be any array that `all_reduce` takes, also a read-only one; `async_op`, `timeout`,
    `stream` and errors are as there. ValueError for this rank itself and for a rank outside the group.
    """
    return _default().send(x, dst, tag=tag, async_op=async_op, timeout=timeout, stream=stream)


@overload
def recv(
    x: ArrayT, src: int, *, tag: int = 0, async_op: Literal[False] = False, **options: Unpack[Options]
) -> ArrayT: ...
@overload
def recv(
    x: ArrayT, src: int, *, tag: int = 0, async_op: Literal[True], **options: Unpack[Options]
) -> Handle[ArrayT]: ...
def recv(
    x: ArrayT,
    src: int,
    *,
    tag: int = 0,
    async_op: bool = False,
    timeout: float | None = None,
    stream: int | None = None,
) -> Any:
    """Receives the next message of rank `src` with this `tag` into `x`, and returns `x`.

    `x` is a writable array in C order with as many elements, and of the type, as the sender's; its elements are
    overwritten. MismatchError where it has not. `async_op`, `timeout`, `stream` and the other errors are as in
    `all_reduce`; `x` may be on a CUDA device.
    """
    return _default().recv(x, src, tag=tag, async_op=async_op, timeout=timeout, stream=stream)
