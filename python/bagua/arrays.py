"""Arrays of any framework as host memory: NumPy, DLPack on the CPU, or the buffer protocol."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np

from bagua.engine import DTYPES, read_array

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["Array", "Memory", "empty_like", "memory_of"]


class SupportsDLPack(Protocol):
    """An array of a framework that speaks DLPack."""

    def __dlpack__(self, *, stream: Any = ...) -> Any: ...

    def __dlpack_device__(self) -> tuple[Any, Any]: ...


if TYPE_CHECKING:
    #: What the verbs take.
    Array: TypeAlias = np.ndarray[Any, Any] | SupportsDLPack | Buffer
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


def memory_of(x: Any, what: str = "the array") -> Memory:
    """The memory of an array; TypeError for what is none, has a type that cannot travel, or lives on another device."""
    if isinstance(x, np.ndarray):
        return Memory(x, _code(x.dtype, what), x)
    if hasattr(x, "__dlpack__"):
        return _from_dlpack(x, what)
    try:
        array = np.asarray(memoryview(x))
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"{what} is a {type(x).__name__}, which is neither a NumPy array nor speaks DLPack or the buffer protocol"
        ) from error
    return Memory(array, _code(array.dtype, what), x)


def empty_like(memory: Memory, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """A new NumPy array of this type. TypeError for a bfloat16 that NumPy has no type for."""
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


# DLPack, read here and not by NumPy: NumPy refuses bfloat16.
# https://dmlc.github.io/dlpack/latest/c_api.html


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _Versioned(ctypes.Structure):
    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", _Tensor),
    )


_READ_ONLY = 1
# Host memory, and host memory pinned for CUDA or ROCm.
_ON_HOST = (1, 3, 11)
_DEVICES = {2: "CUDA", 4: "OpenCL", 7: "Vulkan", 8: "Metal", 10: "ROCm", 13: "CUDA managed memory", 14: "oneAPI"}
# (code, bits) -> (NumPy type of the memory, name)
_DLPACK = {
    (0, 8): ("i1", "int8"),
    (0, 32): ("i4", "int32"),
    (0, 64): ("i8", "int64"),
    (1, 8): ("u1", "uint8"),
    (2, 16): ("f2", "float16"),
    (2, 32): ("f4", "float32"),
    (2, 64): ("f8", "float64"),
    (4, 16): ("u2", "bfloat16"),
    (5, 64): ("c8", "complex64"),
    (5, 128): ("c16", "complex128"),
    (6, 8): ("?", "bool"),
}

_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_pointer.restype = ctypes.c_void_p
_pointer.argtypes = (ctypes.py_object, ctypes.c_char_p)
_is_valid = ctypes.pythonapi.PyCapsule_IsValid
_is_valid.restype = ctypes.c_int
_is_valid.argtypes = (ctypes.py_object, ctypes.c_char_p)


class _Lent:
    """Memory in the words of NumPy's array interface; keeps the capsule, which keeps the memory."""

    def __init__(self, capsule: Any, interface: dict[str, Any]) -> None:
        self.capsule = capsule
        self.__array_interface__ = interface


def _capsule(x: Any, what: str) -> Any:
    try:
        try:
            # The newer capsule says whether the memory may be written.
            return x.__dlpack__(max_version=(1, 0))
        except TypeError:
            return x.__dlpack__()
    except (BufferError, RuntimeError, TypeError, ValueError) as error:
        raise TypeError(f"{what} ({type(x).__name__}) does not lend its memory: {error}") from error


def _from_dlpack(x: Any, what: str) -> Memory:
    device = int(x.__dlpack_device__()[0])
    if device not in _ON_HOST:
        where = _DEVICES.get(device, f"DLPack device {device}")
        raise TypeError(f"{what} lives on {where}; only host memory can travel so far: copy it to the CPU first")
    capsule = _capsule(x, what)
    writable = True
    if _is_valid(capsule, b"dltensor_versioned"):
        versioned = _Versioned.from_address(_pointer(capsule, b"dltensor_versioned"))
        writable = not versioned.flags & _READ_ONLY
        tensor = versioned.tensor
    else:
        tensor = _Tensor.from_address(_pointer(capsule, b"dltensor"))
    form = _DLPACK.get((tensor.code, tensor.bits)) if tensor.lanes == 1 else None
    if form is None:
        kind = f"type code {tensor.code} with {tensor.bits} bits and {tensor.lanes} lanes"
        raise TypeError(f"{what} has elements of DLPack {kind}; these can travel: {', '.join(DTYPES)}")
    typestr, name = form
    shape = tuple(tensor.shape[i] for i in range(tensor.ndim))
    numpy_type = np.dtype(typestr)
    strides = tuple(tensor.strides[i] * numpy_type.itemsize for i in range(tensor.ndim)) if tensor.strides else None
    if 0 in shape:
        array = np.empty(shape, numpy_type)
    else:
        interface = {
            "version": 3,
            "typestr": numpy_type.str,
            "shape": shape,
            "strides": strides,
            "data": ((tensor.data or 0) + tensor.byte_offset, not writable),
        }
        array = np.asarray(_Lent(capsule, interface))
    return Memory(array, DTYPES[name], x, capsule)
