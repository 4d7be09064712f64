"""Collectives with a backward."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from ..communication import group_of
from ..process_group import Communicator, ProcessGroup, ReduceOp

__all__ = ["all_reduce"]

_DIFFERENTIABLE = (ReduceOp.SUM, ReduceOp.AVG, ReduceOp.MAX)


def all_reduce(
    tensor: torch.Tensor,
    op: ReduceOp = ReduceOp.SUM,
    group: ProcessGroup | dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """Returns a new tensor with the reduction of all ranks' tensors. The backward is collective too.

    - ``tensor``: The same shape and dtype on all ranks.
    - ``op``: SUM, AVG or MAX. The gradient of SUM is the sum of all ranks' gradients, that of AVG their mean. For MAX,
      the sum of the gradients goes to the ranks that had the maximum, in equal parts.
    - ``group``: A group of Bagua or torch.distributed; None means the default group.

    Raises NotImplementedError for another op, TypeError for an op of another library, and ValueError on a rank outside
    the group.
    """
    if not isinstance(op, ReduceOp):
        raise TypeError(f"op must be a bagua.torch_api.ReduceOp, not {op!r}")
    if op not in _DIFFERENTIABLE:
        raise NotImplementedError(f"all_reduce: {op!r} has no backward; use SUM, AVG or MAX")
    found = group_of(group)
    communicator = found.get_global_communicator()
    if not isinstance(communicator, Communicator):
        raise ValueError(f"all_reduce: this rank is not in {found}")
    function: Any = _Max if op == ReduceOp.MAX else _Linear
    result: torch.Tensor = function.apply(tensor, op, communicator)
    return result


def _reduced(tensor: torch.Tensor, op: ReduceOp, communicator: Communicator) -> torch.Tensor:
    reduced = tensor.detach().resolve_neg().resolve_conj().clone(memory_format=torch.contiguous_format)
    communicator.allreduce_inplace(reduced, op)
    return reduced


class _Linear(torch.autograd.Function):
    """SUM and AVG, which are their own transposes."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, op: ReduceOp, communicator: Communicator) -> torch.Tensor:
        ctx.op, ctx.communicator = op, communicator
        return _reduced(tensor, op, communicator)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        function: Any = _Linear
        return function.apply(grads[0], ctx.op, ctx.communicator), None, None


class _Max(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, op: ReduceOp, communicator: Communicator) -> torch.Tensor:
        result = _reduced(tensor, op, communicator)
        ctx.communicator = communicator
        ctx.save_for_backward(tensor, result)
        return result

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        tensor, result = ctx.saved_tensors
        held = tensor == result
        holders = _reduced(held.to(torch.int32), ReduceOp.SUM, ctx.communicator)
        function: Any = _Linear
        total = function.apply(grads[0], ReduceOp.SUM, ctx.communicator)
        # If no rank holds the maximum (NaN), the quotient is not used.
        share = total / holders.clamp(min=1).to(total.dtype)
        return torch.where(held, share, torch.zeros_like(share)), None, None
