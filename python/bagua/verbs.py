"""The table of verbs: the rules for each verb's operands, and the call that begins it.

The front ends (`bagua`, `bagua.torch_api`, `bagua.c10d`) turn arrays or tensors into operands and call this module.
They add names, defaults and error texts of their own.
"""

from __future__ import annotations

import ctypes
import itertools
import operator
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from bagua import extension
from bagua.handle import AnyHandle, Handle
from bagua.operand import Operand

__all__ = ["Operation", "Verb", "all_to_all_v", "is_defined", "operation", "recv", "send"]


class Verb(NamedTuple):
    """Description of a verb: what its ranks read and write."""

    name: str
    #: Code in the core.
    code: int
    #: True if the source has a part for each rank.
    sends_all: bool
    #: True if the destination has a part for each rank.
    receives_all: bool
    #: True if all ranks' arrays must have the same shape, and not only the same size.
    compares_shapes: bool

    def part(self, src: Operand | None, dst: Operand | None, ranks: int) -> int:
        """Returns the number of elements of one rank's part, or of the whole operand if the verb has no parts.

        `src` is None for an operation in place.
        """
        if src is not None and dst is not None and self.sends_all and not self.receives_all:
            return dst.count
        held = dst if src is None else src
        assert held is not None
        has_parts = self.sends_all if src is not None else self.sends_all or self.receives_all
        return held.count // ranks if has_parts else held.count

    def misfit(self, sent: int, received: int, ranks: int) -> str | None:
        """Returns why a verb cannot turn `sent` elements into `received` elements; None if it can."""
        if self.sends_all == self.receives_all:
            return None if sent == received else "they must be equal"
        part, whole, to = (received, sent, "send") if self.sends_all else (sent, received, "receive")
        return None if whole == part * ranks else f"{ranks} ranks need {part * ranks} to {to}"

    def in_place(self, src: Operand, dst: Operand, rank: int) -> tuple[Operand | None, Operand]:
        """Returns source and destination. The source is None for an operation in place: both are the same memory, or
        one of them is this rank's part of the other.

        NCCL defines "in place" by the same rule.
        """
        if self.sends_all and not self.receives_all:
            return (None, src) if _is_part(dst, src, rank) else (src, dst)
        if self.receives_all and not self.sends_all:
            return (None if _is_part(src, dst, rank) else src), dst
        return (None if src.address == dst.address else src), dst


def _is_part(part: Operand, whole: Operand, rank: int) -> bool:
    return part.count > 0 and part.address == whole.address + rank * part.nbytes


def _verb(name: str, *, sends_all: bool = False, receives_all: bool = False, compares_shapes: bool = False) -> Verb:
    return Verb(name, extension.VERBS[name], sends_all, receives_all, compares_shapes)


ALL_REDUCE = _verb("all_reduce", compares_shapes=True)
REDUCE = _verb("reduce", compares_shapes=True)
BROADCAST = _verb("broadcast", compares_shapes=True)
ALL_GATHER = _verb("all_gather", receives_all=True)
GATHER = _verb("gather", receives_all=True)
SCATTER = _verb("scatter", sends_all=True)
REDUCE_SCATTER = _verb("reduce_scatter", sends_all=True)
ALL_TO_ALL = _verb("all_to_all", sends_all=True, receives_all=True)
BARRIER = _verb("barrier")

_DEFINED = extension.DEFINED


def is_defined(op: int, dtype: int) -> bool:
    return (op, dtype) in _DEFINED


class Operation:
    """A verb with its operands. All checks are done, and it is ready to begin."""

    def __init__(
        self,
        raw: extension.Communicator | extension.Engine,
        call: Callable[..., extension.Handle | None],
        operands: Sequence[Operand],
        *,
        finish: Callable[[], None] | None = None,
        is_message: bool = False,
        fill: tuple[Operand, Operand] | None = None,
    ) -> None:
        self._raw = raw
        self._call = call
        #: Operands, all on the same device.
        self.operands = operands
        #: Copies the result to the caller's memory; None if the operands are the caller's memory.
        self.finish = finish
        self._is_message = is_message
        # Operands (to, from) to copy before the verb begins.
        self._fill = fill

    def begin(self, async_op: bool = False, timeout: float | None = None) -> AnyHandle | None:
        """Begins the operation. Returns the handle of an asynchronous one; None if it is done and its results are in
        place.

        Raises NotImplementedError if the stream of its device is being captured, before anything is enqueued.
        """
        finish, operands = self.finish, self.operands
        place = operands[0].place if operands else None
        handle: AnyHandle | None
        if place is not None:
            make = place.call_messages if self._is_message else place.call
            call = make(self._raw, [operand.place for operand in operands])
            if self._fill is not None:
                to, other = self._fill
                call.copy(to.address, other.address, to.nbytes)
            done = self._call(timeout=timeout, async_op=async_op, keep=operands, place=call)
            handle = place.handle(done, finish)
        else:
            if self._fill is not None:
                to, other = self._fill
                ctypes.memmove(to.address, other.address, to.nbytes)
            # A message may continue after its wait was interrupted, so it keeps the operands alive.
            keep = operands if async_op or self._is_message else None
            done = self._call(timeout=timeout, async_op=async_op, keep=keep)
            handle = done if done is None or finish is None else Handle([done], finish)
        if done is None and finish is not None:
            finish()
        return handle


def operation(
    raw: extension.Communicator | extension.Engine,
    verb: Verb,
    src: Operand | None,
    dst: Operand | None,
    *,
    op: int = 0,
    root: int = 0,
    count: int | None = None,
    fill: Operand | None = None,
) -> Operation:
    """Returns a verb from `src` (None: in place) to `dst`. Without both it is a barrier.

    `count`: number of elements of one rank's part, if the operands have room for more. `fill` is copied to `dst` first.
    """
    held = src if dst is None else dst
    if held is None:
        return Operation(raw, partial(raw.run, verb.code, None, None, 0, extension.DTYPES["uint8"]), ())
    if count is None:
        assert isinstance(raw, extension.Communicator), "an engine's caller passes the count"
        count = verb.part(src, dst, raw.size)
    shape = held.dims if verb.compares_shapes else None
    call: Callable[..., Any]
    if dst is None:
        call = partial(raw.run, verb.code, held.address, None, count, held.dtype, op, root, shape=shape)
        return Operation(raw, call, (held,))
    if src is None:
        call = partial(raw.run, verb.code, None, dst.address, count, dst.dtype, op, root, shape=shape)
        if fill is not None:
            return Operation(raw, call, (dst, fill), finish=dst.finish, fill=(dst, fill))
        return Operation(raw, call, (dst,), finish=dst.finish)
    call = partial(raw.run, verb.code, src.address, dst.address, count, dst.dtype, op, root, shape=shape)
    return Operation(raw, call, (src, dst), finish=dst.finish)


def all_to_all_v(
    raw: extension.Communicator,
    src: Operand | None,
    sends: tuple[Sequence[int], Sequence[int]],
    dst: Operand,
    receives: tuple[Sequence[int], Sequence[int]],
) -> Operation:
    """Returns an all_to_all_v. `sends` and `receives` are pairs of counts and displacements, one number per rank."""
    call: Callable[..., Any] = partial(
        raw.all_to_all_v,
        None if src is None else src.address,
        dst.count if src is None else src.count,
        dst.address,
        dst.count,
        dst.dtype,
        *sends,
        *receives,
    )
    return Operation(raw, call, (dst,) if src is None else (src, dst), finish=dst.finish)


def send(raw: extension.Communicator, src: Operand, to: int, tag: int = 0) -> Operation:
    call = partial(raw.exchange, ((to, src.address, src.count),), (), src.dtype, tag=check_tag(tag))
    return Operation(raw, call, (src,), is_message=True)


def recv(raw: extension.Communicator, dst: Operand, sender: int | None, tag: int = 0) -> Operation:
    """Returns the receipt of the next message with this tag from rank `sender`, or from any rank if None."""
    call = partial(raw.exchange, (), ((sender, dst.address, dst.count),), dst.dtype, tag=check_tag(tag))
    return Operation(raw, call, (dst,), finish=dst.finish, is_message=True)


def exchange(
    raw: extension.Communicator,
    sends: Sequence[tuple[int, Operand]],
    receives: Sequence[tuple[int, Operand]],
    tag: int = 0,
) -> Operation:
    """Returns the exchange of many messages of one element type at once, as pairs `(peer, operand)`."""
    operands = [operand for _, operand in (*sends, *receives)]
    sent, received = [[(peer, x.address, x.count) for peer, x in each] for each in (sends, receives)]
    dtype = operands[0].dtype if operands else extension.DTYPES["uint8"]
    return Operation(raw, partial(raw.exchange, sent, received, dtype, tag=check_tag(tag)), operands, is_message=True)


def whole(number: int, name: str) -> int:
    """Returns a number as an int. Raises TypeError for anything else, such as a float, which `int` would truncate."""
    try:
        return operator.index(number)
    except TypeError:
        raise TypeError(f"{name}={number!r} is not an integer") from None


def check_tag(tag: int) -> int:
    """Returns the tag of a message as an int. Raises ValueError unless it is from 0 to 2**32 - 1."""
    found = whole(tag, "tag")
    if not 0 <= found < 2**32:
        raise ValueError(f"tag={found} is not between 0 and 2**32 - 1")
    return found


def check_counts(counts: Sequence[int], name: str, ranks: int) -> list[int]:
    """Returns one number for each rank. Raises ValueError for another length, and for negative numbers."""
    found = [whole(count, name) for count in counts]
    if len(found) != ranks or min(found, default=0) < 0:
        raise ValueError(f"{name}={found} must be {ranks} numbers, none of them negative")
    return found


def starts(counts: Sequence[int]) -> list[int]:
    """Returns the displacements of parts with these counts that follow each other."""
    return list(itertools.accumulate(counts, initial=0))[:-1]
