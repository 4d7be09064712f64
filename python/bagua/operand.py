"""`Operand`: memory that an operation reads or writes, on the host or on a device.

`bagua.arrays` makes operands from NumPy, DLPack and the buffer protocol, `bagua.cuda.arrays` from arrays on CUDA
devices, and `bagua.torch_operand` from torch's tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from bagua.extension import DTYPES

if TYPE_CHECKING:
    from bagua.extension import Communicator, CudaCall, Handle
    from bagua.handle import AnyHandle

__all__ = ["SIZES", "DeviceStream", "Operand", "check_beside", "empty_like", "numpy_code", "same_kind"]


_NAMES = {code: name for name, code in DTYPES.items()}
# NumPy's dtypes by code. NumPy has no bfloat16.
_NUMPY = {code: np.dtype(name) for name, code in DTYPES.items() if name != "bfloat16"}
# Keyed by (kind, bytes) rather than by dtype, because "long" and "long long" are two dtypes with the same layout.
_CODES = {(dtype.kind, dtype.itemsize): code for code, dtype in _NUMPY.items()}
#: Bytes of an element, by the code of its type.
SIZES = {code: _NUMPY[code].itemsize if code in _NUMPY else 2 for code in DTYPES.values()}


class DeviceStream(Protocol):
    """A CUDA device, and the stream in whose order a call uses its operands there."""

    @property
    def device(self) -> Any:
        """The core's handle of the device."""

    @property
    def where(self) -> str:
        """Name of the device, for error texts."""

    def call(self, raw: Communicator, places: Sequence[Any]) -> CudaCall:
        """Returns the device's side of an operation. Raises NotImplementedError if the stream is being captured."""

    def call_messages(self, raw: Communicator, places: Sequence[Any]) -> CudaCall:
        """Does the same as `call`, for messages."""

    def handle(self, done: Handle | None, finish: Callable[[], None] | None) -> AnyHandle | None:
        """Returns the handle of an asynchronous operation, which runs `finish` at its end; None if `done` is None."""


@dataclass(slots=True, eq=False)
class Operand:
    """Memory of an array or tensor, and the objects that must stay alive with it."""

    #: Address of the first byte, on the host or on a device.
    address: int
    #: Number of elements.
    count: int
    #: Code of the element type.
    dtype: int
    #: Shape; None if one-dimensional.
    dims: tuple[int, ...] | None
    #: The object that owns the memory: the caller's array, or a contiguous copy.
    owner: Any
    #: The `DeviceStream` of memory on a device; None for the host.
    place: Any = None
    #: True if the elements follow each other in C order.
    contiguous: bool = True
    #: True if the memory may be written.
    writable: bool = True
    #: Copies the result from this memory to the caller's; None if this memory is the caller's.
    finish: Callable[[], None] | None = None
    #: The caller's tensors that get the result.
    results: Sequence[Any] = ()

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.count,) if self.dims is None else self.dims

    @property
    def nbytes(self) -> int:
        return self.count * SIZES[self.dtype]

    @property
    def dtype_name(self) -> str:
        return _NAMES[self.dtype]

    @property
    def device(self) -> Any:
        """The core's handle of the device; None for the host."""
        return None if self.place is None else self.place.device

    @property
    def where(self) -> str:
        """Name of the device, or "the host", for error texts."""
        return "the host" if self.place is None else str(self.place.where)

    def to_write(self, what: str, *, has_out: bool = False) -> Operand:
        """Returns the operand. Raises ValueError if it cannot hold a result. `has_out`: the caller takes `out=`."""
        instead = "pass out= with an array" if has_out else "pass an array"
        if not self.writable:
            raise ValueError(f"{what} is read-only: {instead} that can be written")
        if self.place is not None:
            return self.to_read(what)
        if not self.contiguous:
            raise ValueError(f"{what} is not contiguous in C order: {instead} that is contiguous")
        return self

    def to_read(self, what: str = "the array") -> Operand:
        """Returns the operand, or a contiguous copy. Raises ValueError if it is not contiguous and on a device."""
        if self.contiguous:
            return self
        if self.place is not None:
            raise ValueError(f"{what} is on a CUDA device and not contiguous in C order: make a contiguous copy")
        copy = np.ascontiguousarray(self.owner)
        return Operand(copy.ctypes.data, self.count, self.dtype, self.dims, copy)

    def nothing(self) -> Operand:
        """Returns an operand without elements at the same place."""
        return Operand(self.address, 0, self.dtype, (0,), None, self.place)


def same_kind(one: Operand, out: Operand, shape: tuple[int, ...]) -> Operand:
    """Returns `out`. Raises TypeError or ValueError unless it has this shape, and `one`'s element type and device."""
    check_beside(one, out, "out", "the array")
    if out.dtype != one.dtype:
        raise TypeError(f"out has elements of type {out.dtype_name}, the array has {one.dtype_name}")
    if out.shape != shape:
        raise ValueError(f"out has shape {out.shape}, the result has {shape}")
    return out.to_write("out")


def check_beside(one: Operand, other: Operand, what: str, beside: str) -> None:
    """Raises TypeError unless the operands are on the same device. `what` and `beside` name them in the text."""
    if one.where != other.where:
        raise TypeError(f"{what} is on {other.where}, {beside} is on {one.where}")


def empty_like(one: Operand, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """Returns a new NumPy array of an operand's type. Raises TypeError on a device, or without that type."""
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
    """Returns the code of a NumPy dtype. Raises TypeError if there is none. `what` names the array in errors."""
    code = _CODES.get((dtype.kind, dtype.itemsize))
    # ml_dtypes registers a dtype named bfloat16. Checking its name avoids importing the package.
    if dtype.name == "bfloat16":
        code = DTYPES["bfloat16"]
    if code is None:
        raise TypeError(f"{what} has elements of type {dtype}; supported are {', '.join(DTYPES)}")
    if not dtype.isnative:
        raise TypeError(
            f"{what} has elements of type {dtype}, in a foreign byte order: convert it to native byte order"
        )
    return code
