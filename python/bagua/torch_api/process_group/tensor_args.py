"""Tensor arguments of a collective: reduce operations, dtypes, and the address of a tensor.

A tensor is read once. For a plain tensor, on a torch new enough, the bindings (``engine.TensorReader``) return address,
count and dtype in one call; every other tensor, and every error message, goes through the tensor's attributes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import TypeAlias

import torch

from bagua import engine


class ReduceOp(IntEnum):
    """The reduction of the elements of several ranks. The numbers are those of the original."""

    SUM = engine.OPS["sum"]
    PRODUCT = engine.OPS["product"]
    MIN = engine.OPS["min"]
    MAX = engine.OPS["max"]
    BOR = engine.OPS["bor"]
    BAND = engine.OPS["band"]
    BXOR = engine.OPS["bxor"]
    AVG = engine.OPS["avg"]


#: The dtypes that can be communicated, and their codes in the core.
DTYPES: dict[torch.dtype, int] = {getattr(torch, name): code for name, code in engine.DTYPES.items()}

_NAMES = {code: str(dtype).removeprefix("torch.") for dtype, code in DTYPES.items()}
_FLOATING = {code for dtype, code in DTYPES.items() if dtype.is_floating_point}
_COMPLEX = {code for dtype, code in DTYPES.items() if dtype.is_complex}
_BITWISE = (ReduceOp.BOR, ReduceOp.BAND, ReduceOp.BXOR)

#: Address, number of elements, dtype code, shape (None: one dimension), and the tensor. The address is None unless the
#: tensor is known to be plain: contiguous, and without torch's lazy negation.
Seen: TypeAlias = tuple[int | None, int, int, tuple[int, ...] | None, torch.Tensor]


def _changed(tensor: tuple[torch.Tensor]) -> None:
    torch.autograd.graph.increment_version(tensor[0])


def _version_counter() -> Callable[[tuple[torch.Tensor]], None]:
    count: Callable[[tuple[torch.Tensor]], None] = getattr(torch._C, "_increment_version", _changed)
    try:
        # The C function itself: the Python function around it doubles the cost. An older torch takes no tuple.
        count((torch.empty(0),))
    except TypeError:
        return _changed
    return count


def _is_lazy(tensor: torch.Tensor) -> bool:
    return tensor.is_neg() or tensor.is_conj()


def _new_reader() -> engine.TensorReader:
    # The lazy negative and conjugate flags of a tensor. Tensor.is_neg releases the GIL, and another thread may keep it.
    lazy_flags = getattr(torch._C, "_get_tensor_metadata", _is_lazy)
    try:
        return engine.TensorReader([torch.Tensor, torch.nn.Parameter], lazy_flags, _count_version)
    except (AttributeError, TypeError):  # torch before 2.10 does not export a tensor's address to C
        return engine.TensorReader([], lazy_flags, _count_version)


# Increments a tensor's version counter, by which autograd detects that a saved tensor was written.
_count_version = _version_counter()

#: Reads address, count and dtype of torch's tensors.
reader = _new_reader()


def dtype_code(tensor: torch.Tensor, what: str) -> int:
    """The core's code of a tensor's dtype."""
    return require_dtype(tensor.dtype, what)


def require_dtype(dtype: torch.dtype, what: str) -> int:
    """The core's code of a dtype. TypeError for one that cannot be communicated."""
    code = DTYPES.get(dtype)
    if code is None:
        raise TypeError(
            f"{what} has dtype {dtype}, which cannot be communicated; these can: {', '.join(_NAMES.values())}"
        )
    return code


def check_on_cpu(tensor: torch.Tensor, what: str) -> None:
    """Refuses a tensor outside host memory, or a sparse one."""
    check_place(tensor, what, ("cpu",))


def check_place(tensor: torch.Tensor, what: str, places: Sequence[str] = ("cpu", "cuda")) -> None:
    """Refuses a tensor outside the memory of these kinds of devices, or a sparse one."""
    if tensor.device.type not in places:
        allowed = " and ".join(place.upper() for place in places)
        raise NotImplementedError(f"{what} is on {tensor.device}: only {allowed} tensors can be communicated here")
    if tensor.layout != torch.strided:
        where = "" if tensor.device.type == "cpu" else f" on {tensor.device}"
        raise NotImplementedError(f"{what} is {tensor.layout}{where}: only dense tensors can be communicated here")


def seen(tensor: torch.Tensor, what: str) -> Seen:
    """Address, count and dtype of a tensor that can be communicated, plain or not, on the host or a CUDA device."""
    found = reader.at(tensor)
    if found is not None:
        return found
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{what} must be a torch.Tensor, not {type(tensor).__name__}")
    check_place(tensor, what)
    return None, tensor.numel(), dtype_code(tensor, what), tuple(tensor.shape), tensor


def source(tensor: torch.Tensor, what: str) -> tuple[int, int, int, tuple[int, ...] | None, torch.Tensor]:
    """A tensor to read; the last value owns the memory, which may be a copy."""
    address, count, code, shape, _ = seen(tensor, what)
    if address is None:
        if tensor.is_cuda and (not tensor.is_contiguous() or tensor.is_neg() or tensor.is_conj()):
            from bagua.cuda import tensors

            # Before the copy would become part of the graph.
            tensors.refuse_capture(tensor.device)
        # The core reads contiguous memory: strides, a lazy negation and a lazy conjugate need a copy.
        tensor = tensor.detach().resolve_conj().resolve_neg().contiguous()
        address = tensor.data_ptr()
    return address, count, code, shape, tensor


def target(found: Seen, what: str) -> int:
    """The address of a tensor to write. Must be the last check: it increments the version counter."""
    address, _, _, shape, tensor = found
    if address is None:
        if not tensor.is_contiguous():
            raise ValueError(
                f"{what} of shape {list(shape or ())} is not contiguous, so results cannot be written into it"
            )
        if tensor.is_neg():
            raise ValueError(f"{what} is the negation of another tensor, so results cannot be written into it")
        if tensor.is_conj():
            raise ValueError(f"{what} is the conjugate of another tensor, so results cannot be written into it")
        address = tensor.data_ptr()
    _count_version((tensor,))
    return address


def same_kind(send: int, recv: int, send_tensor: torch.Tensor, recv_tensor: torch.Tensor) -> None:
    """Refuses two tensors of different element types, given by their codes, or in different places."""
    if send != recv:
        raise TypeError(
            f"send_tensor has dtype torch.{_NAMES[send]}, recv_tensor torch.{_NAMES[recv]}: they must be equal"
        )
    if (send_tensor.is_cuda or recv_tensor.is_cuda) and send_tensor.device != recv_tensor.device:
        raise TypeError(
            f"send_tensor is on {send_tensor.device}, recv_tensor on {recv_tensor.device}: they must be in one place"
        )


def own_shard(address: int, count: int, whole: int, rank: int, code: int) -> int | None:
    """``address``; or None, which the core takes as in place, if it is the address of rank ``rank``'s shard of
    ``whole``. NCCL defines in place by the same rule.
    """
    return None if count > 0 and address == whole + rank * count * _SIZES[code] else address


_SIZES = {code: dtype.itemsize for dtype, code in DTYPES.items()}


def _is_defined(op: ReduceOp, dtype: int) -> bool:
    floating, complex_ = dtype in _FLOATING, dtype in _COMPLEX
    return not (
        (op is ReduceOp.AVG and not (floating or complex_))
        or (op in (ReduceOp.MIN, ReduceOp.MAX) and complex_)
        or (op is ReduceOp.SUM and _NAMES[dtype] == "bool")
        or (op in _BITWISE and (floating or complex_))
    )


_DEFINED = frozenset((op, dtype) for op in ReduceOp for dtype in _NAMES if _is_defined(op, dtype))


def check_op(op: ReduceOp | int, dtype: int) -> int:
    """The core's number of a reduction, if it is defined for the dtype with this code."""
    # By class: torch.distributed's ReduceOp compares equal by number, but its numbers mean other operations.
    if type(op) is ReduceOp and (op, dtype) in _DEFINED:
        return op
    if not isinstance(op, int):
        raise TypeError(f"op must be a bagua.torch_api.ReduceOp, not {op!r}")
    op = ReduceOp(op)
    if (op, dtype) not in _DEFINED:
        raise TypeError(f"{op.name} of {_NAMES[dtype]} is not defined")
    return op
