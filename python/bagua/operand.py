"""`Operand`: what an operation reads or writes, on the host or on a device.

One adapter each makes it: `bagua.arrays` of NumPy, DLPack and the buffer protocol, `bagua.cuda.arrays` of arrays on
CUDA devices, `bagua.torch_operand` of torch's tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from bagua.engine import DTYPES

if TYPE_CHECKING:
    from bagua.engine import Communicator, CudaCall, Handle
    from bagua.handle import AnyHandle

__all__ = ["SIZES", "DeviceStream", "Operand", "check_beside", "empty_like", "numpy_code", "same_kind"]


_NAMES = {code: name for name, code in DTYPES.items()}
# Those of NumPy, which has no bfloat16.
_NUMPY = {code: np.dtype(name) for name, code in DTYPES.items() if name != "bfloat16"}
# (kind, bytes) of a NumPy type rather than the type itself: "long" and "long long" are two types of one layout.
_CODES = {(dtype.kind, dtype.itemsize): code for code, dtype in _NUMPY.items()}
#: Bytes of an element, by the code of its type.
SIZES = {code: _NUMPY[code].itemsize if code in _NUMPY else 2 for code in DTYPES.values()}


class DeviceStream(Protocol):
    """A CUDA device, and the stream on which the operands of a call are there."""

    @property
    def device(self) -> Any:
        """The device as the core knows it."""

    @property
    def where(self) -> str:
        """The device, for error texts."""

    def call(self, raw: Communicator, places: Sequence[Any]) -> CudaCall:
        """The device's side of an operation on operands at these places, which are all on this device.

        NotImplementedError for a stream that is being captured, before anything is enqueued.
        """

    def call_messages(self, raw: Communicator, places: Sequence[Any]) -> CudaCall:
        """As `call`, for messages."""

    def handle(self, done: Handle | None, finish: Callable[[], None] | None) -> AnyHandle | None:
        """The handle of an asynchronous operation, with what copies its results; None of one that has returned."""


@dataclass(slots=True, eq=False)
class Operand:
    """The memory of an array or a tensor, and what must stay alive with it."""

    #: Of the first byte, on the host or on a device.
    address: int
    #: Elements.
    count: int
    #: Code of the element type.
    dtype: int
    #: Dimensions; None for one dimension.
    dims: tuple[int, ...] | None
    #: Owns the memory: what the caller gave, or a contiguous copy.
    owner: Any
    #: Where it is; None for the host.
    place: Any = None
    #: Whether its elements follow each other in C order.
    contiguous: bool = True
    #: Whether it may be written.
    writable: bool = True
    #: Copies the result from here to where the caller wants it; None where that is here.
    finish: Callable[[], None] | None = None
    #: The tensors that the result goes to.
    results: Sequence[Any] = ()

    @property
    def shape(self) -> tuple[int, ...]:
        """Dimensions."""
        return (self.count,) if self.dims is None else self.dims

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return self.count * SIZES[self.dtype]

    @property
    def dtype_name(self) -> str:
        """Name of the element type."""
        return _NAMES[self.dtype]

    @property
    def device(self) -> Any:
        """The device as the core knows it; None for the host."""
        return None if self.place is None else self.place.device

    @property
    def where(self) -> str:
        """The place, for error texts."""
        return "the host" if self.place is None else str(self.place.where)

    def to_write(self, what: str, *, has_out: bool = False) -> Operand:
        """Returns itself. Raises ValueError if it cannot hold a result. `has_out`: the caller takes `out=`."""
        instead = "pass out= with an array" if has_out else "pass an array"
        if not self.writable:
            raise ValueError(f"{what} is read-only: {instead} that can be written")
        if self.place is not None:
            return self.to_read(what)
        if not self.contiguous:
            raise ValueError(f"{what} is not contiguous in C order: {instead} that is")
        return self

    def to_read(self, what: str = "the array") -> Operand:
        """Itself, or a contiguous copy; ValueError where one would be needed on a device."""
        if self.contiguous:
            return self
        if self.place is not None:
            raise ValueError(f"{what} is on a CUDA device and not contiguous in C order: make a contiguous copy")
        copy = np.ascontiguousarray(self.owner)
        return Operand(copy.ctypes.data, self.count, self.dtype, self.dims, copy)

    def nothing(self) -> Operand:
        """No elements, at the same place."""
        return Operand(self.address, 0, self.dtype, (0,), None, self.place)


def same_kind(one: Operand, out: Operand, shape: tuple[int, ...]) -> Operand:
    """`out`, if it can hold a result of this shape and of the type of `one`, at the same place."""
    check_beside(one, out, "out", "the array")
    if out.dtype != one.dtype:
        raise TypeError(f"out has elements of type {out.dtype_name}, the array has {one.dtype_name}")
    if out.shape != shape:
        raise ValueError(f"out has shape {out.shape}, the result has {shape}")
    return out.to_write("out")


def check_beside(one: Operand, other: Operand, what: str, beside: str) -> None:
    """TypeError for two operands, `other` called `what` and `one` called `beside`, that are not at one place."""
    if one.where != other.where:
        raise TypeError(f"{what} is on {other.where}, {beside} is on {one.where}")


def empty_like(one: Operand, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """A new NumPy array of this type. TypeError for a bfloat16 that NumPy has no type for, and on a device."""
    if one.place is not None:
        raise TypeError(f"the array is on {one.where}, and the result has another shape: pass out= with an array there")
    if one.dtype in _NUMPY:
        return np.empty(shape, _NUMPY[one.dtype])
    try:
        import ml_dtypes  # type: ignore[import-not-found, unused-ignore]
    except ImportError:
        raise TypeError("NumPy has no bfloat16 without the package ml_dtypes: pass out=") from None
    return np.empty(shape, ml_dtypes.bfloat16)


def numpy_code(dtype: np.dtype[Any], what: str) -> int:
    """The code of a NumPy type. TypeError for one that the core has none for."""
    code = _CODES.get((dtype.kind, dtype.itemsize))
    # ml_dtypes registers bfloat16 as a type of its own; its name says what it is without importing the package.
    if dtype.name == "bfloat16":
        code = DTYPES["bfloat16"]
    if code is None:
        raise TypeError(f"{what} has elements of type {dtype}; supported are {', '.join(DTYPES)}")
    if not dtype.isnative:
        raise TypeError(f"{what} has elements of type {dtype} in the byte order of another machine")
    return code
