"""Turns arrays of any framework into operands. `bagua.cuda.arrays` does this for arrays on CUDA devices."""

from __future__ import annotations

import functools
import typing
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np

from bagua import dlpack
from bagua.extension import DTYPES, read_array
from bagua.operand import Operand, numpy_code

# Modules that define plain tensors.
_TORCH = ("torch", "torch.nn.parameter")

if TYPE_CHECKING:
    from typing_extensions import Buffer, TypeVar

__all__ = ["Array", "ArrayT", "ResultT", "on_host", "operand", "owner_of", "read_plain"]


class SupportsDLPack(Protocol):
    """An array of a framework that supports DLPack."""

    def __dlpack__(self, *, stream: Any = ...) -> Any: ...

    def __dlpack_device__(self) -> tuple[Any, Any]: ...


class SupportsCudaArray(Protocol):
    """An array on a CUDA device."""

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]: ...


if TYPE_CHECKING:
    #: The arrays that the verbs accept.
    Array: TypeAlias = np.ndarray[Any, Any] | SupportsDLPack | SupportsCudaArray | Buffer
    #: The array type of a verb that returns its argument.
    ArrayT = TypeVar("ArrayT", bound=Array)
    #: The array type of a verb that returns its `out`, or a new array.
    ResultT = TypeVar("ResultT", bound=Array, default=np.ndarray[Any, Any])
else:
    Array = Any
    ArrayT, ResultT = typing.TypeVar("ArrayT"), typing.TypeVar("ResultT")


def operand(x: Any, what: str = "the array", stream: int | None = None) -> Operand:
    """Returns the operand of an array on the host or on a CUDA device.

    On a CUDA device, the operation begins after the work that `stream` already has.

    Raises the errors of `on_host`; BaguaError that says why there is no CUDA; NotImplementedError if the stream is
    being captured.
    """
    found = read_plain(x)
    if found is not None:
        address, count, dtype, dims, writable = found
        return Operand(address, count, dtype, dims, owner_of(x), None, True, writable)
    if isinstance(x, np.ndarray):
        return on_host(x, what)
    has_dlpack = hasattr(x, "__dlpack__")
    if (has_dlpack and int(x.__dlpack_device__()[0]) == dlpack.CUDA) or (
        not has_dlpack and hasattr(x, "__cuda_array_interface__")
    ):
        # Not at the top, because importing bagua.cuda decides to which process CUDA belongs.
        from bagua.cuda import arrays

        return arrays.operand(x, what, stream)
    return on_host(x, what)


def read_plain(x: Any) -> tuple[int, int, int, tuple[int, ...] | None, bool] | None:
    """Returns the address, count, type code, shape and writability of a contiguous NumPy array or host tensor of torch;
    None for every other object.

    For a small array, this is ten times as fast as a DLPack capsule.
    """
    found = read_array(x)
    # DLPack refuses a tensor that requires a gradient, so this path does too.
    if found is None and type(x).__module__ in _TORCH and not x.requires_grad and (read := _tensor_reader()):
        tensor = read(x)
        return None if tensor is None else (*tensor, True)
    return found


def owner_of(x: Any) -> Any:
    """Returns an object that keeps the memory of what `read_plain` has read."""
    # A tensor that shares the memory keeps it when the caller gives `x` other memory (`x.data = ...`).
    return x if isinstance(x, np.ndarray) else x.detach()


@functools.cache
def _tensor_reader() -> Callable[[Any], Any] | None:
    try:
        # Not at the top, because it imports torch.
        from bagua.torch_operand import reader
    except AttributeError:
        # torch before 2.5: its tensors go through DLPack.
        return None
    return reader.at


def on_host(x: Any, what: str = "the array") -> Operand:
    """Returns the operand of an array in host memory.

    Raises TypeError if `x` is not an array, is on a device, or has an element type that cannot be communicated.
    """
    if isinstance(x, np.ndarray):
        return _from_numpy(x, numpy_code(x.dtype, what))
    if hasattr(x, "__dlpack__"):
        return _from_dlpack(x, what)
    if hasattr(x, "__cuda_array_interface__"):
        raise TypeError(f"{what} is on CUDA; only host memory can be communicated here: copy it to the CPU first")
    try:
        array = np.asarray(memoryview(x))
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"{what} is a {type(x).__name__}, which is not a NumPy array and has neither DLPack nor the buffer "
            "protocol: numpy.asarray makes an array of numbers; broadcast_object, all_gather_object, gather_object and "
            "scatter_object take any object"
        ) from error
    return _from_numpy(array, numpy_code(array.dtype, what))


def _from_numpy(array: np.ndarray[Any, Any], dtype: int) -> Operand:
    found = read_array(array)
    if found is not None and found[2] == dtype:
        address, count, _, dims, writable = found
        return Operand(address, count, dtype, dims, array, None, True, writable)
    flags = array.flags
    return Operand(array.ctypes.data, array.size, dtype, array.shape, array, None, flags.c_contiguous, flags.writeable)


class _CapsuleMemory:
    """Memory of a DLPack capsule, described by NumPy's array interface. Keeps the capsule, and so the memory, alive."""

    def __init__(self, capsule: Any, interface: dict[str, Any]) -> None:
        self.capsule = capsule
        self.__array_interface__ = interface


def _from_dlpack(x: Any, what: str) -> Operand:
    device = int(x.__dlpack_device__()[0])
    if device not in dlpack.ON_HOST:
        where = dlpack.DEVICES.get(device, f"DLPack device {device}")
        raise TypeError(f"{what} is on {where}; only host memory can be communicated here: copy it to the CPU first")
    capsule, memory = dlpack.export(x, what)
    numpy_type = np.dtype(memory.typestr)
    if 0 in memory.shape:
        array = np.empty(memory.shape, numpy_type)
    else:
        strides = None if memory.strides is None else tuple(stride * numpy_type.itemsize for stride in memory.strides)
        interface = {
            "version": 3,
            "typestr": numpy_type.str,
            "shape": memory.shape,
            "strides": strides,
            "data": (memory.address, not memory.writable),
        }
        array = np.asarray(_CapsuleMemory(capsule, interface))
    return _from_numpy(array, DTYPES[memory.dtype_name])
