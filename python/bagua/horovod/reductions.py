"""allreduce, and how DistributedOptimizer reduces gradients.

``average`` is the older spelling of ``op``. ``name`` is accepted and ignored, because operations match by their order.
Averages of integers, and integers times a factor, are truncated towards zero.
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

from . import global_state
from .compression import Compression, check_compression

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
]


class ReduceOp(IntEnum):
    """How the elements of the ranks are combined."""

    Average = 0
    Sum = 1
    Adasum = 2
    Min = 3
    Max = 4
    Product = 5


#: The mean; that of integers is truncated towards zero.
Average = ReduceOp.Average
#: The sum.
Sum = ReduceOp.Sum
#: Not supported: every operation refuses it.
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


def _is_integer(dtype: torch.dtype) -> bool:
    return not (dtype.is_floating_point or dtype.is_complex or dtype is torch.bool)


@dataclass(frozen=True)
class Reduction:
    """How tensors are reduced. The constructor raises TypeError, ValueError or NotImplementedError for bad options."""

    op: ReduceOp
    #: Factor for each rank's elements before they are combined.
    prescale: float
    #: Factor for the result.
    postscale: float
    #: A class with compress and decompress.
    compression: Any

    def __post_init__(self) -> None:
        if not isinstance(self.op, ReduceOp):
            raise TypeError(f"op must be hvd.Average, Sum, Min, Max or Product, got {self.op!r}")
        if self.op is Adasum:
            raise NotImplementedError("hvd.Adasum is not supported: use op=hvd.Average")
        check_compression(self.compression)
        for name, factor in (("prescale_factor", self.prescale), ("postscale_factor", self.postscale)):
            if not math.isfinite(factor):
                raise ValueError(f"{name} must be finite, got {factor}")

    def core_op(self, tensor: torch.Tensor, what: str) -> process_group.ReduceOp:
        """Returns the core's operation for a tensor. Raises TypeError for a dtype that cannot be reduced by it."""
        code = _TENSORS.check(tensor, what)
        # Integers are summed, and divided afterwards.
        core = _CORE[Sum if self.op is Average and _is_integer(tensor.dtype) else self.op]
        return process_group.ReduceOp(check_op(core, code))

    def begin(self, tensor: torch.Tensor) -> torch.Tensor:
        """Applies the prescale factor in place."""
        return _scale_(tensor, self.prescale)

    def end(self, tensor: torch.Tensor) -> torch.Tensor:
        """Turns the core's result into the reduction's, in place."""
        if self.op is Average and _is_integer(tensor.dtype):
            divide_integers(tensor, global_state.world().nranks())
        return _scale_(tensor, self.postscale)


def _scale_(tensor: torch.Tensor, factor: float) -> torch.Tensor:
    if factor == 1.0:
        return tensor
    if _is_integer(tensor.dtype):
        return tensor.copy_((tensor.double() * factor).trunc_())
    return tensor.mul_(factor)


def _reduction(
    average: bool | None,
    op: ReduceOp | None,
    prescale_factor: float,
    postscale_factor: float,
    compression: Any = Compression.none,
) -> Reduction:
    if op is not None and average is not None:
        raise ValueError("op and average are two names of one option: give one of them")
    if op is None:
        op = Sum if average is False else Average
    return Reduction(op, float(prescale_factor), float(postscale_factor), compression)


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the values of a tensor without gradient, in contiguous memory that may be the tensor's own."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    values = _plain(tensor)
    return values.clone() if values.data_ptr() == tensor.data_ptr() else values


@torch.no_grad()
def reduce_all(tensors: Sequence[torch.Tensor], how: Reduction, outputs: Sequence[torch.Tensor] | None) -> Handle[Any]:
    """Starts one allreduce per dtype of some tensors. Results go to ``outputs``, or to new tensors if it is None."""
    communicator = global_state.world()
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
            flat = torch.cat([_plain(compressed[number]).reshape(-1) for number in members])
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


def _reduce_one(tensor: torch.Tensor, how: Reduction, output: torch.Tensor | None) -> Handle[Any]:
    handle = reduce_all([tensor], how, None if output is None else [output])
    return Handle([handle], lambda: handle.wait()[0])


class _AllReduce(torch.autograd.Function):
    """Reduces the gradient in the same way as the tensor."""

    @staticmethod
    def forward(ctx: Any, how: Reduction, tensor: torch.Tensor) -> Any:
        ctx.how = how
        result: torch.Tensor = _reduce_one(tensor, how, None).wait()
        if not (result.is_floating_point() or result.is_complex()):
            ctx.mark_non_differentiable(result)
        return result

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        if ctx.how.op not in (Average, Sum):
            raise NotImplementedError(
                f"allreduce with {ctx.how.op.name} has no gradient: use Average or Sum, or a detached tensor"
            )
        return None, _reduce_one(grad, ctx.how, None).wait()


def allreduce_async(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle[Any]:
    """Starts :func:`allreduce`, without compression and gradient."""
    return _reduce_one(tensor, _reduction(average, op, prescale_factor, postscale_factor), None)


def allreduce(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: Any = Compression.none,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> torch.Tensor:
    """Returns a new tensor with the reduction of all ranks' tensors; the default ``op`` is Average.

    The gradient is reduced in the same way; Min, Max and Product raise NotImplementedError in backward. Raises
    TypeError for a dtype that cannot be communicated or reduced.
    """
    how = _reduction(average, op, prescale_factor, postscale_factor, compression)
    result: torch.Tensor = _AllReduce.apply(how, tensor)
    return result


def allreduce_async_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle[Any]:
    """Starts :func:`allreduce_`. The tensor has the result after ``synchronize``."""
    return _reduce_one(tensor, _reduction(average, op, prescale_factor, postscale_factor), tensor)


def allreduce_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> torch.Tensor:
    """Replaces a tensor by the reduction of all ranks' tensors, without a gradient. Returns the tensor."""
    result: torch.Tensor = allreduce_async_(tensor, average, name, op, prescale_factor, postscale_factor).wait()
    return result
