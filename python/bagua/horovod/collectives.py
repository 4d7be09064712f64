"""Collectives on CPU tensors, and on objects.

``name`` is accepted and ignored, because operations match by their order. The forms with ``_async`` return a handle for
``synchronize`` and have no gradient.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from bagua.handle import Handle
from bagua.torch_api.process_group import ReduceOp
from bagua.torch_api.process_group.reduce_op import check_op
from bagua.torch_operand import Adapter, check_on_cpu, divide_integers
from bagua.verbs import starts

from .basics import rank, size, world
from .unsupported import Unsupported

_TENSORS = Adapter()


def _check(tensor: Any, what: str) -> int:
    """Returns the core's code of a tensor's dtype. Raises TypeError or NotImplementedError if it cannot be sent."""
    code = _TENSORS.check(tensor, what)
    check_on_cpu(tensor, what)
    return code


class _Differentiable(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, handle: Handle[Any], back: Callable[[torch.Tensor], Any]) -> Any:
        ctx.back = back
        return handle.wait()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return ctx.back(grad), None, None


def _differentiable(tensor: torch.Tensor, handle: Handle[Any], back: Callable[[torch.Tensor], Any]) -> torch.Tensor:
    """Returns a handle's result. ``back`` turns the result's gradient into the tensor's."""
    result: torch.Tensor = _Differentiable.apply(tensor, handle, back)
    return result


def _into(tensor: torch.Tensor, handle: Handle[Any]) -> Handle[Any]:
    """Returns a handle whose result is ``tensor``, with the values of another handle's result."""

    @torch.no_grad()
    def finish() -> torch.Tensor:
        return tensor.copy_(handle.wait())

    return Handle([handle], finish)


#: The mean. Means of integers are truncated towards zero.
Average = ReduceOp.AVG
#: The sum.
Sum = ReduceOp.SUM
#: The smallest.
Min = ReduceOp.MIN
#: The largest.
Max = ReduceOp.MAX
#: The product.
Product = ReduceOp.PRODUCT


class _Cast:
    """Sends real floating-point tensors in another dtype, and others as they are. None keeps every dtype."""

    def __init__(self, dtype: torch.dtype | None) -> None:
        self._dtype = dtype

    def compress(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        dtype = self._dtype if tensor.is_floating_point() else None
        return tensor.to(dtype or tensor.dtype), tensor.dtype

    def decompress(self, tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        return tensor.to(ctx)


class Compression:
    """Codecs for tensors that are reduced.

    ``none`` changes nothing. ``fp16`` sends floating-point tensors as float16: values beyond 65504 become infinite. A
    class of your own needs the static methods ``compress(tensor)``, which returns the tensor to communicate and a
    context, and ``decompress(tensor, context)``.
    """

    none = _Cast(None)
    fp16 = _Cast(torch.float16)


def _is_integer(tensor: torch.Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype is torch.bool)


def _scale_(tensor: torch.Tensor, factor: float) -> torch.Tensor:
    if factor == 1.0:
        return tensor
    return tensor.copy_((tensor.double() * factor).trunc_()) if _is_integer(tensor) else tensor.mul_(factor)


@dataclass(frozen=True)
class Reduction:
    """How tensors are reduced: by ``op``, with a factor before and after it, in the dtype of ``compression``."""

    op: ReduceOp = Average
    prescale_factor: float = 1.0
    postscale_factor: float = 1.0
    compression: Any = Compression.none

    def __post_init__(self) -> None:
        if isinstance(self.op, Unsupported):
            self.op()
        if not isinstance(self.op, ReduceOp):
            raise TypeError(f"op must be hvd.Average, hvd.Sum, hvd.Min, hvd.Max or hvd.Product, got {self.op!r}")

    def core_op(self, tensor: torch.Tensor, what: str) -> ReduceOp:
        """Returns the core's reduction for a tensor. Raises TypeError or NotImplementedError if there is none."""
        # The core has no average of integers: `start` divides their sum.
        core = Sum if self.op is Average and _is_integer(tensor) else self.op
        return ReduceOp(check_op(core, _check(tensor, what)))

    @torch.no_grad()
    def start(self, tensor: torch.Tensor, *, overwrite: bool = False) -> Handle[Any]:
        """Starts to reduce a tensor. The result is another tensor. With ``overwrite`` it may have the same memory."""
        _check(tensor, "tensor")
        values = tensor.detach().resolve_conj().resolve_neg()
        compressed, context = self.compression.compress(values)
        sent = compressed.contiguous()
        if sent.data_ptr() == values.data_ptr() and not overwrite:
            sent = sent.clone()
        op = self.core_op(sent, "tensor")
        part = world().allreduce_inplace(_scale_(sent, self.prescale_factor), op, async_op=True)

        @torch.no_grad()
        def finish() -> Any:
            if self.op is Average and _is_integer(sent):
                divide_integers(sent, size())
            return self.compression.decompress(_scale_(sent, self.postscale_factor), context)

        return Handle([part], finish)


def _reduction(average: bool | None, op: ReduceOp | None, *options: Any) -> Reduction:
    if op is not None and average is not None:
        raise ValueError("op and average are two names of one option: give one of them")
    return Reduction((Sum if average is False else Average) if op is None else op, *options)


def allreduce(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: Any = Compression.none,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> torch.Tensor:
    """Returns a new tensor with the reduction of all ranks' tensors, which have one shape and dtype.

    The default ``op`` is Average; ``average`` is its older spelling. Each rank's elements are multiplied by
    ``prescale_factor`` and the result by ``postscale_factor``; integers are then truncated towards zero.

    The gradient is reduced in the same way; Min, Max and Product raise NotImplementedError in backward. Raises
    TypeError for a dtype that cannot be communicated or reduced.
    """
    how = _reduction(average, op, prescale_factor, postscale_factor, compression)

    def back(grad: torch.Tensor) -> Any:
        if how.op not in (Average, Sum):
            raise NotImplementedError(
                f"allreduce with {how.op.name} has no gradient: use Average or Sum, or a detached tensor"
            )
        return how.start(grad).wait()

    return _differentiable(tensor, how.start(tensor), back)


def allreduce_async(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle[Any]:
    """Starts :func:`allreduce`, without compression."""
    return _reduction(average, op, prescale_factor, postscale_factor).start(tensor)


def allreduce_async_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle[Any]:
    """Starts :func:`allreduce_`. The tensor has the result after ``synchronize``."""
    return _into(tensor, allreduce_async(tensor, average, name, op, prescale_factor, postscale_factor))


def allreduce_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> torch.Tensor:
    """Replaces a tensor by the reduction of all ranks' tensors, without a gradient. Returns the tensor."""
    allreduce_async_(tensor, average, name, op, prescale_factor, postscale_factor).wait()
    return tensor


def _exchange(tensor: torch.Tensor, rows: Sequence[int] | None = None) -> tuple[Handle[Any], list[int]]:
    """Starts to send ``rows[r]`` rows to each rank r, one part after the other; without ``rows``, all rows to each.

    Waits until every rank has called it, because the ranks exchange their numbers of rows first. Also returns how many
    rows come from each rank.
    """
    _check(tensor, "tensor")
    communicator, ranks = world(), size()
    going = [len(tensor)] * ranks if rows is None else list(rows)
    table = torch.empty(ranks, dtype=torch.int64)
    communicator.alltoall(torch.tensor(going, dtype=torch.int64), table)
    coming: list[int] = table.tolist()
    sent, received = tensor.detach(), tensor.detach().new_empty(sum(coming), *tensor.shape[1:])
    if rows is None and len(set(coming)) == 1:
        part = communicator.allgather(sent, received, async_op=True)
    else:
        width = math.prod(tensor.shape[1:])
        out, into = [count * width for count in going], [count * width for count in coming]
        places = [0] * ranks if rows is None else starts(out)
        part = communicator.alltoall_v(sent, out, places, received, into, starts(into), async_op=True)
    return Handle([part], lambda: received), coming


def allgather_async(tensor: torch.Tensor, name: str | None = None) -> Handle[Any]:
    """Starts :func:`allgather`. Returns when every rank has called it."""
    return _exchange(tensor)[0]


def allgather(tensor: torch.Tensor, name: str | None = None) -> torch.Tensor:
    """Returns all ranks' tensors, joined along the first dimension, in which alone they may differ.

    The gradient is the average over the ranks of the gradients of this rank's rows. Raises TypeError for a tensor
    without dimensions or with a dtype that cannot be communicated, and MismatchError on every rank if dtypes or the
    sizes of rows differ.
    """
    handle, coming = _exchange(tensor)
    first = sum(coming[: rank()])
    mine = slice(first, first + len(tensor))
    return _differentiable(tensor, handle, lambda grad: Reduction().start(grad).wait()[mine])


def broadcast_async(tensor: torch.Tensor, root_rank: int, name: str | None = None) -> Handle[Any]:
    """Starts :func:`broadcast`."""
    _check(tensor, "the tensor of broadcast")
    values = tensor.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
    return Handle([world().broadcast(values, root_rank, async_op=True)], lambda: values)


def broadcast(tensor: torch.Tensor, root_rank: int, name: str | None = None) -> torch.Tensor:
    """Returns a new tensor with the values of ``root_rank``'s tensor, which has the same shape and dtype.

    The gradient on the root is the average of all ranks' gradients, and zero on the other ranks. Raises ValueError if
    ``root_rank`` is not a rank of the job, and TypeError for a dtype that cannot be communicated.
    """

    def back(grad: torch.Tensor) -> Any:
        mean = Reduction().start(grad).wait()
        return mean if rank() == root_rank else mean.zero_()

    return _differentiable(tensor, broadcast_async(tensor, root_rank), back)


def broadcast_async_(tensor: torch.Tensor, root_rank: int, name: str | None = None) -> Handle[Any]:
    """Starts :func:`broadcast_`. The tensor has the root's values after ``synchronize`` of the returned handle."""
    return _into(tensor, broadcast_async(tensor, root_rank))


def broadcast_(tensor: torch.Tensor, root_rank: int, name: str | None = None) -> torch.Tensor:
    """Gives a tensor the values of ``root_rank``'s tensor, without a gradient. Returns the tensor."""
    broadcast_async_(tensor, root_rank).wait()
    return tensor


def _rows(tensor: Any, splits: torch.Tensor | Sequence[int] | None) -> list[int]:
    count, ranks = len(tensor), size()
    rows = [count // ranks] * ranks if splits is None else [operator.index(split) for split in splits]
    if len(rows) != ranks or min(rows) < 0 or sum(rows) > count or (splits is None and count % ranks):
        given = "" if splits is None else f" by splits {rows}"
        raise ValueError(f"alltoall: {count} rows cannot be divided among {ranks} ranks{given}")
    return rows


def alltoall_async(
    tensor: torch.Tensor, splits: torch.Tensor | Sequence[int] | None = None, name: str | None = None
) -> Handle[Any]:
    """Starts :func:`alltoall`. Returns when every rank has called it."""
    handle, coming = _exchange(tensor, _rows(tensor, splits))
    if splits is None:
        return handle
    return Handle([handle], lambda: (handle.wait(), torch.tensor(coming, dtype=torch.int32)))


def alltoall(
    tensor: torch.Tensor, splits: torch.Tensor | Sequence[int] | None = None, name: str | None = None
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Returns the rows that all ranks sent to this one, in the order of the ranks.

    Without ``splits`` a tensor's rows are divided evenly. With them, ``splits[r]`` rows go to rank r, and the result is
    a pair: the rows, and how many came from each rank (int32). The gradient of a row is the gradient of the row where
    it went. Raises ValueError for splits that do not fit, and MismatchError as :func:`allgather` does.
    """
    rows = _rows(tensor, splits)
    handle, coming = _exchange(tensor, rows)
    shape = tensor.shape

    def back(grad: torch.Tensor) -> torch.Tensor:
        whole = grad.new_zeros(shape)
        whole[: sum(rows)] = _exchange(grad, coming)[0].wait()
        return whole

    result = _differentiable(tensor, handle, back)
    return result if splits is None else (result, torch.tensor(coming, dtype=torch.int32))


def barrier() -> None:
    """Blocks until every rank has called it."""
    world().barrier()


def broadcast_object(obj: Any, root_rank: int = 0, name: str | None = None) -> Any:
    """Returns the object of ``root_rank``, a rank of the job. Ignores the other ranks' objects, and sends this one by
    pickle.

    Unpickling runs code that the root chooses. Errors are those of :func:`bagua.broadcast_object`.
    """
    return world().broadcast_object(obj, root_rank)


def allgather_object(obj: Any, name: str | None = None) -> list[Any]:
    """Returns every rank's object in the order of the ranks, sent by pickle.

    Unpickling runs code that the sender chooses, so use this only among ranks that trust each other. Errors are those
    of :func:`bagua.all_gather_object`.
    """
    return world().allgather_object(obj)
