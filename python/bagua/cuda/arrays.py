"""Arrays in the memory of CUDA devices: DLPack, or `__cuda_array_interface__` (version 2 or 3).

https://numba.readthedocs.io/en/stable/cuda/cuda_array_interface.html
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from bagua import config, engine, lifecycle
from bagua.dlpack import contiguous, export
from bagua.engine import DTYPES, Communicator, CudaCall, CudaDevice
from bagua.operand import Operand, numpy_code

if TYPE_CHECKING:
    from bagua.handle import AnyHandle

__all__ = ["ArrayStream", "device_of", "operand"]

#: The legacy stream, by DLPack's number.
_LEGACY = 1


class ArrayStream(NamedTuple):
    """Where an array is, and the streams of a call on it."""

    device: CudaDevice
    #: The stream of the call.
    stream: int
    #: A stream of the array's own that has work on it, where it names one.
    producer: int | None = None

    @property
    def where(self) -> str:
        """The device, for error texts."""
        return f"cuda:{self.device.number}"

    def call(self, raw: Communicator, places: Sequence[ArrayStream]) -> CudaCall:
        """See `DeviceStream.call`."""
        return raw.cuda_call(
            self.device, self.stream, self.producers(places), config.cuda_collective(), config.cuda_check()
        )

    def call_messages(self, raw: Communicator, places: Sequence[ArrayStream]) -> CudaCall:
        """See `DeviceStream.call_messages`."""
        return raw.cuda_messages(self.device, self.stream, self.producers(places))

    def call_alone(self, places: Sequence[ArrayStream]) -> CudaCall:
        """As `call`, for what this process does by itself."""
        return self.device.call(self.stream, self.producers(places))

    def handle(self, done: engine.Handle | None, finish: Callable[[], None] | None) -> AnyHandle | None:
        """What the core says: results are never copied here."""
        return done

    def producers(self, places: Sequence[ArrayStream]) -> list[int]:
        """Streams that the call's is to be ordered after."""
        return [each for each in {place.producer for place in places} - {None, self.stream} if each]


def operand(x: Any, what: str, stream: int | None) -> Operand:
    """An array on a CUDA device, whose stream is ordered after the array's producer.

    BaguaError with `why_not()` without CUDA; TypeError for what cannot be sent; NotImplementedError when the stream is
    being captured, before anything is enqueued.
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
        raise TypeError(f"{what} has version {version} of __cuda_array_interface__; 2 and 3 can be read")
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
        raise ValueError(f"{what} names stream 0, which means nothing in __cuda_array_interface__")
    device = device_of(_number(address, what) if 0 not in shape else 0)
    place = ArrayStream(device, stream, None if producer is None else int(producer))
    plain = contiguous(shape, None if strides is None else tuple(strides), kind.itemsize)
    return Operand(address, math.prod(shape), dtype, shape, x, place, plain, not read_only)


def _stream(stream: int | None) -> int:
    """A stream by DLPack's numbers; None is the legacy stream."""
    if stream is None:
        return _LEGACY
    if isinstance(stream, bool) or not isinstance(stream, int):
        raise TypeError(f"stream must be a CUstream as an integer; got {stream!r}")
    if stream <= 0:
        raise ValueError(f"stream={stream} is not a stream: 1 is the legacy stream, 2 that of the calling thread")
    return stream


def device_of(number: int) -> CudaDevice:
    """A device, by its number. BaguaError with `why_not()` without CUDA, DeviceError."""
    devices = lifecycle.process.cuda_devices
    found = devices.get(number)
    if found is None:
        made = lifecycle.cuda_libraries().device(config.cuda_places(), config.cuda_cache(), number)
        # Another thread may have been faster; all must have the same object.
        found = devices.setdefault(number, made)
        if found is made:
            # The driver's objects are freed while it is there.
            lifecycle.at_exit(found.release)
    return found


def _number(address: int, what: str) -> int:
    """The number of the device whose memory an address is."""
    number = lifecycle.cuda_libraries().device_of(config.cuda_places(), address)
    if number is None:
        raise TypeError(f"{what} says that it is on a CUDA device, and its memory is not")
    if number < 0:
        raise TypeError(f"{what} is in CUDA managed memory, which cannot be communicated")
    return number
