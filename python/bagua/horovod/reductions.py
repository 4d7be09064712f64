"""Operations that combine the ranks' tensors: allreduce and reducescatter, with gradients.

``average`` is the older word for ``op``; ``name`` is accepted for the scripts' sake, as operations match by
their order. Averages of whole numbers, and whole numbers times a factor, are cut towards zero.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import torch

from bagua.handle import Handle
from bagua.torch_api import process_group
from bagua.torch_api.process_group.reduce_op import check_op
from bagua.torch_operand import Adapter, divide_integers

from .compression import Compression, check_compression
from .data_movement import allgather
from .handles import together
from .process_sets import ProcessSet, global_process_set

__all__ = [
    "Adasum",
    "Average",
    "Max",
    "Min",
    "Product",
    "ReduceOp",
    "Sum",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "reducescatter",
    "reducescatter_async",
]


class ReduceOp(IntEnum):
    """How the elements of the ranks are combined."""

    Average = 0
    Sum = 1
    Adasum = 2
    Min = 3
    Max = 4
    Product = 5


#: The mean; that of integers is cut towards zero.
Average = ReduceOp.Average
#: The sum.
Sum = ReduceOp.Sum
#: Refused everywhere: it does not exist here.
Adasum = ReduceOp.Adasum
#: The smallest.
Min = ReduceOp.Min
#: The largest.
Max = ReduceOp.Max
#: The product.
Product = ReduceOp.Product

_TENSORS = Adapter()
_CORE = {
    Average: process_group.ReduceOp.AVG,
    Sum: process_group.ReduceOp.SUM,
    Min: process_group.ReduceOp.MIN,
    Max: process_group.ReduceOp.MAX,
    Product: process_group.ReduceOp.PRODUCT,
}


def _is_whole(dtype: torch.dtype) -> bool:
    return not (dtype.is_floating_point or dtype.is_complex or dtype is torch.bool)


def check_reduce_op(op: Any) -> ReduceOp:
    """The operation. TypeError for what is none, NotImplementedError for Adasum."""
    if not isinstance(op, ReduceOp):
        raise TypeError(f"op is hvd.Average, Sum, Min, Max or Product, not {op!r}")
    if op is Adasum:
        raise NotImplementedError("Adasum does not exist here: use op=hvd.Average")
    return op


@dataclass(frozen=True)
class Reduction:
    """How tensors are reduced. Raises for what cannot be, when it is made."""

    op: ReduceOp
    #: Each rank's elements are multiplied by it before they are combined.
    prescale: float
    #: The result is multiplied by it.
    postscale: float
    #: Has compress and decompress.
    compression: Any
    #: Whose ranks take part.
    process_set: ProcessSet

    def __post_init__(self) -> None:
        check_reduce_op(self.op)
        check_compression(self.compression)
        if not isinstance(self.process_set, ProcessSet):
            raise TypeError(f"process_set is a hvd.ProcessSet, not {self.process_set!r}")
        for name, factor in (("prescale_factor", self.prescale), ("postscale_factor", self.postscale)):
            if not math.isfinite(factor):
                raise ValueError(f"{name} is {factor}, which is not finite")

    def core_op(self, tensor: torch.Tensor, what: str) -> process_group.ReduceOp:
        """What the core does with a tensor, after all checks of it."""
        code = _TENSORS.check(tensor, what)
        # Whole numbers are summed, and divided afterwards.
        core = _CORE[Sum if self.op is Average and _is_whole(tensor.dtype) else self.op]
        return process_group.ReduceOp(check_op(core, code))

    def begin(self, tensor: torch.Tensor) -> torch.Tensor:
        """Multiplies in place by the first factor."""
        return _scale_(tensor, self.prescale)

    def end(self, tensor: torch.Tensor) -> torch.Tensor:
        """Makes the result of what the core computed, in place."""
        if self.op is Average and _is_whole(tensor.dtype):
            divide_integers(tensor, self.process_set.size())
        return _scale_(tensor, self.postscale)


def _scale_(tensor: torch.Tensor, factor: float) -> torch.Tensor:
    if factor == 1.0:
        return tensor
    if _is_whole(tensor.dtype):
        return tensor.copy_((tensor.double() * factor).trunc_())
    return tensor.mul_(factor)


def reduction(
    average: bool | None,
    op: ReduceOp | None,
    prescale_factor: float,
    postscale_factor: float,
    compression: Any,
    process_set: ProcessSet,
) -> Reduction:
    """The reduction that a call's arguments say. ValueError for both ``average`` and ``op``."""
    if op is not None and average is not None:
        raise ValueError("op and average say the same: give one of them")
    if op is None:
        op = Sum if average is False else Average
    return Reduction(op, float(prescale_factor), float(postscale_factor), compression, process_set)


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """The values of a tensor without gradient, in contiguous memory that may be its own."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    values = plain(tensor)
    return values.clone() if values.data_ptr() == tensor.data_ptr() else values


def check_tensors(tensors: Any, what: str) -> list[torch.Tensor]:
    """The tensors of a grouped operation. TypeError unless it is a list of tensors, ValueError if it is empty."""
    if isinstance(tensors, torch.Tensor) or not isinstance(tensors, Sequence):
        raise TypeError(f"{what} takes a list of tensors, not {type(tensors).__name__}")
    if not tensors:
        raise ValueError(f"{what}: the list of tensors is empty")
    for number, tensor in enumerate(tensors):
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{what}: tensors[{number}] is a {type(tensor).__name__}")
    return list(tensors)


@torch.no_grad()
def reduce_all(tensors: Sequence[torch.Tensor], how: Reduction, outputs: Sequence[torch.Tensor] | None) -> Handle[Any]:
    """Starts one allreduce of several tensors, or one per dtype. Results go to ``outputs``, None for new tensors."""
    communicator = how.process_set.communicator()
    for number, tensor in enumerate(tensors):
        how.core_op(tensor, f"tensors[{number}]" if len(tensors) > 1 else "tensor")
    compressed, contexts = zip(*(how.compression.compress(tensor.detach()) for tensor in tensors), strict=True)
    by_dtype: dict[torch.dtype, list[int]] = {}
    for number, tensor in enumerate(compressed):
        by_dtype.setdefault(tensor.dtype, []).append(number)
    ops = {dtype: how.core_op(compressed[members[0]], "tensor") for dtype, members in by_dtype.items()}
    parts = []
    flats: list[tuple[list[int], torch.Tensor]] = []
    for dtype, members in by_dtype.items():
        if len(members) > 1:
            flat = torch.cat([plain(compressed[number]).reshape(-1) for number in members])
        else:
            flat = _copy(compressed[members[0]])
        parts.append(communicator.allreduce_inplace(how.begin(flat), ops[dtype], async_op=True))
        flats.append((members, flat))

    @torch.no_grad()
    def finish() -> list[torch.Tensor]:
        results = list(tensors)
        for members, flat in flats:
            sizes = [compressed[number].numel() for number in members]
            pieces = torch.split(how.end(flat).view(-1), sizes)
            for number, piece in zip(members, pieces, strict=True):
                value = how.compression.decompress(piece.view(compressed[number].shape), contexts[number])
                results[number] = value if outputs is None else outputs[number].copy_(value)
        return results if outputs is None else list(outputs)

    return Handle(parts, finish)


def _first(handle: Handle[Any]) -> Handle[Any]:
    """The handle of the only tensor of a group."""
    return Handle([handle], lambda: handle.wait()[0])


def _must_be_differentiable(op: ReduceOp, what: str) -> None:
    if op not in (Average, Sum):
        raise NotImplementedError(f"{what} with {op.name} has no gradient: use Average or Sum, or a detached tensor")


class _AllReduce(torch.autograd.Function):
    """The gradient of an allreduce is reduced as the tensor was."""

    @staticmethod
    def forward(ctx: Any, how: Reduction, *tensors: torch.Tensor) -> Any:
        ctx.how = how
        results = reduce_all(tensors, how, None).wait()
        ctx.whole = [not (result.is_floating_point() or result.is_complex()) for result in results]
        ctx.mark_non_differentiable(*(result for result, whole in zip(results, ctx.whole, strict=True) if whole))
        return tuple(results)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        _must_be_differentiable(ctx.how.op, "allreduce")
        reduced = iter(
            reduce_all([grad for grad, whole in zip(grads, ctx.whole, strict=True) if not whole], ctx.how, None).wait()
        )
        return None, *(None if whole else next(reduced) for whole in ctx.whole)


def allreduce_async(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle[Any]:
    """Starts :func:`allreduce`, without compression and gradient."""
    how = reduction(average, op, prescale_factor, postscale_factor, Compression.none, process_set)
    return _first(reduce_all([tensor], how, None))


def allreduce(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: Any = Compression.none,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """A new tensor with the reduction of all ranks' tensors, by Average unless ``op`` says otherwise.

    The gradient is reduced in the same way; that of Min, Max and Product is a NotImplementedError. TypeError for a
    dtype that cannot be communicated or reduced.
    """
    how = reduction(average, op, prescale_factor, postscale_factor, compression, process_set)
    result: torch.Tensor = _AllReduce.apply(how, tensor)[0]
    return result


def allreduce_async_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle[Any]:
    """Starts :func:`allreduce_`. The tensor has the result after ``synchronize``."""
    how = reduction(average, op, prescale_factor, postscale_factor, Compression.none, process_set)
    return _first(reduce_all([tensor], how, [tensor]))


def allreduce_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """:func:`allreduce` in place, without a gradient; returns the tensor."""
    result: torch.Tensor = allreduce_async_(
        tensor, average, name, op, prescale_factor, postscale_factor, process_set
    ).wait()
    return result


def grouped_allreduce_async(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle[Any]:
    """Starts :func:`grouped_allreduce`, without compression and gradient."""
    how = reduction(average, op, prescale_factor, postscale_factor, Compression.none, process_set)
    return reduce_all(check_tensors(tensors, "grouped_allreduce"), how, None)


def grouped_allreduce(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    compression: Any = Compression.none,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """:func:`allreduce` of several tensors in one message per dtype."""
    how = reduction(average, op, prescale_factor, postscale_factor, compression, process_set)
    return list(_AllReduce.apply(how, *check_tensors(tensors, "grouped_allreduce")))


def grouped_allreduce_async_(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle[Any]:
    """Starts :func:`grouped_allreduce_`. The tensors have the results after ``synchronize``."""
    how = reduction(average, op, prescale_factor, postscale_factor, Compression.none, process_set)
    found = check_tensors(tensors, "grouped_allreduce_")
    return reduce_all(found, how, found)


def grouped_allreduce_(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """:func:`grouped_allreduce` in place, without a gradient; returns the tensors."""
    result: list[torch.Tensor] = grouped_allreduce_async_(
        tensors, average, name, op, prescale_factor, postscale_factor, process_set
    ).wait()
    return result


# --- reducescatter ----------------------------------------------------------------------------------------------------


@torch.no_grad()
def _reduce_scatter(tensor: torch.Tensor, how: Reduction) -> Handle[Any]:
    communicator = how.process_set.communicator()
    how.core_op(tensor, "tensor")
    if tensor.dim() == 0:
        raise ValueError("reducescatter needs a tensor of at least one dimension")
    compressed, context = how.compression.compress(tensor.detach())
    op = how.core_op(compressed, "tensor")
    ranks, rank = communicator.nranks(), communicator.rank()
    rows, longer = divmod(len(compressed), ranks)
    mine = rows + (rank < longer)
    if longer:
        # The core's shards are equal: the last ranks get a row more, of zeros, which they drop.
        sent = compressed.new_zeros(ranks, rows + 1, *compressed.shape[1:])
        cut = longer * (rows + 1)
        sent[:longer] = compressed[:cut].view(longer, rows + 1, *compressed.shape[1:])
        sent[longer:, :rows] = compressed[cut:].view(ranks - longer, rows, *compressed.shape[1:])
    else:
        sent = _copy(compressed)
    received = compressed.new_empty(rows + bool(longer), *compressed.shape[1:])
    part = communicator.reduce_scatter(how.begin(sent), received, op, async_op=True)

    @torch.no_grad()
    def finish() -> torch.Tensor:
        result: torch.Tensor = how.compression.decompress(how.end(received)[:mine], context)
        return result

    return Handle([part], finish)


class _ReduceScatter(torch.autograd.Function):
    """The gradient of a row is that of its result on the rank that got it; for Sum, times the number of ranks."""

    @staticmethod
    def forward(ctx: Any, how: Reduction, tensor: torch.Tensor) -> Any:
        ctx.how = how
        return _reduce_scatter(tensor, how).wait()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        how: Reduction = ctx.how
        _must_be_differentiable(how.op, "reducescatter")
        factor = how.prescale * how.postscale * (how.process_set.size() if how.op is Sum else 1)
        return None, allgather(grad, process_set=how.process_set) * factor


def reducescatter_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: ReduceOp = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle[Any]:
    """Starts :func:`reducescatter`, without compression and gradient."""
    return _reduce_scatter(
        tensor, reduction(None, op, prescale_factor, postscale_factor, Compression.none, process_set)
    )


def reducescatter(
    tensor: torch.Tensor,
    name: str | None = None,
    compression: Any = Compression.none,
    op: ReduceOp = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> torch.Tensor:
    """This rank's rows of the reduction of all ranks' tensors, which have one shape.

    Rows are shared out in the order of the ranks; where they cannot be equally, the first ranks get one more.
    ValueError for a tensor without dimensions.
    """
    how = reduction(None, op, prescale_factor, postscale_factor, compression, process_set)
    result: torch.Tensor = _ReduceScatter.apply(how, tensor)
    return result


def grouped_reducescatter_async(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    op: ReduceOp = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle[Any]:
    """Starts :func:`grouped_reducescatter`, without compression and gradient."""
    how = reduction(None, op, prescale_factor, postscale_factor, Compression.none, process_set)
    return together([_reduce_scatter(tensor, how) for tensor in check_tensors(tensors, "grouped_reducescatter")])


def grouped_reducescatter(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    compression: Any = Compression.none,
    op: ReduceOp = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[torch.Tensor]:
    """:func:`reducescatter` of several tensors, one after the other."""
    how = reduction(None, op, prescale_factor, postscale_factor, compression, process_set)
    return [_ReduceScatter.apply(how, tensor) for tensor in check_tensors(tensors, "grouped_reducescatter")]
