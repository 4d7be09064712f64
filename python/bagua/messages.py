"""Point-to-point messages between ranks, on arrays.

Each verb checks its arguments before it sends anything. With `async_op=True` it returns a `Handle`; the arrays must not
be touched until that is done.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Generic, Literal, overload

from bagua import extension, verbs
from bagua.arrays import Array, ArrayT, ResultT, operand
from bagua.errors import DeviceError
from bagua.handle import AnyHandle, Handle
from bagua.operand import Operand, empty_like, same_kind

if TYPE_CHECKING:
    from typing_extensions import TypedDict, Unpack

    class Options(TypedDict, total=False):
        """Options of every verb."""

        timeout: float | None
        """Timeout in seconds; None uses the group's."""
        stream: int | None
        """For arrays on a CUDA device: a CUstream as an integer; None is the legacy stream."""

    class OutOptions(Options, Generic[ResultT], total=False):
        """Options of every verb whose result is an array."""

        out: ResultT | None
        """The array for the result."""


__all__ = ["Messages", "outcome"]


#: CUDA_ERROR_OUT_OF_MEMORY.
_OUT_OF_MEMORY = 2


def outcome(handle: AnyHandle | None, result: Any, group: Messages) -> Any:
    """Returns the result of a verb that is done, or else a handle with that result."""
    return result if handle is None else Handle([handle], result=result, keep=group)


class Messages:
    """Messages of a group, and the exchange between all ranks with different sizes: the base of `Collectives`."""

    def __init__(self, communicator: extension.Communicator) -> None:
        self._communicator = communicator

    @property
    def communicator(self) -> extension.Communicator:
        """The core's communicator: the same verbs by memory address, for callers that keep memory alive themselves."""
        return self._communicator

    @property
    def rank(self) -> int:
        """This process's rank in the group."""
        return self._communicator.rank

    @property
    def size(self) -> int:
        """Number of ranks in the group."""
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
        async_op: Literal[False] = False,
        **options: Unpack[OutOptions[ResultT]],
    ) -> ResultT: ...
    @overload
    def all_to_all_v(
        self,
        x: Array,
        send_counts: Sequence[int],
        recv_counts: Sequence[int],
        *,
        send_displs: Sequence[int] | None = None,
        recv_displs: Sequence[int] | None = None,
        async_op: Literal[True],
        **options: Unpack[OutOptions[ResultT]],
    ) -> Handle[ResultT]: ...
    def all_to_all_v(
        self,
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
        """Sends each rank its own number of elements, as MPI_Alltoallv: rank r gets `send_counts[r]` elements of every
        rank's `x`.

        Counts and displacements are in elements of the flattened arrays, one per rank. Without displacements the parts
        follow each other. `recv_counts[r]` must equal what rank r sends to this rank. `x` keeps its elements.

        Returns `out`, which has any shape and the element type of `x`, with the received parts at `recv_displs`. If
        `out` is not given, returns a new one-dimensional NumPy array. Element types, `async_op`, `timeout`, `stream`
        and errors are as in `all_reduce`. Also raises ValueError if a part is not within its array, or if two parts of
        the result overlap.
        """
        src = self._operand(x, "the array", stream).to_read()
        sends, recvs = [
            verbs.check_counts(counts, name, self.size)
            for name, counts in (("send_counts", send_counts), ("recv_counts", recv_counts))
        ]
        send_at, recv_at = [
            verbs.starts(counts) if given is None else verbs.check_counts(given, name, self.size)
            for name, given, counts in (("send_displs", send_displs, sends), ("recv_displs", recv_displs, recvs))
        ]
        room: Any = out
        if room is None:
            room = empty_like(src, (max((at + n for at, n in zip(recv_at, recvs, strict=True)), default=0),))
        dst = self._operand(room, "out", stream)
        dst = same_kind(src, dst, dst.shape)
        call = verbs.all_to_all_v(self._communicator, src, (sends, send_at), dst, (recvs, recv_at))
        return outcome(call.begin(async_op, timeout), room, self)

    @overload
    def exchange(
        self,
        sends: Sequence[tuple[int, Array]],
        recvs: Sequence[tuple[int, Array]],
        *,
        tag: int = 0,
        async_op: Literal[False] = False,
        **options: Unpack[Options],
    ) -> list[Any]: ...
    @overload
    def exchange(
        self,
        sends: Sequence[tuple[int, Array]],
        recvs: Sequence[tuple[int, Array]],
        *,
        tag: int = 0,
        async_op: Literal[True],
        **options: Unpack[Options],
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
        """Sends and receives many messages at once, as a group of ncclSend and ncclRecv. Each is a pair `(peer,
        array)`.

        All arrays must have one element type, and be all on the host or all on one CUDA device (else TypeError).
        Messages to one peer arrive in the order given. The peer may receive them with `recv` as well. Only the ranks
        that are named take part.

        Returns the arrays of `recvs`, which are overwritten. `async_op`, `timeout`, `stream` and errors are as in
        `all_reduce`; `tag` is as in `send`.
        """
        given = [(self._peer(peer, "peer"), self._operand(x, "the array", stream).to_read()) for peer, x in sends]
        wanted = [(self._peer(peer, "peer"), self._written(x, stream)) for peer, x in recvs]
        result = [x for _, x in recvs]
        memories = [memory for _, memory in (*given, *wanted)]
        if len(kinds := {memory.dtype_name for memory in memories}) > 1:
            raise TypeError(f"exchange: the arrays have different element types: {', '.join(sorted(kinds))}")
        if len(places := {memory.where for memory in memories}) > 1:
            raise TypeError(f"exchange: the arrays are on different devices: {', '.join(sorted(places))}")
        return outcome(verbs.exchange(self._communicator, given, wanted, tag).begin(async_op, timeout), result, self)

    @overload
    def send(
        self, x: Array, dst: int, *, tag: int = 0, async_op: Literal[False] = False, **options: Unpack[Options]
    ) -> None: ...
    @overload
    def send(
        self, x: Array, dst: int, *, tag: int = 0, async_op: Literal[True], **options: Unpack[Options]
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
        """Sends an array to rank `dst`, whose receive must have the same `tag` (0 to 2**32 - 1). Returns None.

        Messages and collectives of a group do not wait for each other. A message of up to 64 KiB is done as soon as it
        is sent, as long as the receiver holds at most 1 MiB of this rank's messages without a matching receive. Other
        messages are done when the receiver has them. An array on a CUDA device is copied through host memory, and may
        be received on the host.

        `x` may be any array that `all_reduce` takes, including a read-only one. `async_op`, `timeout`, `stream` and
        errors are as there. Raises ValueError for this rank itself and for a rank outside the group.
        """
        to = self._peer(dst, "dst")
        src = self._operand(x, "the array", stream).to_read()
        return outcome(verbs.send(self._communicator, src, to, tag).begin(async_op, timeout), None, self)

    @overload
    def recv(
        self, x: ArrayT, src: int, *, tag: int = 0, async_op: Literal[False] = False, **options: Unpack[Options]
    ) -> ArrayT: ...
    @overload
    def recv(
        self, x: ArrayT, src: int, *, tag: int = 0, async_op: Literal[True], **options: Unpack[Options]
    ) -> Handle[ArrayT]: ...
    def recv(
        self,
        x: ArrayT,
        src: int,
        *,
        tag: int = 0,
        async_op: bool = False,
        timeout: float | None = None,
        stream: int | None = None,
    ) -> Any:
        """Receives the next message of rank `src` with this `tag` into `x`. Returns `x`.

        `x` is a writable array in C order, and is overwritten. It must have the sender's number of elements and element
        type (else MismatchError). `x` may be on a CUDA device. `async_op`, `timeout`, `stream` and other errors are as
        in `all_reduce`.
        """
        return outcome(self._receive(x, self._peer(src, "src"), tag, async_op, timeout, stream), x, self)

    def recv_any(
        self, x: ArrayT, *, tag: int = 0, timeout: float | None = None, stream: int | None = None
    ) -> tuple[ArrayT, int]:
        """Receives the next message of any rank with this `tag` into `x`. Returns `x` and the rank of the sender.

        The arguments and errors are those of :meth:`recv`.
        """
        handle = outcome(self._receive(x, None, tag, True, timeout, stream), x, self)
        handle.wait()
        (sender,) = handle.senders()
        assert sender is not None, "the message has come"
        return x, sender

    def _receive(
        self, x: Array, sender: int | None, tag: int, async_op: bool, timeout: float | None, stream: int | None
    ) -> AnyHandle | None:
        dst = self._written(x, stream)
        return verbs.recv(self._communicator, dst, sender, tag).begin(async_op, timeout)

    def _operand(self, x: Any, what: str, stream: int | None) -> Operand:
        """Returns the operand of an array. Ends the group if the device fails, because other ranks wait."""
        try:
            return operand(x, what, stream)
        except DeviceError as error:
            self._communicator.cause()
            if error.code != _OUT_OF_MEMORY:
                self._communicator.raise_(type(error).__name__, str(error))
            raise

    def _written(self, x: Any, stream: int | None) -> Operand:
        return self._operand(x, "the array", stream).to_write("the array")

    def _rank(self, rank: int, name: str) -> int:
        found = verbs.whole(rank, name)
        if not 0 <= found < self.size:
            raise ValueError(f"{name}={found} is not a rank of a group of {self.size}")
        return found

    def _peer(self, rank: int, name: str) -> int:
        found = self._rank(rank, name)
        if found == self.rank:
            raise ValueError(f"{name}={found} is this rank itself")
        return found
