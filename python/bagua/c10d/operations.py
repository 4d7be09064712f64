"""The verbs of c10d as operations of the core: arguments are checked here, and nothing is sent.

What has to be copied (lists of tensors, tensors that are not contiguous) goes through one contiguous memory.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from bagua import engine
from bagua.handle import Handle

from .operands import Operand, gathered, inout, reduction, source, target, whole

if TYPE_CHECKING:
    from bagua.handle import AnyHandle

__all__ = [
    "Operation",
    "all_gather",
    "all_gather_list",
    "all_reduce",
    "all_to_all",
    "all_to_all_list",
    "barrier",
    "broadcast",
    "gather",
    "gather_list",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_list",
    "scatter",
]

_UINT8 = engine.DTYPES["uint8"]


class Begin:
    """Starts a verb: (asynchronous, seconds) -> the handle of an asynchronous operation."""

    def __init__(
        self,
        raw: engine.Communicator,
        verb: Callable[..., engine.Handle | None],
        keep: Sequence[Operand | None],
        *,
        message: bool = False,
    ) -> None:
        self._raw = raw
        self._message = message
        self._verb = verb
        self._keep = keep
        # All are at one place.
        self._device = next((held.memory.device for held in keep if held is not None), torch.device("cpu"))

    @property
    def on_device(self) -> bool:
        """Whether its tensors are on a CUDA device."""
        return self._device.type == "cuda"

    @property
    def devices(self) -> list[torch.device]:
        """The CUDA device of its tensors; none for those on the host."""
        return [self._device] if self.on_device else []

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The memory that it reads and writes."""
        return [held.memory for held in self._keep if held is not None]

    def __call__(self, async_op: bool, timeout: float, finish: Callable[[], None] | None = None) -> AnyHandle | None:
        """`finish` copies the results to where the caller wants them; the operation is done when it has run."""
        handle: AnyHandle | None
        if self.on_device:
            # Here, because importing bagua.cuda decides to which process CUDA belongs.
            from bagua.cuda.tensors import TensorPlace

            place = TensorPlace(self._device)
            call = place.call_messages(self._raw) if self._message else place.call(self._raw)
            raw = self._verb(timeout=timeout, async_op=async_op, keep=self._keep, place=call)
            handle = place.handle(raw, finish, then_orders=False)
        else:
            handle = self._verb(timeout=timeout, async_op=async_op, keep=self._keep)
            if handle is not None and finish is not None:
                handle = Handle([handle], finish)
        if finish is not None:
            if handle is None:
                finish()
            else:
                # Results are copied whether or not a thread waits.
                handle.then(_ignore)
        return handle


def _ignore(_: Exception | None) -> None:
    """An error is what `wait` raises."""


@dataclass
class Operation:
    """What is ready to be started."""

    #: The verb, as torch's profiler calls it.
    name: str
    #: (asynchronous, seconds, `finish`) -> the handle of an asynchronous operation.
    begin: Begin
    #: The tensors that are written.
    result: list[torch.Tensor]
    #: Copies the results to them.
    finish: Callable[[], None] | None = None


def _run(
    raw: engine.Communicator,
    verb: int,
    src: int | None,
    dst: int | None,
    count: int,
    code: int,
    *,
    op: int = 0,
    root: int = 0,
    keep: Sequence[Operand | None],
) -> Begin:
    return Begin(raw, partial(raw.run, verb, src, dst, count, code, op, root), keep)


def _root(raw: engine.Communicator, root: int) -> int:
    if not 0 <= root < raw.size:
        raise ValueError(f"rank {root} is not in a group of {raw.size}")
    return int(root)


def _divide(memory: torch.Tensor, ranks: int, then: Callable[[], None] | None) -> Callable[[], None]:
    def finish() -> None:
        memory.copy_(torch.div(memory, ranks, rounding_mode="trunc"))
        if then is not None:
            then()

    return finish


def _same_kind(one: torch.Tensor, other: torch.Tensor) -> None:
    if one.dtype != other.dtype:
        raise TypeError(f"the input has dtype {one.dtype}, the output {other.dtype}: they must be equal")
    if one.device != other.device:
        raise TypeError(f"the input is on {one.device}, the output on {other.device}: they must be in one place")


def _require(right: bool, inputs: int, outputs: int, ranks: int) -> None:
    if not right:
        raise ValueError(f"an input of {inputs} elements does not fit an output of {outputs} for {ranks} ranks")


def all_reduce(raw: engine.Communicator, tensor: Any, op: Any) -> Operation:
    """Every rank gets the reduction of all, in place."""
    how = reduction(op, getattr(tensor, "dtype", None) or torch.uint8)
    mine = inout(tensor, "the tensor")
    begin = _run(raw, engine.ALL_REDUCE, None, mine.address, mine.numel, mine.code, op=how.code, keep=[mine])
    finish = _divide(mine.memory, raw.size, mine.finish) if how.divides else mine.finish
    return Operation("all_reduce", begin, [tensor], finish)


def reduce(raw: engine.Communicator, tensor: Any, op: Any, root: int) -> Operation:
    """The root gets the reduction, in place; the tensors of the others do not change."""
    how, root = reduction(op, getattr(tensor, "dtype", None) or torch.uint8), _root(raw, root)
    here = raw.rank == root
    mine = inout(tensor, "the tensor") if here else source(tensor, "the tensor")
    begin = _run(raw, engine.REDUCE, None, mine.address, mine.numel, mine.code, op=how.code, root=root, keep=[mine])
    finish = _divide(mine.memory, raw.size, mine.finish) if how.divides and here else mine.finish
    return Operation("reduce", begin, [tensor], finish)


def broadcast(raw: engine.Communicator, tensor: Any, root: int) -> Operation:
    """Every rank gets the root's values, in place."""
    root = _root(raw, root)
    mine = source(tensor, "the tensor") if raw.rank == root else target(tensor, "the tensor")
    begin = _run(raw, engine.BROADCAST, None, mine.address, mine.numel, mine.code, root=root, keep=[mine])
    return Operation("broadcast", begin, [tensor], mine.finish)


def _gather_all(raw: engine.Communicator, mine: Operand, room: Operand, result: list[torch.Tensor]) -> Operation:
    # The input may be the output's own part: the core takes that as in place.
    size = 1 if mine.numel == 0 else mine.memory.numel() * mine.memory.element_size() // mine.numel
    inside = mine.numel > 0 and mine.address == room.address + raw.rank * mine.numel * size
    src = None if inside else mine.address
    begin = _run(raw, engine.ALL_GATHER, src, room.address, mine.numel, mine.code, keep=[mine, room])
    return Operation("all_gather", begin, result, room.finish)


def all_gather(raw: engine.Communicator, output: Any, tensor: Any) -> Operation:
    """Every rank gets every rank's tensor, one after the other in `output`."""
    mine = source(tensor, "the input")
    _same_kind(tensor, output)
    _require(output.numel() == tensor.numel() * raw.size, tensor.numel(), output.numel(), raw.size)
    return _gather_all(raw, mine, target(output, "the output"), [output])


def all_gather_list(raw: engine.Communicator, outputs: Sequence[Any], tensor: Any) -> Operation:
    """Every rank gets every rank's tensor, in a list by rank; sizes may differ between ranks, as torch documents."""
    mine = source(tensor, "the input")
    # Every rank has the sizes of all, so all ranks decide alike.
    if len({output.numel() for output in outputs if isinstance(output, torch.Tensor)}) > 1:
        return _all_gather_v(raw, outputs, tensor, mine)
    return _gather_all(raw, mine, gathered(outputs, tensor, raw.size, "the output"), list(outputs))


def _all_gather_v(raw: engine.Communicator, outputs: Sequence[Any], tensor: Any, mine: Operand) -> Operation:
    if len(outputs) == raw.size:
        own = outputs[raw.rank]
        if isinstance(own, torch.Tensor) and own.numel() != tensor.numel():
            raise ValueError(f"the output[{raw.rank}] has {own.numel()} elements, the input {tensor.numel()}")
        _same_kind(tensor, outputs[0])
    room = gathered(outputs, None, raw.size, "the output")
    # Bytes where the core has no code. Not all are empty, or they would be equal.
    unit = room.numel // room.memory.numel()
    recvs = [output.numel() * unit for output in outputs]
    # Every rank gets the same elements.
    sends, starts = [mine.numel] * raw.size, [0] * raw.size
    return _all_to_all_v(raw, mine, sends, room, recvs, list(outputs), name="all_gather", send_starts=starts)


def gather(raw: engine.Communicator, output: Any | None, tensor: Any, root: int) -> Operation:
    """The root gets every rank's tensor, one after the other; `output` is read there alone."""
    mine, root = source(tensor, "the input"), _root(raw, root)
    room = None
    if raw.rank == root:
        if output is None:
            raise ValueError("the destination of gather needs an output")
        _same_kind(tensor, output)
        _require(output.numel() == tensor.numel() * raw.size, tensor.numel(), output.numel(), raw.size)
        room = target(output, "the output")
    return _gather(raw, mine, room, root, [] if room is None else [output])


def gather_list(raw: engine.Communicator, outputs: Sequence[Any], tensor: Any, root: int) -> Operation:
    """As :func:`gather`, into a list by rank."""
    mine, root = source(tensor, "the input"), _root(raw, root)
    room = gathered(outputs, tensor, raw.size, "the output") if raw.rank == root else None
    return _gather(raw, mine, room, root, list(outputs))


def _gather(
    raw: engine.Communicator, mine: Operand, room: Operand | None, root: int, result: list[torch.Tensor | Any]
) -> Operation:
    whole_at = None if room is None else room.address
    begin = _run(raw, engine.GATHER, mine.address, whole_at, mine.numel, mine.code, root=root, keep=[mine, room])
    return Operation("gather", begin, result, None if room is None else room.finish)


def scatter(raw: engine.Communicator, output: Any, tensors: Sequence[Any], root: int) -> Operation:
    """Rank r gets the root's r-th tensor; `tensors` is read there alone."""
    root = _root(raw, root)
    # Read at the root only. None would mean in place.
    address, held = 0, None
    if raw.rank == root:
        held = whole(tensors, output, raw.size, "the input")
        address = held.address
    mine = target(output, "the output")
    begin = _run(raw, engine.SCATTER, address, mine.address, mine.numel, mine.code, root=root, keep=[mine, held])
    return Operation("scatter", begin, [output], mine.finish)


def reduce_scatter(raw: engine.Communicator, output: Any, tensor: Any, op: Any) -> Operation:
    """Rank r gets the reduction of every rank's r-th part."""
    how = reduction(op, getattr(tensor, "dtype", None) or torch.uint8)
    room = source(tensor, "the input")
    _same_kind(tensor, output)
    _require(output.numel() * raw.size == tensor.numel(), tensor.numel(), output.numel(), raw.size)
    return _reduce_scatter(raw, room, output, how.code, how.divides)


def reduce_scatter_list(raw: engine.Communicator, output: Any, tensors: Sequence[Any], op: Any) -> Operation:
    """As :func:`reduce_scatter`, of a list by rank."""
    how = reduction(op, getattr(output, "dtype", None) or torch.uint8)
    return _reduce_scatter(raw, whole(tensors, output, raw.size, "the input"), output, how.code, how.divides)


def _reduce_scatter(raw: engine.Communicator, room: Operand, output: Any, op: int, divides: bool) -> Operation:
    inside = output.numel() > 0 and output.data_ptr() == room.address + raw.rank * output.numel() * output.itemsize
    mine = target(output, "the output")
    # NCCL defines in place by the same rule.
    src, dst = (None, room.address) if inside and mine.finish is None else (room.address, mine.address)
    begin = _run(raw, engine.REDUCE_SCATTER, src, dst, mine.numel, mine.code, op=op, keep=[mine, room])
    finish = _divide(mine.memory, raw.size, mine.finish) if divides else mine.finish
    return Operation("reduce_scatter", begin, [output], finish)


def _counts(splits: Sequence[int], tensor: torch.Tensor, room: Operand, ranks: int, what: str) -> list[int]:
    """Elements (bytes where the core has no code) to or from each rank."""
    if not splits:
        return [room.chunk(ranks, what)] * ranks
    rows = tensor.shape[0] if tensor.dim() else 1
    sizes = [int(size) for size in splits]
    if len(sizes) != ranks or min(sizes) < 0 or sum(sizes) != rows:
        raise ValueError(f"{what} has {rows} rows: the splits {sizes} do not divide them among {ranks} ranks")
    row = room.numel // rows if rows else 0
    return [size * row for size in sizes]


def all_to_all(
    raw: engine.Communicator, output: Any, tensor: Any, output_splits: Sequence[int], input_splits: Sequence[int]
) -> Operation:
    """Rank r gets the r-th part of every rank's tensor. Splits are rows for each rank; none: equal parts."""
    mine = source(tensor, "the input")
    _same_kind(tensor, output)
    sends = _counts(input_splits, tensor, mine, raw.size, "the input")
    shape = source(output, "the output")
    recvs = _counts(output_splits, output, shape, raw.size, "the output")
    room = target(output, "the output")
    if not output_splits and not input_splits:
        _require(output.numel() == tensor.numel(), tensor.numel(), output.numel(), raw.size)
        begin = _run(raw, engine.ALL_TO_ALL, mine.address, room.address, sends[0], mine.code, keep=[mine, room])
        return Operation("all_to_all", begin, [output], room.finish)
    return _all_to_all_v(raw, mine, sends, room, recvs, [output])


def all_to_all_list(raw: engine.Communicator, outputs: Sequence[Any], tensors: Sequence[Any]) -> Operation:
    """Rank r gets every rank's r-th tensor, in a list by rank; sizes may differ."""
    mine = whole(tensors, None, raw.size, "the input")
    room = gathered(outputs, None, raw.size, "the output")
    _same_kind(tensors[0], outputs[0])
    # Bytes where the core has no code.
    unit = 1 if mine.memory.numel() == 0 else mine.numel // mine.memory.numel()
    sends = [tensor.numel() * unit for tensor in tensors]
    unit = 1 if room.memory.numel() == 0 else room.numel // room.memory.numel()
    recvs = [tensor.numel() * unit for tensor in outputs]
    return _all_to_all_v(raw, mine, sends, room, recvs, list(outputs))


def _all_to_all_v(
    raw: engine.Communicator,
    mine: Operand,
    sends: list[int],
    room: Operand,
    recvs: list[int],
    result: list[torch.Tensor],
    *,
    name: str = "all_to_all",
    send_starts: list[int] | None = None,
) -> Operation:
    starts = [list(itertools.accumulate(counts, initial=0))[:-1] for counts in (sends, recvs)]
    if send_starts is not None:
        starts[0] = send_starts

    verb = partial(
        raw.all_to_all_v,
        mine.address,
        mine.numel,
        room.address,
        room.numel,
        mine.code,
        sends,
        starts[0],
        recvs,
        starts[1],
    )
    begin = Begin(raw, verb, [mine, room])
    return Operation(name, begin, result, room.finish)


def barrier(raw: engine.Communicator) -> Operation:
    """Done when every rank has called it."""
    return Operation("barrier", _run(raw, engine.BARRIER, None, None, 0, _UINT8, keep=[]), [])
