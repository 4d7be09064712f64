"""Operands of arrays on CUDA devices: DLPack, or `__cuda_array_interface__` (version 2 or 3).

https://numba.readthedocs.io/en/stable/cuda/cuda_array_interface.html
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from bagua import config, extension, process_state
from bagua.dlpack import contiguous, export
from bagua.extension import DTYPES, Communicator, CudaCall, CudaDevice
from bagua.operand import Operand, numpy_code

if TYPE_CHECKING:
    from bagua.handle import AnyHandle

__all__ = ["ArrayStream", "device_of", "operand"]

#: The legacy stream, by DLPack's number.
_LEGACY = 1


class ArrayStream(NamedTuple):
    """The device of an array, and the streams of a call on it."""

    device: CudaDevice
    stream: int
    #: The stream on which the array's values are produced; None if the array names none.
    producer: int | None = None

    @property
    def where(self) -> str:
        return f"cuda:{self.device.number}"

    def call(self, raw: Communicator, places: Sequence[ArrayStream]) -> CudaCall:
        return raw.cuda_call(
            self.device, self.stream, self.producers(places), config.cuda_collective(), config.cuda_check()
        )

    def call_messages(self, raw: Communicator, places: Sequence[ArrayStream]) -> CudaCall:
        return raw.cuda_messages(self.device, self.stream, self.producers(places))

    def call_alone(self, places: Sequence[ArrayStream]) -> CudaCall:
        """Returns the device's side of an operation that does not involve other ranks."""
        return self.device.call(self.stream, self.producers(places))

    def handle(self, done: extension.Handle | None, finish: Callable[[], None] | None) -> AnyHandle | None:
        return done

    def producers(self, places: Sequence[ArrayStream]) -> list[int]:
        """Returns the streams that the call's stream must wait for."""
        return [each for each in {place.producer for place in places} - {None, self.stream} if each]


def operand(x: Any, what: str, stream: int | None) -> Operand:
    """Returns the operand of an array on a CUDA device. The call's stream waits for the array's producer.

    Raises BaguaError with `why_not()` without CUDA; TypeError if the array cannot be sent; NotImplementedError if the
    stream is being captured, before anything is enqueued.
    """
    stream = _stream(stream)
    if not hasattr(x, "__dlpack__"):
        return _from_interface(x, what, stream)
    device = device_of(int(x.__dlpack_device__()[1]))
    device.refuse_capture([stream])
    capsule, memory = export(x, what, stream=stream)
    plain = contiguous(memory.shape, memory.strides)
    count, dtype = math.prod(memory.shape), DTYPES[memory.dtype_name]
    place = ArrayStream(device, stream)
    return Operand(memory.address, count, dtype, memory.shape, (x, capsule), place, plain, memory.writable)


def _from_interface(x: Any, what: str, stream: int) -> Operand:
    interface = x.__cuda_array_interface__
    version = interface.get("version")
    if version not in (2, 3):
        raise TypeError(f"{what} has version {version} of __cuda_array_interface__; versions 2 and 3 are supported")
    if interface.get("mask") is not None:
        raise TypeError(f"{what} has a mask: masked arrays cannot be communicated")
    kind = np.dtype(interface["typestr"])
    dtype = numpy_code(kind, what)
    address, read_only = interface["data"]
    address = int(address or 0)
    shape = tuple(int(size) for size in interface["shape"])
    strides = interface.get("strides")
    producer = interface.get("stream")
    if producer == 0:
        raise ValueError(f"{what} names stream 0, which __cuda_array_interface__ does not allow")
    device = device_of(_number(address, what) if 0 not in shape else 0)
    place = ArrayStream(device, stream, None if producer is None else int(producer))
    plain = contiguous(shape, None if strides is None else tuple(strides), kind.itemsize)
    return Operand(address, math.prod(shape), dtype, shape, x, place, plain, not read_only)


def _stream(stream: int | None) -> int:
    """Returns a stream in DLPack's numbering; None is the legacy stream. Raises TypeError or ValueError."""
    if stream is None:
        return _LEGACY
    if isinstance(stream, bool) or not isinstance(stream, int):
        raise TypeError(f"stream must be a CUstream as an integer; got {stream!r}")
    if stream <= 0:
        raise ValueError(f"stream={stream} is not a stream: 1 is the legacy stream, 2 that of the calling thread")
    return stream


def device_of(number: int) -> CudaDevice:
    """Returns a device by number. Raises BaguaError with `why_not()` without CUDA, and DeviceError."""
    devices = process_state.process.cuda_devices
    found = devices.get(number)
    if found is None:
        made = process_state.cuda_libraries().device(config.cuda_places(), config.cuda_cache(), number)
        # Another thread may have been faster. All threads must use the same object.
        found = devices.setdefault(number, made)
        if found is made:
            # Free the driver's objects before the driver is unloaded.
            process_state.at_exit(found.release)
    return found


def _number(address: int, what: str) -> int:
    """Returns the number of the device that owns an address. Raises TypeError if no device does."""
    number = process_state.cuda_libraries().device_of(config.cuda_places(), address)
    if number is None:
        raise TypeError(f"{what} says that it is on a CUDA device, but its memory is not")
    if number < 0:
        raise TypeError(f"{what} is in CUDA managed memory, which cannot be communicated")
    return number
