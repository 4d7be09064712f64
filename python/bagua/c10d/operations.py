"""The collectives of c10d as operations of the core. These functions check arguments and send nothing.

Lists of tensors and non-contiguous tensors are copied through one contiguous memory. As with gloo, only version
counters of pure outputs are incremented, so that a program may make views of a parameter before it is broadcast.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from bagua import extension, verbs
from bagua.operand import Operand
from bagua.torch_operand import Adapter, check_kinds, check_pair, divide_integers, will_change

from .reductions import Reduction, reduction

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
    "has_equal_parts",
    "receive",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_list",
    "scatter",
    "send",
]

#: Programs for torch may communicate any dtype and view, and shapes may differ between ranks.
_TENSORS = Adapter(sends_bytes=True, copies_results=True, compares_shapes=False, then_orders=False)
_INPUT, _OUTPUT = _NAMES = ("the input", "the output")


@dataclass
class Operation:
    """An operation that is ready to start."""

    #: Name of the operation in torch's profiler.
    name: str
    #: The operation of the core.
    verb: verbs.Operation
    #: Tensors that the operation writes.
    result: list[Any]

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Memory that the operation reads and writes."""
        return [operand.owner for operand in self.verb.operands if operand.owner is not None]

    @property
    def devices(self) -> list[torch.device]:
        """CUDA devices of the operation's tensors."""
        return [tensor.device for tensor in self.tensors if tensor.is_cuda]

    def begin(self, async_op: bool, timeout: float) -> AnyHandle | None:
        """Starts the operation. Returns a handle if it is asynchronous."""
        handle = self.verb.begin(async_op, timeout)
        if handle is not None and self.verb.finish is not None:
            # Copies results even if no thread waits.
            handle.then(_ignore)
        return handle


def _ignore(_: Exception | None) -> None:
    """Ignores an error, which ``wait`` raises."""


def _root(raw: extension.Communicator, root: int) -> int:
    if not 0 <= root < raw.size:
        raise ValueError(f"rank {root} is not in a group of {raw.size}")
    return int(root)


def _reduced(mine: Operand, how: Reduction, ranks: int) -> None:
    """Divides the result of a reduction afterwards, if ``how`` requires it."""
    if not how.divides:
        return
    memory, then = mine.owner, mine.finish

    def finish() -> None:
        # Uses .data because gloo does not increment the version counter here either.
        divide_integers(memory.data, ranks)
        if then is not None:
            then()

    mine.finish = finish


def _joined(
    tensors: Sequence[Any], like: Any | None, ranks: int, what: str, *, reads: bool = False, writes: bool = False
) -> Operand:
    """Returns one operand for a list of tensors by rank, which must have the size and dtype of ``like``, if given."""
    if len(tensors) != ranks:
        raise ValueError(f"{what} has {len(tensors)} tensors for a group of {ranks} ranks")
    joined = _TENSORS.joined(tensors, what, reads=reads, writes=writes)
    if like is not None:
        check_kinds(tensors[0], like, (what, "the tensor"))
        for i, tensor in enumerate(tensors):
            if tensor.numel() != like.numel():
                raise ValueError(f"{what}[{i}] has {tensor.numel()} elements, not {like.numel()}")
    return joined


def all_reduce(raw: extension.Communicator, tensor: Any, op: Any, *, is_coalesced: bool = False) -> Operation:
    """Reduces all ranks' tensors in place on every rank. As with gloo, coalesced results count as changed."""
    how = reduction(op, getattr(tensor, "dtype", None) or torch.uint8)
    mine = _TENSORS.write(tensor, "the tensor")
    if is_coalesced:
        will_change(mine)
    _reduced(mine, how, raw.size)
    return Operation("all_reduce", verbs.operation(raw, verbs.ALL_REDUCE, None, mine, op=how.code), [tensor])


def reduce(raw: extension.Communicator, tensor: Any, op: Any, root: int) -> Operation:
    """Reduces all ranks' tensors, in place on the root. The tensors of other ranks do not change."""
    how, root = reduction(op, getattr(tensor, "dtype", None) or torch.uint8), _root(raw, root)
    if raw.rank == root:
        mine = _TENSORS.write(tensor, "the tensor")
        _reduced(mine, how, raw.size)
    else:
        mine = _TENSORS.read(tensor, "the tensor")
    return Operation("reduce", verbs.operation(raw, verbs.REDUCE, None, mine, op=how.code, root=root), [tensor])


def broadcast(raw: extension.Communicator, tensor: Any, root: int) -> Operation:
    """Copies the root's values to every rank, in place."""
    root = _root(raw, root)
    if raw.rank == root:
        mine = _TENSORS.read(tensor, "the tensor")
    else:
        mine = _TENSORS.write(tensor, "the tensor", reads=False)
    return Operation("broadcast", verbs.operation(raw, verbs.BROADCAST, None, mine, root=root), [tensor])


def _gather_all(raw: extension.Communicator, mine: Operand, room: Operand, result: list[Any]) -> Operation:
    src, dst = verbs.ALL_GATHER.in_place(mine, room, raw.rank)
    return Operation("all_gather", verbs.operation(raw, verbs.ALL_GATHER, src, dst), result)


def all_gather(raw: extension.Communicator, output: Any, tensor: Any) -> Operation:
    """Concatenates all ranks' tensors in ``output`` on every rank."""
    mine, room = _TENSORS.read(tensor, _INPUT), _TENSORS.write(output, _OUTPUT, reads=False)
    check_pair(verbs.ALL_GATHER, tensor, output, raw.size, _NAMES)
    will_change(room)
    return _gather_all(raw, mine, room, [output])


def all_gather_list(raw: extension.Communicator, outputs: Sequence[Any], tensor: Any) -> Operation:
    """Gathers all ranks' tensors in a list by rank on every rank. As in torch, sizes may differ between ranks."""
    mine = _TENSORS.read(tensor, _INPUT)
    # Every rank knows all sizes, so all ranks decide alike.
    if len({output.numel() for output in outputs if isinstance(output, torch.Tensor)}) > 1:
        return _all_gather_v(raw, outputs, tensor, mine)
    return _gather_all(raw, mine, _joined(outputs, tensor, raw.size, _OUTPUT, writes=True), list(outputs))


def _all_gather_v(raw: extension.Communicator, outputs: Sequence[Any], tensor: Any, mine: Operand) -> Operation:
    if len(outputs) == raw.size:
        own = outputs[raw.rank]
        if isinstance(own, torch.Tensor) and own.numel() != tensor.numel():
            raise ValueError(f"the output[{raw.rank}] has {own.numel()} elements, the input {tensor.numel()}")
    room = _joined(outputs, None, raw.size, _OUTPUT, writes=True)
    check_kinds(tensor, outputs[0], _NAMES)
    # Every rank gets the same elements.
    sends, starts = [mine.count] * raw.size, [0] * raw.size
    return _all_to_all_v(raw, mine, (sends, starts), room, _sizes(outputs, room), list(outputs), name="all_gather")


def gather(raw: extension.Communicator, output: Any | None, tensor: Any, root: int) -> Operation:
    """Concatenates all ranks' tensors in ``output`` on the root. Other ranks ignore ``output``."""
    mine, root = _TENSORS.read(tensor, _INPUT), _root(raw, root)
    room = None
    if raw.rank == root:
        if output is None:
            raise ValueError("the destination of gather needs an output")
        room = _TENSORS.write(output, _OUTPUT, reads=False)
        check_pair(verbs.GATHER, tensor, output, raw.size, _NAMES)
    return _gather(raw, mine, room, root, [] if room is None else [output])


def gather_list(raw: extension.Communicator, outputs: Sequence[Any], tensor: Any, root: int) -> Operation:
    """Like :func:`gather`, into a list by rank."""
    mine, root = _TENSORS.read(tensor, _INPUT), _root(raw, root)
    room = _joined(outputs, tensor, raw.size, _OUTPUT, writes=True) if raw.rank == root else None
    return _gather(raw, mine, room, root, list(outputs))


def _gather(
    raw: extension.Communicator, mine: Operand, room: Operand | None, root: int, result: list[Any]
) -> Operation:
    src, dst = (mine, room) if room is None else verbs.GATHER.in_place(mine, room, root)
    return Operation("gather", verbs.operation(raw, verbs.GATHER, src, dst, root=root), result)


def scatter(raw: extension.Communicator, output: Any, tensors: Sequence[Any], root: int) -> Operation:
    """Sends the root's tensor number r to rank r. Other ranks ignore ``tensors``."""
    root = _root(raw, root)
    mine = _TENSORS.write(output, _OUTPUT, reads=False)
    held = _joined(tensors, output, raw.size, _INPUT, reads=True) if raw.rank == root else mine.nothing()
    return Operation("scatter", verbs.operation(raw, verbs.SCATTER, held, mine, root=root), [output])


def reduce_scatter(raw: extension.Communicator, output: Any, tensor: Any, op: Any) -> Operation:
    """Reduces all ranks' tensors and gives part r of the result to rank r."""
    how = reduction(op, getattr(tensor, "dtype", None) or torch.uint8)
    room, mine = _TENSORS.read(tensor, _INPUT), _TENSORS.write(output, _OUTPUT, reads=False)
    check_pair(verbs.REDUCE_SCATTER, tensor, output, raw.size, _NAMES)
    return _reduce_scatter(raw, room, mine, output, how)


def reduce_scatter_list(raw: extension.Communicator, output: Any, tensors: Sequence[Any], op: Any) -> Operation:
    """Like :func:`reduce_scatter`, with a list by rank. Its tensors may have different sizes."""
    how = reduction(op, getattr(output, "dtype", None) or torch.uint8)
    mine = _TENSORS.write(output, _OUTPUT, reads=False)
    if len({tensor.numel() for tensor in tensors if isinstance(tensor, torch.Tensor)}) > 1:
        return _reduce_scatter_v(raw, output, tensors, how)
    return _reduce_scatter(raw, _joined(tensors, output, raw.size, _INPUT, reads=True), mine, output, how)


def _reduce_scatter_v(
    raw: extension.Communicator, output: torch.Tensor, tensors: Sequence[Any], how: Reduction
) -> Operation:
    """Reduces and scatters parts of different sizes, equal on all ranks. Each part is padded to the largest."""
    if len(tensors) != raw.size:
        raise ValueError(f"{_INPUT} has {len(tensors)} tensors for a group of {raw.size} ranks")
    for i, tensor in enumerate(tensors):
        _TENSORS.check(tensor, f"{_INPUT}[{i}]")
        check_kinds(tensor, output, (f"{_INPUT}[{i}]", _OUTPUT))
    own = tensors[raw.rank].numel()
    if own != output.numel():
        raise ValueError(f"{_INPUT}[{raw.rank}] has {own} elements, {_OUTPUT} {output.numel()}")
    width = max(tensor.numel() for tensor in tensors)
    room = torch.zeros(raw.size, width, dtype=output.dtype, device=output.device)
    part = torch.empty(width, dtype=output.dtype, device=output.device)
    with torch.no_grad():
        for row, tensor in zip(room, tensors, strict=True):
            row[: tensor.numel()].copy_(tensor.reshape(-1))

    def finish() -> None:
        with torch.no_grad():
            output.detach().copy_(part[:own].view(output.shape))

    mine = _TENSORS.write(part, _OUTPUT, reads=False)
    mine.finish = finish
    return _reduce_scatter(raw, _TENSORS.read(room, _INPUT), mine, output, how)


def _reduce_scatter(
    raw: extension.Communicator, room: Operand, mine: Operand, output: Any, how: Reduction
) -> Operation:
    _reduced(mine, how, raw.size)
    src, dst = verbs.REDUCE_SCATTER.in_place(room, mine, raw.rank)
    dst.results, dst.finish = mine.results, mine.finish
    will_change(dst)
    return Operation("reduce_scatter", verbs.operation(raw, verbs.REDUCE_SCATTER, src, dst, op=how.code), [output])


def _rows(tensor: torch.Tensor) -> int:
    return tensor.shape[0] if tensor.dim() else 1


def has_equal_parts(tensors: Sequence[Any], ranks: int) -> bool:
    """Returns True if all arguments are tensors with a number of rows that is a multiple of ``ranks``."""
    return all(isinstance(tensor, torch.Tensor) and _rows(tensor) % ranks == 0 for tensor in tensors)


def _counts(splits: Sequence[int], tensor: torch.Tensor, room: Operand, ranks: int, what: str) -> list[int]:
    """Returns the number of elements to or from each rank (bytes for a dtype that the core does not know)."""
    rows = _rows(tensor)
    if not splits:
        if rows % ranks:
            raise ValueError(f"{what} has {rows} rows, which {ranks} ranks cannot divide evenly")
        return [room.count // ranks] * ranks
    sizes = [int(size) for size in splits]
    if len(sizes) != ranks or min(sizes) < 0 or sum(sizes) != rows:
        raise ValueError(f"{what} has {rows} rows: the splits {sizes} do not divide them among {ranks} ranks")
    row = room.count // rows if rows else 0
    return [size * row for size in sizes]


def all_to_all(
    raw: extension.Communicator, output: Any, tensor: Any, output_splits: Sequence[int], input_splits: Sequence[int]
) -> Operation:
    """Sends part r of the tensor to rank r. Splits are numbers of rows per rank; without splits, parts are equal."""
    mine, room = _TENSORS.read(tensor, _INPUT), _TENSORS.write(output, _OUTPUT, reads=False)
    check_kinds(tensor, output, _NAMES)
    sends = _counts(input_splits, tensor, mine, raw.size, _INPUT)
    recvs = _counts(output_splits, output, room, raw.size, _OUTPUT)
    if not output_splits and not input_splits:
        check_pair(verbs.ALL_TO_ALL, tensor, output, raw.size, _NAMES)
        return Operation("all_to_all", verbs.operation(raw, verbs.ALL_TO_ALL, mine, room), [output])
    return _all_to_all_v(raw, mine, (sends, verbs.starts(sends)), room, recvs, [output])


def all_to_all_list(raw: extension.Communicator, outputs: Sequence[Any], tensors: Sequence[Any]) -> Operation:
    """Sends tensor number r to rank r, and receives a list by rank. Sizes may differ."""
    mine = _joined(tensors, None, raw.size, _INPUT, reads=True)
    room = _joined(outputs, None, raw.size, _OUTPUT, writes=True)
    check_kinds(tensors[0], outputs[0], _NAMES)
    sends = _sizes(tensors, mine)
    return _all_to_all_v(raw, mine, (sends, verbs.starts(sends)), room, _sizes(outputs, room), list(outputs))


def _sizes(tensors: Sequence[torch.Tensor], joined: Operand) -> list[int]:
    """Returns the elements of each joined tensor (bytes for a dtype that the core does not know)."""
    unit = joined.count // joined.owner.numel() if joined.count else 1
    return [tensor.numel() * unit for tensor in tensors]


def _all_to_all_v(
    raw: extension.Communicator,
    mine: Operand,
    sends: tuple[list[int], list[int]],
    room: Operand,
    recvs: list[int],
    result: list[Any],
    *,
    name: str = "all_to_all",
) -> Operation:
    return Operation(name, verbs.all_to_all_v(raw, mine, sends, room, (recvs, verbs.starts(recvs))), result)


def barrier(raw: extension.Communicator) -> Operation:
    """Completes when every rank has called it."""
    return Operation("barrier", verbs.operation(raw, verbs.BARRIER, None, None), [])


def send(raw: extension.Communicator, tensor: Any, to: int, tag: int) -> Operation:
    """Sends a message to rank ``to``."""
    tag = verbs.check_tag(tag)
    held = _TENSORS.read(tensor, "the tensor")
    return Operation("send", verbs.send(raw, held, to, tag), [tensor])


def receive(raw: extension.Communicator, tensor: Any, sender: int | None, tag: int) -> Operation:
    """Receives the next message with this tag from rank ``sender``; None means any rank."""
    tag = verbs.check_tag(tag)
    room = _TENSORS.write(tensor, "the tensor", reads=False)
    return Operation("recvAnySource" if sender is None else "recv", verbs.recv(raw, room, sender, tag), [tensor])
