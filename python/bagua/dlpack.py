"""Reads DLPack capsules. NumPy's own reader refuses bfloat16 and device memory.

https://dmlc.github.io/dlpack/latest/c_api.html
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import numpy as np

from bagua.extension import DTYPES

__all__ = ["CUDA", "DEVICES", "ON_HOST", "CapsuleMemory", "contiguous", "export"]

#: Device types of host memory, and of host memory pinned for CUDA or ROCm.
ON_HOST = (1, 3, 11)
#: Device type of CUDA memory.
CUDA = 2
#: Names of device types that are not host memory.
DEVICES = {2: "CUDA", 4: "OpenCL", 7: "Vulkan", 8: "Metal", 10: "ROCm", 13: "CUDA managed memory", 14: "oneAPI"}


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
# Packages with immutable arrays. They may export unversioned capsules, which have no read-only flag.
_IMMUTABLE = {"jax", "jaxlib", "pyarrow", "tensorflow"}
# DLPack's type codes.
_KINDS = {"int": 0, "uint": 1, "float": 2, "bfloat": 4, "complex": 5, "bool": 6}


def _by_code() -> dict[tuple[int, int], tuple[str, str]]:
    found = {}
    for name in DTYPES:
        kind = name.rstrip("0123456789")
        # NumPy has no bfloat16.
        memory = np.dtype("uint16" if name == "bfloat16" else name)
        found[_KINDS[kind], 8 * memory.itemsize] = (memory.str[1:], name)
    return found


# (code, bits) -> (NumPy type of the memory, name)
_DLPACK = _by_code()

_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_pointer.restype = ctypes.c_void_p
_pointer.argtypes = (ctypes.py_object, ctypes.c_char_p)
_is_valid = ctypes.pythonapi.PyCapsule_IsValid
_is_valid.restype = ctypes.c_int
_is_valid.argtypes = (ctypes.py_object, ctypes.c_char_p)


@dataclass(frozen=True)
class CapsuleMemory:
    """The memory that a capsule describes, valid until the capsule is freed."""

    #: Address of the first element.
    address: int
    shape: tuple[int, ...]
    #: Stride of each dimension, in elements; None if contiguous in C order.
    strides: tuple[int, ...] | None
    #: NumPy's type string; bfloat16 has that of an integer of the same size.
    typestr: str
    dtype_name: str
    #: False if the capsule or the class of the array says that the memory is read-only.
    writable: bool


def export(x: Any, what: str, **arguments: Any) -> tuple[Any, CapsuleMemory]:
    """Returns the capsule that an array exports, and the memory that the capsule describes.

    `what` names the array in error texts; `arguments` go to its `__dlpack__`. Raises TypeError if the array exports no
    capsule, or if its elements cannot be communicated.
    """
    capsule = _capsule_of(x, what, **arguments)
    return capsule, _memory_of(x, capsule, what)


def _capsule_of(x: Any, what: str, **arguments: Any) -> Any:
    # torch exports a lazily negated view, such as the imaginary part of a conjugate, without the sign.
    if hasattr(x, "is_neg") and x.is_neg():
        raise TypeError(f"{what} ({type(x).__name__}) is a lazily negated view: pass its resolve_neg()")
    try:
        try:
            # The newer capsule says whether the memory may be written.
            return x.__dlpack__(max_version=(1, 0), **arguments)
        except TypeError:
            return x.__dlpack__(**arguments)
    except (BufferError, RuntimeError, TypeError, ValueError) as error:
        raise TypeError(f"{what} ({type(x).__name__}) does not export its memory: {error}") from error


def _memory_of(x: Any, capsule: Any, what: str) -> CapsuleMemory:
    if _is_valid(capsule, b"dltensor_versioned"):
        versioned = _Versioned.from_address(_pointer(capsule, b"dltensor_versioned"))
        writable = not versioned.flags & _READ_ONLY
        tensor = versioned.tensor
    else:
        tensor = _Tensor.from_address(_pointer(capsule, b"dltensor"))
        writable = _IMMUTABLE.isdisjoint(kind.__module__.partition(".")[0] for kind in type(x).__mro__)
    form = _DLPACK.get((tensor.code, tensor.bits)) if tensor.lanes == 1 else None
    if form is None:
        kind = f"type code {tensor.code} with {tensor.bits} bits and {tensor.lanes} lanes"
        raise TypeError(f"{what} has elements of DLPack {kind}; supported are {', '.join(DTYPES)}")
    typestr, name = form
    shape = tuple(tensor.shape[i] for i in range(tensor.ndim))
    strides = tuple(tensor.strides[i] for i in range(tensor.ndim)) if tensor.strides else None
    return CapsuleMemory((tensor.data or 0) + tensor.byte_offset, shape, strides, typestr, name, writable)


def contiguous(shape: tuple[int, ...], strides: tuple[int, ...] | None, element: int = 1) -> bool:
    """Returns True if elements follow each other in C order. `element` is their size in the unit of the strides."""
    if strides is None or 0 in shape:
        return True
    expected = element
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True
