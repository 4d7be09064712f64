"""Tensors and reductions of torch as addresses and codes of the core."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from bagua import engine

from .torch_c10d import c10d

__all__ = ["Operand", "Reduction", "gathered", "inout", "reduction", "source", "target", "whole"]

#: dtype -> code of the core, for those that it can add up.
DTYPES: dict[torch.dtype, int] = {getattr(torch, name): code for name, code in engine.DTYPES.items()}

_BYTES = engine.DTYPES["uint8"]
_BITWISE = ("band", "bor", "bxor")


class Operand(NamedTuple):
    """The memory of a tensor."""

    address: int
    #: Elements; bytes where the core has no code for the dtype.
    numel: int
    code: int
    #: Owns the memory: the tensor itself, or a contiguous copy.
    memory: torch.Tensor
    #: Copies the result from `memory` to the tensor; None when that is the same.
    finish: Callable[[], None] | None = None

    def chunk(self, parts: int, what: str) -> int:
        """Elements of one of `parts` equal parts. ValueError when they do not divide."""
        if self.numel % parts:
            raise ValueError(f"{what} has {self.memory.numel()} elements, which {parts} ranks cannot divide evenly")
        return self.numel // parts


def _check(tensor: Any, what: str) -> torch.Tensor:
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{what} must be a torch.Tensor, not {type(tensor).__name__}")
    if tensor.device.type not in ("cpu", "cuda"):
        raise NotImplementedError(f"{what} is on {tensor.device}: the backend 'bagua' takes CPU and CUDA tensors")
    if tensor.layout != torch.strided:
        raise NotImplementedError(f"{what} is {tensor.layout}: only all_reduce with SUM takes sparse tensors")
    return tensor


def _is_plain(tensor: torch.Tensor) -> bool:
    return tensor.is_contiguous() and not tensor.is_neg() and not tensor.is_conj()


def _operand(memory: torch.Tensor, finish: Callable[[], None] | None = None) -> Operand:
    code = DTYPES.get(memory.dtype)
    if code is None:
        return Operand(memory.data_ptr(), memory.numel() * memory.element_size(), _BYTES, memory, finish)
    return Operand(memory.data_ptr(), memory.numel(), code, memory, finish)


def _written(tensor: torch.Tensor) -> None:
    # autograd detects by it that a saved tensor was written.
    if not tensor.is_inference():
        torch.autograd.graph.increment_version(tensor)


def source(tensor: Any, what: str) -> Operand:
    """A tensor to read."""
    tensor = _check(tensor, what).detach()
    return _operand(tensor if _is_plain(tensor) else _contiguous(tensor))


def _contiguous(tensor: torch.Tensor) -> torch.Tensor:
    _refuse_capture(tensor)
    return tensor.resolve_conj().resolve_neg().contiguous()


def _refuse_capture(tensor: torch.Tensor) -> None:
    """Before a copy would become part of a graph."""
    if tensor.is_cuda:
        from bagua.cuda import tensors

        tensors.refuse_capture(tensor.device)


def _copying(tensor: torch.Tensor, memory: torch.Tensor) -> Callable[[], None]:
    def finish() -> None:
        with torch.no_grad():
            tensor.detach().copy_(memory)

    return finish


def target(tensor: Any, what: str) -> Operand:
    """A tensor to write."""
    _check(tensor, what)
    _written(tensor)
    if _is_plain(tensor):
        return _operand(tensor.detach())
    memory = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    return _operand(memory, _copying(tensor, memory))


def inout(tensor: Any, what: str) -> Operand:
    """A tensor to read and write."""
    _check(tensor, what)
    _written(tensor)
    if _is_plain(tensor):
        return _operand(tensor.detach())
    memory = _contiguous(tensor.detach())
    return _operand(memory, _copying(tensor, memory))


def _like(tensors: Sequence[Any], one: torch.Tensor | None, parts: int | None, what: str) -> torch.Tensor:
    """The first of some tensors, after checks that all have its dtype, and as many elements as `one` has."""
    if parts is not None and len(tensors) != parts:
        raise ValueError(f"{what} has {len(tensors)} tensors for a group of {parts} ranks")
    first = tensors[0] if one is None else one
    for i, tensor in enumerate(tensors):
        _check(tensor, f"{what}[{i}]")
        if tensor.dtype != first.dtype:
            raise TypeError(f"{what}[{i}] has dtype {tensor.dtype}, not {first.dtype}")
        if tensor.device != first.device:
            raise TypeError(f"{what}[{i}] is on {tensor.device}, not on {first.device}")
        if one is not None and tensor.numel() != one.numel():
            raise ValueError(f"{what}[{i}] has {tensor.numel()} elements, not {one.numel()}")
    return first


def whole(tensors: Sequence[torch.Tensor], one: torch.Tensor | None, parts: int | None, what: str) -> Operand:
    """Tensors to read, one after the other in one memory. `one`: what each must have the size and dtype of."""
    first = _like(tensors, one, parts, what)
    _refuse_capture(first)
    flat = torch.empty(sum(tensor.numel() for tensor in tensors), dtype=first.dtype, device=first.device)
    start = 0
    for tensor in tensors:
        flat[start : start + tensor.numel()].copy_(tensor.detach().reshape(-1))
        start += tensor.numel()
    return _operand(flat)


def gathered(tensors: Sequence[torch.Tensor], one: torch.Tensor | None, parts: int | None, what: str) -> Operand:
    """Tensors to write, from one memory that has them one after the other."""
    first = _like(tensors, one, parts, what)
    flat = torch.empty(sum(tensor.numel() for tensor in tensors), dtype=first.dtype, device=first.device)
    for tensor in tensors:
        _written(tensor)

    def finish() -> None:
        start = 0
        with torch.no_grad():
            for tensor in tensors:
                tensor.detach().copy_(flat[start : start + tensor.numel()].view(tensor.shape))
                start += tensor.numel()

    return _operand(flat, finish)


class Reduction(NamedTuple):
    """How the core combines elements."""

    code: int
    #: Whether the sum is divided by the number of ranks afterwards: AVG of integers, cut towards zero as NCCL does.
    divides: bool = False


_NAMES = {
    c10d.ReduceOp.RedOpType.SUM: "sum",
    c10d.ReduceOp.RedOpType.AVG: "avg",
    c10d.ReduceOp.RedOpType.PRODUCT: "product",
    c10d.ReduceOp.RedOpType.MIN: "min",
    c10d.ReduceOp.RedOpType.MAX: "max",
    c10d.ReduceOp.RedOpType.BAND: "band",
    c10d.ReduceOp.RedOpType.BOR: "bor",
    c10d.ReduceOp.RedOpType.BXOR: "bxor",
}


def reduction(op: Any, dtype: torch.dtype) -> Reduction:
    """The reduction of a dtype. NotImplementedError for PREMUL_SUM, TypeError for one that is not defined."""
    kind = getattr(op, "op", op)
    name = _NAMES.get(kind)
    if name is None:
        raise NotImplementedError(f"the backend 'bagua' has no {kind}: scale the tensor and use SUM")
    if dtype not in DTYPES:
        known = ", ".join(str(known).removeprefix("torch.") for known in DTYPES)
        raise TypeError(f"{name} of {dtype} is not defined; it is for {known}")
    broken = dtype.is_floating_point or dtype.is_complex
    if (
        (name in _BITWISE and broken)
        or (name in ("min", "max") and dtype.is_complex)
        or (name in ("sum", "avg") and dtype is torch.bool)
    ):
        raise TypeError(f"{name} of {dtype} is not defined")
    if name == "avg" and not broken:
        return Reduction(engine.OPS["sum"], divides=True)
    return Reduction(engine.OPS[name])
