"""The table of the verbs, a row each; what is asked of the operands of a verb, and how it begins.

All that takes arrays or tensors (`bagua`, `bagua.torch_api`, `bagua.c10d`) makes operands of them and comes through
here: it adds names, defaults and its own words in errors.
"""

from __future__ import annotations

import ctypes
import itertools
import operator
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from bagua import engine
from bagua.handle import AnyHandle, Handle
from bagua.operand import Operand

__all__ = ["Operation", "Verb", "all_to_all_v", "is_defined", "operation", "recv", "send"]


class Verb(NamedTuple):
    """One verb, by what its ranks read and write."""

    name: str
    #: Its code in the core.
    code: int
    #: Whether its source has a part for each rank.
    sends_all: bool
    #: Whether its destination has one.
    receives_all: bool
    #: Whether the ranks' arrays must have one shape, and not only one size.
    compares_shapes: bool

    def part(self, src: Operand | None, dst: Operand | None, ranks: int) -> int:
        """Elements of one rank's part, or of the whole where there are no parts. Without `src` the verb is in place."""
        if src is not None and dst is not None and self.sends_all and not self.receives_all:
            return dst.count
        held = dst if src is None else src
        assert held is not None
        has_parts = self.sends_all if src is not None else self.sends_all or self.receives_all
        return held.count // ranks if has_parts else held.count

    def misfit(self, sent: int, received: int, ranks: int) -> str | None:
        """Why so many elements do not become so many; None where they do."""
        if self.sends_all == self.receives_all:
            return None if sent == received else "they must be equal"
        part, whole, to = (received, sent, "send") if self.sends_all else (sent, received, "receive")
        return None if whole == part * ranks else f"{ranks} ranks need {part * ranks} to {to}"

    def in_place(self, src: Operand, dst: Operand, rank: int) -> tuple[Operand | None, Operand]:
        """Source and destination; without a source where both are one, or one is this rank's part of the other.

        NCCL defines in place by the same rule.
        """
        if self.sends_all and not self.receives_all:
            return (None, src) if _is_part(dst, src, rank) else (src, dst)
        if self.receives_all and not self.sends_all:
            return (None if _is_part(src, dst, rank) else src), dst
        return (None if src.address == dst.address else src), dst


def _is_part(part: Operand, whole: Operand, rank: int) -> bool:
    return part.count > 0 and part.address == whole.address + rank * part.nbytes


def _verb(name: str, *, sends_all: bool = False, receives_all: bool = False, compares_shapes: bool = False) -> Verb:
    return Verb(name, engine.VERBS[name], sends_all, receives_all, compares_shapes)


ALL_REDUCE = _verb("all_reduce", compares_shapes=True)
REDUCE = _verb("reduce", compares_shapes=True)
BROADCAST = _verb("broadcast", compares_shapes=True)
ALL_GATHER = _verb("all_gather", receives_all=True)
GATHER = _verb("gather", receives_all=True)
SCATTER = _verb("scatter", sends_all=True)
REDUCE_SCATTER = _verb("reduce_scatter", sends_all=True)
ALL_TO_ALL = _verb("all_to_all", sends_all=True, receives_all=True)
BARRIER = _verb("barrier")

_DEFINED = engine.DEFINED


def is_defined(op: int, dtype: int) -> bool:
    """Whether a reduction is defined for elements of a type, both by their codes."""
    return (op, dtype) in _DEFINED


class Operation:
    """A verb and its operands, ready to begin: all that can be refused has been."""

    def __init__(
        self,
        raw: engine.Communicator | engine.Engine,
        call: Callable[..., engine.Handle | None],
        operands: Sequence[Operand],
        *,
        finish: Callable[[], None] | None = None,
        is_message: bool = False,
        fill: tuple[Operand, Operand] | None = None,
    ) -> None:
        self._raw = raw
        self._call = call
        #: All are in one place.
        self.operands = operands
        #: Copies the result to where the caller wants it.
        self.finish = finish
        self._is_message = is_message
        # The second is copied to the first before.
        self._fill = fill

    def begin(self, async_op: bool = False, timeout: float | None = None) -> AnyHandle | None:
        """Begins it; the handle of an asynchronous one. None for one that is done, with its results where they belong.

        NotImplementedError while the stream of its device is being captured, before anything is enqueued.
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
            # A message may go on after a wait for it that was interrupted.
            keep = operands if async_op or self._is_message else None
            done = self._call(timeout=timeout, async_op=async_op, keep=keep)
            handle = done if done is None or finish is None else Handle([done], finish)
        if done is None and finish is not None:
            finish()
        return handle


def operation(
    raw: engine.Communicator | engine.Engine,
    verb: Verb,
    src: Operand | None,
    dst: Operand | None,
    *,
    op: int = 0,
    root: int = 0,
    count: int | None = None,
    fill: Operand | None = None,
) -> Operation:
    """A verb from `src` (None: in place) to `dst`; a barrier without both.

    `count`: elements of one rank's part, where the operands have room for more. `fill` is copied to `dst` before.
    """
    held = src if dst is None else dst
    if held is None:
        return Operation(raw, partial(raw.run, verb.code, None, None, 0, engine.DTYPES["uint8"]), ())
    if count is None:
        assert isinstance(raw, engine.Communicator), "an engine's caller passes the count"
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
    raw: engine.Communicator,
    src: Operand | None,
    sends: tuple[Sequence[int], Sequence[int]],
    dst: Operand,
    receives: tuple[Sequence[int], Sequence[int]],
) -> Operation:
    """The verb with counts and displacements of its own for each rank, of what is sent and of what is received."""
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


def send(raw: engine.Communicator, src: Operand, to: int, tag: int = 0) -> Operation:
    """A message to rank `to`."""
    call = partial(raw.exchange, ((to, src.address, src.count),), (), src.dtype, tag=check_tag(tag))
    return Operation(raw, call, (src,), is_message=True)


def recv(raw: engine.Communicator, dst: Operand, sender: int | None, tag: int = 0) -> Operation:
    """The next message of rank `sender`, None for any, with this tag."""
    call = partial(raw.exchange, (), ((sender, dst.address, dst.count),), dst.dtype, tag=check_tag(tag))
    return Operation(raw, call, (dst,), finish=dst.finish, is_message=True)


def exchange(
    raw: engine.Communicator,
    sends: Sequence[tuple[int, Operand]],
    receives: Sequence[tuple[int, Operand]],
    tag: int = 0,
) -> Operation:
    """Many messages at once, of one element type, as `(peer, operand)` for each."""
    operands = [operand for _, operand in (*sends, *receives)]
    sent, received = [[(peer, x.address, x.count) for peer, x in each] for each in (sends, receives)]
    dtype = operands[0].dtype if operands else engine.DTYPES["uint8"]
    return Operation(raw, partial(raw.exchange, sent, received, dtype, tag=check_tag(tag)), operands, is_message=True)


def whole(number: int, name: str) -> int:
    """The number as an int. TypeError for one that is none, of which `int` would cut off a part."""
    try:
        return operator.index(number)
    except TypeError:
        raise TypeError(f"{name}={number!r} is not an integer") from None


def check_tag(tag: int) -> int:
    """The tag of a message. ValueError for one that the core has no room for."""
    found = whole(tag, "tag")
    if not 0 <= found < 2**32:
        raise ValueError(f"tag={found} is not between 0 and 2**32 - 1")
    return found


def check_counts(counts: Sequence[int], name: str, ranks: int) -> list[int]:
    """One number for each rank. ValueError for another number of them, and for negative ones."""
    found = [whole(count, name) for count in counts]
    if len(found) != ranks or min(found, default=0) < 0:
        raise ValueError(f"{name}={found} must be {ranks} numbers, none of them negative")
    return found


def starts(counts: Sequence[int]) -> list[int]:
    """Displacements of parts of these counts that follow each other."""
    return list(itertools.accumulate(counts, initial=0))[:-1]
