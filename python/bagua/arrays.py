"""Arrays of any framework as memory: NumPy, DLPack on the CPU, the buffer protocol; CUDA's by `bagua.cuda.arrays`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np

from bagua import dlpack
from bagua.engine import DTYPES, read_array

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from bagua.cuda.arrays import CudaMemory
    from bagua.engine import Communicator, CudaCall

    #: The memory of an array, on the host or on a device.
    AnyMemory: TypeAlias = "Memory | CudaMemory"

__all__ = ["Array", "Memory", "empty_like", "memory_of", "operand"]


class SupportsDLPack(Protocol):
    """An array of a framework that speaks DLPack."""

    def __dlpack__(self, *, stream: Any = ...) -> Any: ...

    def __dlpack_device__(self) -> tuple[Any, Any]: ...


class SupportsCudaArray(Protocol):
    """An array on a CUDA device."""

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]: ...


if TYPE_CHECKING:
    #: What the verbs take.
    Array: TypeAlias = np.ndarray[Any, Any] | SupportsDLPack | SupportsCudaArray | Buffer
else:
    Array = Any

# (kind, bytes) of a NumPy type rather than the type itself: "long" and "long long" are two types of one layout.
_CODES = {
    ("f", 2): DTYPES["float16"],
    ("f", 4): DTYPES["float32"],
    ("f", 8): DTYPES["float64"],
    ("u", 1): DTYPES["uint8"],
    ("i", 1): DTYPES["int8"],
    ("i", 4): DTYPES["int32"],
    ("i", 8): DTYPES["int64"],
    ("b", 1): DTYPES["bool"],
    ("c", 8): DTYPES["complex64"],
    ("c", 16): DTYPES["complex128"],
}


@dataclass(frozen=True)
class Memory:
    """The memory of an array, and what must stay alive with it."""

    #: The same memory as a NumPy array; bfloat16 as uint16.
    array: np.ndarray[Any, Any]
    #: Code of the element type.
    dtype: int
    #: What the caller gave.
    owner: Any
    #: The capsule that lends the memory, where there is one.
    lender: Any = None

    @property
    def device(self) -> None:
        """The host is no device."""
        return

    @property
    def where(self) -> str:
        """The place, for error texts."""
        return "the host"

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return self.array.nbytes

    @property
    def address(self) -> int:
        """Of the first byte."""
        found = read_array(self.array)
        return self.array.ctypes.data if found is None else found[0]

    @property
    def count(self) -> int:
        """Elements."""
        return self.array.size

    @property
    def shape(self) -> tuple[int, ...]:
        """Dimensions."""
        return tuple(self.array.shape)

    @property
    def dtype_name(self) -> str:
        """Name of the element type."""
        return next(name for name, code in DTYPES.items() if code == self.dtype)

    def to_write(self, what: str) -> Memory:
        """Itself; ValueError when it cannot hold a result where it is."""
        if not self.array.flags.c_contiguous:
            raise ValueError(f"{what} is not contiguous in C order: give out= with an array that is")
        if not self.array.flags.writeable:
            raise ValueError(f"{what} is read-only: give out= with an array to write to")
        return self

    def to_read(self) -> Memory:
        """Itself, or a contiguous copy."""
        if self.array.flags.c_contiguous:
            return self
        return Memory(np.ascontiguousarray(self.array), self.dtype, self.owner)

    def nothing(self) -> Memory:
        """No elements."""
        return Memory(self.array[:0], self.dtype, None)

    def call(self, communicator: Communicator, others: Iterable[AnyMemory | None]) -> CudaCall | None:
        """None: no device takes part in an operation on this array."""

    def call_messages(self, communicator: Communicator, others: Iterable[AnyMemory | None]) -> CudaCall | None:
        """None, as `call`."""


def operand(x: Any, what: str = "the array", stream: int | None = None) -> AnyMemory:
    """The memory of an array on the host or on a CUDA device; the device's work begins after what `stream` has.

    As `memory_of`; BaguaError that says why there is no CUDA, NotImplementedError for a stream that is being captured.
    """
    if isinstance(x, np.ndarray):
        return memory_of(x, what)
    speaks_dlpack = hasattr(x, "__dlpack__")
    if (speaks_dlpack and int(x.__dlpack_device__()[0]) == dlpack.CUDA) or (
        not speaks_dlpack and hasattr(x, "__cuda_array_interface__")
    ):
        # Here, because importing bagua.cuda decides to which process CUDA belongs.
        from bagua.cuda import arrays

        return arrays.memory_of(x, what, stream)
    return memory_of(x, what)


def memory_of(x: Any, what: str = "the array") -> Memory:
    """The memory of an array; TypeError for what is none, has a type that cannot travel, or lives on another device."""
    if isinstance(x, np.ndarray):
        return Memory(x, _code(x.dtype, what), x)
    if hasattr(x, "__dlpack__"):
        return _from_dlpack(x, what)
    if hasattr(x, "__cuda_array_interface__"):
        raise TypeError(f"{what} lives on CUDA; only host memory can travel here: copy it to the CPU first")
    try:
        array = np.asarray(memoryview(x))
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"{what} is a {type(x).__name__}, which is neither a NumPy array nor speaks DLPack or the buffer protocol"
        ) from error
    return Memory(array, _code(array.dtype, what), x)


def empty_like(memory: AnyMemory, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """A new NumPy array of this type. TypeError for a bfloat16 that NumPy has no type for, and on a device."""
    if not isinstance(memory, Memory):
        raise TypeError(
            f"the array is on {memory.where}, and the result has another shape: give out= with an array there"
        )
    if memory.dtype != DTYPES["bfloat16"]:
        return np.empty(shape, memory.array.dtype)
    if memory.array.dtype.name == "bfloat16":
        return np.empty(shape, memory.array.dtype)
    try:
        import ml_dtypes  # type: ignore[import-not-found, unused-ignore]
    except ImportError:
        raise TypeError("NumPy has no bfloat16 without the package ml_dtypes: give out=") from None
    return np.empty(shape, ml_dtypes.bfloat16)


def _code(dtype: np.dtype[Any], what: str) -> int:
    code = _CODES.get((dtype.kind, dtype.itemsize))
    # ml_dtypes registers bfloat16 as a type of its own; its name says what it is without importing the package.
    if dtype.name == "bfloat16":
        code = DTYPES["bfloat16"]
    if code is None:
        raise TypeError(f"{what} has elements of type {dtype}; these can travel: {', '.join(DTYPES)}")
    if not dtype.isnative:
        raise TypeError(f"{what} has elements of type {dtype} in the byte order of another machine")
    return code


class _Lender:
    """Memory in the words of NumPy's array interface; keeps the capsule, which keeps the memory."""

    def __init__(self, capsule: Any, interface: dict[str, Any]) -> None:
        self.capsule = capsule
        self.__array_interface__ = interface


def _from_dlpack(x: Any, what: str) -> Memory:
    device = int(x.__dlpack_device__()[0])
    if device not in dlpack.ON_HOST:
        where = dlpack.DEVICES.get(device, f"DLPack device {device}")
        raise TypeError(f"{what} lives on {where}; only host memory can travel here: copy it to the CPU first")
    capsule = dlpack.capsule_of(x, what)
    lent = dlpack.lent_by(capsule, what)
    numpy_type = np.dtype(lent.typestr)
    if 0 in lent.shape:
        array = np.empty(lent.shape, numpy_type)
    else:
        strides = None if lent.strides is None else tuple(stride * numpy_type.itemsize for stride in lent.strides)
        interface = {
            "version": 3,
            "typestr": numpy_type.str,
            "shape": lent.shape,
            "strides": strides,
            "data": (lent.address, not lent.writable),
        }
        array = np.asarray(_Lender(capsule, interface))
    return Memory(array, DTYPES[lent.dtype_name], x, capsule)
