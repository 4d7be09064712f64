"""Messages between ranks on arrays.

Each checks its arguments before anything is sent. With `async_op=True` it returns a `Handle`; until that is done, the
arrays must not be touched.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeVar, overload

from bagua import engine
from bagua.arrays import Array, empty_like, operand
from bagua.errors import DeviceError
from bagua.handle import Handle

__all__ = ["Messages", "outcome", "same_kind", "writable"]

if TYPE_CHECKING:
    from bagua.arrays import AnyMemory

#: CUDA_ERROR_OUT_OF_MEMORY.
_OUT_OF_MEMORY = 2

M = TypeVar("M", bound="AnyMemory")


def same_kind(memory: M, out: AnyMemory, shape: tuple[int, ...]) -> M:
    """`out`, if it can hold a result of this shape and of the type of `memory`, at the same place."""
    if type(out) is not type(memory) or out.device is not memory.device:
        raise TypeError(f"out is on {out.where}, the array is on {memory.where}")
    if out.dtype != memory.dtype:
        raise TypeError(f"out has elements of type {out.dtype_name}, the array has {memory.dtype_name}")
    if out.shape != shape:
        raise ValueError(f"out has shape {out.shape}, the result has {shape}")
    return out.to_write("out")  # type: ignore[return-value]


def writable(memory: M) -> M:
    return memory.to_write("the array")  # type: ignore[return-value]


def outcome(raw: engine.Handle | None, result: Any, keep: object) -> Any:
    return result if raw is None else Handle([raw], result=result, keep=keep)


def _displs(counts: list[int], displs: Sequence[int] | None, name: str) -> list[int]:
    """Displacements of parts of these counts: those given, or one part after the other."""
    if displs is None:
        return [0, *itertools.accumulate(counts)][: len(counts)]
    found = [int(n) for n in displs]
    if len(found) != len(counts) or min(found, default=0) < 0:
        raise ValueError(f"{name}={found} must be {len(counts)} numbers, none of them negative")
    return found


def _tag(tag: int) -> int:
    if not 0 <= tag < 2**32:
        raise ValueError(f"tag={tag} is not between 0 and 2**32 - 1")
    return int(tag)


class Messages:
    """The messages of a group: between two ranks, or between all of them with sizes of their own."""

    def __init__(self, communicator: engine.Communicator) -> None:
        self._communicator = communicator

    @property
    def communicator(self) -> engine.Communicator:
        """The same verbs by address, for callers that keep memory alive themselves."""
        return self._communicator

    @property
    def rank(self) -> int:
        """This process's rank in the group."""
        return self._communicator.rank

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self._communicator.size

    @overload
    def all_to_all_v(
        self,
        x: Array,
        send_counts: Sequence[int],
        recv_counts: Sequence[int],
        *,
        send_displs: Sequence[int] | None = None,
        recv_displs: Sequence[int] | None = None,
        out: Array | None = None,
        async_op: Literal[False] = False,
        timeout: float | None = None,
        stream: int | None = None,
    ) -> Any: ...
    @overload
    def all_to_all_v(
        self,
        x: Array,
        send_counts: Sequence[int],
        recv_counts: Sequence[int],
        *,
        send_displs: Sequence[int] | None = None,
        recv_displs: Sequence[int] | None = None,
        out: Array | None = None,
        async_op: Literal[True],
        timeout: float | None = None,
        stream: int | None = None,
    ) -> Handle[Any]: ...
    def all_to_all_v(
        self,
        x: Array,
        send_counts: Sequence[int],
        recv_counts: Sequence[int],
        *,
        send_displs: Sequence[int] | None = None,
        recv_displs: Sequence[int] | None = None,
        out: Array | None = None,
        async_op: bool = False,
        timeout: float | None = None,
        stream: int | None = None,
    ) -> Any:
        """Rank r gets `send_counts[r]` elements of every rank's `x`, as MPI_Alltoallv.

        Counts and displacements are in elements of the flattened arrays, one per rank; without displacements the parts
        follow each other. `recv_counts[r]` must be what rank r sends to this rank. The result is `out`, or a new array
        of one dimension. Raises ValueError when a part is not within its array or two parts of the result overlap.
        """
        src = self._operand(x, "the array", stream).to_read()
        sends, recvs = [int(n) for n in send_counts], [int(n) for n in recv_counts]
        for name, counts in (("send_counts", sends), ("recv_counts", recvs)):
            if len(counts) != self.size or min(counts, default=0) < 0:
                raise ValueError(f"{name}={counts} must be {self.size} numbers, none of them negative")
        send_at, recv_at = _displs(sends, send_displs, "send_displs"), _displs(recvs, recv_displs, "recv_displs")
        if out is None:
            out = empty_like(src, (max((at + n for at, n in zip(recv_at, recvs, strict=True)), default=0),))
        dst = self._operand(out, "out", stream)
        dst = same_kind(src, dst, dst.shape)
        raw = self._communicator.all_to_all_v(
            src.address,
            src.count,
            dst.address,
            dst.count,
            dst.dtype,
            sends,
            send_at,
            recvs,
            recv_at,
            timeout=timeout,
            async_op=async_op,
            keep=(src, dst) if async_op or src.device is not None else None,
            place=src.call(self._communicator, (src, dst)),
        )
        return outcome(raw, out, (src, dst))

    @overload
    def exchange(
        self,
        sends: Sequence[tuple[int, Array]],
        recvs: Sequence[tuple[int, Array]],
        *,
        tag: int = 0,
        async_op: Literal[False] = False,
        timeout: float | None = None,
        stream: int | None = None,
    ) -> list[Any]: ...
    @overload
    def exchange(
        self,
        sends: Sequence[tuple[int, Array]],
        recvs: Sequence[tuple[int, Array]],
        *,
        tag: int = 0,
        async_op: Literal[True],
        timeout: float | None = None,
        stream: int | None = None,
    ) -> Handle[list[Any]]: ...
    def exchange(
        self,
        sends: Sequence[tuple[int, Array]],
        recvs: Sequence[tuple[int, Array]],
        *,
        tag: int = 0,
        async_op: bool = False,
        timeout: float | None = None,
        stream: int | None = None,
    ) -> Any:
        """Many messages at once, as a group of ncclSend and ncclRecv: `(peer, array)` for each.

        All arrays have one element type. Messages to one peer arrive in the order given; the peer may take one with
        `recv`, too. Returns the arrays of `recvs`, which are filled in place. Only the ranks named take part.

        The arrays are all on the host, or all on one CUDA device (TypeError), where `stream` is as in `all_reduce`.
        """
        given = [(self._peer(peer, "peer"), self._operand(x, "the array", stream).to_read()) for peer, x in sends]
        wanted = [(self._peer(peer, "peer"), writable(self._operand(x, "the array", stream))) for peer, x in recvs]
        result = [x for _, x in recvs]
        memories = [memory for _, memory in (*given, *wanted)]
        if len(kinds := {memory.dtype_name for memory in memories}) > 1:
            raise TypeError(f"exchange: the arrays have different element types: {', '.join(sorted(kinds))}")
        if len(places := {memory.where for memory in memories}) > 1:
            raise TypeError(f"exchange: the arrays are in different places: {', '.join(sorted(places))}")
        raw = self._communicator.exchange(
            [(peer, memory.address, memory.count) for peer, memory in given],
            [(peer, memory.address, memory.count) for peer, memory in wanted],
            memories[0].dtype if memories else engine.DTYPES["uint8"],
            tag=_tag(tag),
            timeout=timeout,
            async_op=async_op,
            keep=memories,
            place=memories[0].call_messages(self._communicator, memories) if memories else None,
        )
        return outcome(raw, result, memories)

    @overload
    def send(
        self,
        x: Array,
        dst: int,
        *,
        tag: int = 0,
        async_op: Literal[False] = False,
        timeout: float | None = None,
        stream: int | None = None,
    ) -> None: ...
    @overload
    def send(
        self,
        x: Array,
        dst: int,
        *,
        tag: int = 0,
        async_op: Literal[True],
        timeout: float | None = None,
        stream: int | None = None,
    ) -> Handle[None]: ...
    def send(
        self,
        x: Array,
        dst: int,
        *,
        tag: int = 0,
        async_op: bool = False,
        timeout: float | None = None,
        stream: int | None = None,
    ) -> Any:
        """Sends the array to rank `dst`, whose receive has the same `tag` (0 to 2**32 - 1).

        Messages do not wait for collectives of the group, nor collectives for messages. One of up to 16 KiB is done
        when it is on its way, a longer one when the receiver has it. An array on a CUDA device travels through host
        memory, and may be received on the host; `stream` is as in `all_reduce`.
        """
        to = self._peer(dst, "dst")
        src = self._operand(x, "the array", stream).to_read()
        raw = self._communicator.send(
            src.address,
            src.count,
            src.dtype,
            to,
            tag=_tag(tag),
            timeout=timeout,
            async_op=async_op,
            keep=src,
            place=src.call_messages(self._communicator, [src]),
        )
        return outcome(raw, None, src)

    @overload
    def recv(
        self,
        x: Array,
        src: int,
        *,
        tag: int = 0,
        async_op: Literal[False] = False,
        timeout: float | None = None,
        stream: int | None = None,
    ) -> Any: ...
    @overload
    def recv(
        self,
        x: Array,
        src: int,
        *,
        tag: int = 0,
        async_op: Literal[True],
        timeout: float | None = None,
        stream: int | None = None,
    ) -> Handle[Any]: ...
    def recv(
        self,
        x: Array,
        src: int,
        *,
        tag: int = 0,
        async_op: bool = False,
        timeout: float | None = None,
        stream: int | None = None,
    ) -> Any:
        """Receives the next message of rank `src` with this `tag` into `x`, which has its size and type.

        `x` may be on a CUDA device; `stream` is as in `all_reduce`.
        """
        raw, dst = self._receive(x, self._peer(src, "src"), tag, async_op, timeout, stream)
        return outcome(raw, x, dst)

    def recv_any(
        self, x: Array, *, tag: int = 0, timeout: float | None = None, stream: int | None = None
    ) -> tuple[Any, int]:
        """As :meth:`recv`, from whichever rank's message comes first: `(x, its rank)`."""
        raw, _ = self._receive(x, None, tag, True, timeout, stream)
        assert raw is not None, "an asynchronous call returns a handle"
        raw.wait()
        (sender,) = raw.senders()
        assert sender is not None, "the message has come"
        return x, sender

    def _receive(
        self, x: Array, sender: int | None, tag: int, async_op: bool, timeout: float | None, stream: int | None
    ) -> tuple[engine.Handle | None, AnyMemory]:
        dst = writable(self._operand(x, "the array", stream))
        raw = self._communicator.recv(
            dst.address,
            dst.count,
            dst.dtype,
            sender,
            tag=_tag(tag),
            timeout=timeout,
            async_op=async_op,
            keep=dst,
            place=dst.call_messages(self._communicator, [dst]),
        )
        return raw, dst

    def _operand(self, x: Any, what: str, stream: int | None) -> AnyMemory:
        """The memory of an array. A device that fails meanwhile ends the group: the others wait for this rank."""
        try:
            return operand(x, what, stream)
        except DeviceError as error:
            self._communicator.cause()
            if error.code != _OUT_OF_MEMORY:
                self._communicator.raise_(type(error).__name__, str(error))
            raise

    def _rank(self, rank: int, name: str) -> int:
        if not 0 <= rank < self.size:
            raise ValueError(f"{name}={rank} is not a rank of a group of {self.size}")
        return int(rank)

    def _peer(self, rank: int, name: str) -> int:
        if self._rank(rank, name) == self.rank:
            raise ValueError(f"{name}={rank} is this rank itself")
        return int(rank)
