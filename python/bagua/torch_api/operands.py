"""What a collective works on: reduce operations, element types, and where a tensor lies.

A tensor is asked once. What the core can tell of it in one call (``engine.TensorReader``: a plain tensor, and a torch that
knows how to answer) is taken from there; for every other tensor, and for what to say when it cannot be used, its
attributes are asked.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from typing import TypeAlias

import torch

from bagua import engine


class ReduceOp(IntEnum):
    """How the elements of several ranks become one. The numbers are those of the original."""

    SUM = 0
    PRODUCT = 1
    MIN = 2
    MAX = 3
    BOR = 7
    BAND = 8
    BXOR = 9
    AVG = 10


#: What can travel, and the number by which the core knows it.
DTYPES: dict[torch.dtype, int] = {
    torch.float16: 0,
    torch.bfloat16: 1,
    torch.float32: 2,
    torch.float64: 3,
    torch.uint8: 4,
    torch.int8: 5,
    torch.int32: 6,
    torch.int64: 7,
    torch.bool: 8,
}

_NAMES = {code: str(dtype).removeprefix("torch.") for dtype, code in DTYPES.items()}
_FLOATING = {code for dtype, code in DTYPES.items() if dtype.is_floating_point}
_BITWISE = (ReduceOp.BOR, ReduceOp.BAND, ReduceOp.BXOR)

#: Address, elements, code of the element type, shape (None: one dimension), and the tensor. The address is None as long
#: as it is not certain that the tensor is plain: contiguous, and no negation that torch has put off.
Seen: TypeAlias = tuple[int | None, int, int, tuple[int, ...] | None, torch.Tensor]


def _changed(tensor: tuple[torch.Tensor]) -> None:
    torch.autograd.graph.increment_version(tensor[0])


def _version_counter() -> Callable[[tuple[torch.Tensor]], None]:
    count: Callable[[tuple[torch.Tensor]], None] = getattr(torch._C, "_increment_version", _changed)
    try:
        # Without the function around it, which costs as much as this again; older ones take no tuple.
        count((torch.empty(0),))
    except TypeError:
        return _changed
    return count


def _looks() -> engine.TensorReader:
    # Negations and conjugates, by name. Tensor.is_neg would do, but it gives the GIL away to whoever may keep it.
    lazy_flags = getattr(torch._C, "_get_tensor_metadata", torch.Tensor.is_neg)
    try:
        return engine.TensorReader([torch.Tensor, torch.nn.Parameter], lazy_flags, _count_version)
    except (AttributeError, TypeError):  # torch before 2.10 cannot say where a tensor lies
        return engine.TensorReader([], lazy_flags, _count_version)


# Autograd must learn that values which it may have saved have changed, or are about to.
_count_version = _version_counter()

#: Knows where torch's tensors lie.
look = _looks()


def dtype_code(tensor: torch.Tensor, what: str) -> int:
    """The core's number for a tensor's element type."""
    code = DTYPES.get(tensor.dtype)
    if code is None:
        raise TypeError(
            f"{what} has dtype {tensor.dtype}, which cannot be communicated; these can: {', '.join(_NAMES.values())}"
        )
    return code


def check_on_cpu(tensor: torch.Tensor, what: str) -> None:
    """Refuses what does not lie in this process's ordinary memory."""
    if tensor.device.type != "cpu":
        raise NotImplementedError(f"{what} is on {tensor.device}: only CPU tensors can be communicated yet")
    if tensor.layout != torch.strided:
        raise NotImplementedError(f"{what} is {tensor.layout}: only dense tensors can be communicated yet")


def seen(tensor: torch.Tensor, what: str) -> Seen:
    """What can be communicated of a tensor, before it is known to be plain."""
    found = look.at(tensor)
    if found is not None:
        return found
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{what} must be a torch.Tensor, not {type(tensor).__name__}")
    check_on_cpu(tensor, what)
    return None, tensor.numel(), dtype_code(tensor, what), tuple(tensor.shape), tensor


def source(tensor: torch.Tensor, what: str) -> tuple[int, int, int, tuple[int, ...] | None, torch.Tensor]:
    """A tensor to read; its last part is what holds the memory, which may be a copy."""
    address, count, code, shape, _ = seen(tensor, what)
    if address is None:
        # Strides do not travel, nor does a negation that torch has put off; a copy is what anybody would make of such a
        # tensor before sending it.
        tensor = tensor.detach().contiguous().resolve_neg()
        address = tensor.data_ptr()
    return address, count, code, shape, tensor


def target(found: Seen, what: str) -> int:
    """The address of a tensor that is about to be written. The last check of a verb."""
    address, _, _, shape, tensor = found
    if address is None:
        if not tensor.is_contiguous():
            raise ValueError(
                f"{what} of shape {list(shape or ())} is not contiguous, so results cannot be written into it"
            )
        if tensor.is_neg():
            raise ValueError(f"{what} is the negation of another tensor, so results cannot be written into it")
        address = tensor.data_ptr()
    _count_version((tensor,))
    return address


def same_dtype(send: int, recv: int) -> None:
    """Refuses two tensors of different element types."""
    if send != recv:
        raise TypeError(
            f"send_tensor has dtype torch.{_NAMES[send]}, recv_tensor torch.{_NAMES[recv]}: they must be equal"
        )


def part(part: int, count: int, whole: int, rank: int, code: int) -> int | None:
    """The address ``part``; None, which is in place for the core, where it is rank ``rank``'s part of ``whole`` itself.

    Whoever gives such a pair means what NCCL does with it.
    """
    return None if count > 0 and part == whole + rank * count * _SIZES[code] else part


_SIZES = {code: dtype.itemsize for dtype, code in DTYPES.items()}
# What check_op has allowed before: that is a look-up instead of an enumeration's construction.
_allowed: set[tuple[ReduceOp, int]] = set()


def check_op(op: ReduceOp | int, dtype: int) -> int:
    """The core's number for a reduction, if it means something for the element type with this code."""
    # By class: torch.distributed's ReduceOp equals ours by number and means something else by it.
    if type(op) is ReduceOp and (op, dtype) in _allowed:
        return op
    if not isinstance(op, int):
        raise TypeError(f"op must be a bagua.torch_api.ReduceOp, not {op!r}")
    op = ReduceOp(op)
    floating = dtype in _FLOATING
    if (
        (op is ReduceOp.AVG and not floating)
        or (op is ReduceOp.SUM and _NAMES[dtype] == "bool")
        or (op in _BITWISE and floating)
    ):
        raise TypeError(f"{op.name} of {_NAMES[dtype]} is not defined")
    _allowed.add((op, dtype))
    return op
