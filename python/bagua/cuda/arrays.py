"""Arrays in the memory of CUDA devices: DLPack, or `__cuda_array_interface__` (version 2 or 3).

https://numba.readthedocs.io/en/stable/cuda/cuda_array_interface.html
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from typing import Any

import numpy as np

from bagua import config, lifecycle
from bagua.dlpack import capsule_of, contiguous, lent_by
from bagua.engine import DTYPES, Communicator, CudaCall, CudaDevice

__all__ = ["CudaMemory", "device_of", "memory_of"]

#: The legacy stream, by DLPack's number.
_LEGACY = 1

_NAMES = {
    ("f", 2): "float16",
    ("f", 4): "float32",
    ("f", 8): "float64",
    ("u", 1): "uint8",
    ("i", 1): "int8",
    ("i", 4): "int32",
    ("i", 8): "int64",
    ("b", 1): "bool",
    ("c", 8): "complex64",
    ("c", 16): "complex128",
}
_SIZES = {name: size for (_, size), name in _NAMES.items()} | {"bfloat16": 2}


@dataclasses.dataclass(frozen=True)
class CudaMemory:
    """The memory of an array on a device, and what must stay alive with it."""

    #: Of the first byte, in the device's memory.
    address: int
    #: Dimensions.
    shape: tuple[int, ...]
    #: Name of the element type.
    dtype_name: str
    #: Where it is.
    device: CudaDevice
    #: The stream of the call.
    stream: int
    #: A stream of the array's own that has work on it, where it names one.
    producer: int | None
    #: Whether its elements follow each other in C order.
    contiguous: bool
    #: Whether it may be written.
    writable: bool
    #: What the caller gave.
    owner: Any
    #: The capsule that lends the memory, where there is one.
    lender: Any = None

    @property
    def dtype(self) -> int:
        """Code of the element type."""
        return DTYPES[self.dtype_name]

    @property
    def count(self) -> int:
        """Elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return self.count * _SIZES[self.dtype_name]

    @property
    def where(self) -> str:
        """The place, for error texts."""
        return f"cuda:{self.device.number}"

    def to_write(self, what: str) -> CudaMemory:
        """Itself; ValueError when it cannot hold a result where it is."""
        if not self.writable:
            raise ValueError(f"{what} is read-only: give out= with an array to write to")
        return self.to_read(what)

    def to_read(self, what: str = "the array") -> CudaMemory:
        """Itself; ValueError when its elements do not follow each other."""
        if not self.contiguous:
            raise ValueError(f"{what} is on a CUDA device and not contiguous in C order: make a contiguous copy")
        return self

    @property
    def producers(self) -> list[int]:
        """The stream of its own, where it names another one than the call's."""
        return self._producers([self])

    def nothing(self) -> CudaMemory:
        """No elements, at the same place."""
        return dataclasses.replace(self, shape=(0,))

    def call(self, communicator: Communicator, others: Iterable[Any]) -> CudaCall:
        """The device's side of an operation on these arrays, all at one place.

        NotImplementedError for a stream that is being captured, before anything is enqueued.
        """
        wish, check = config.cuda_collective(), config.cuda_check()
        return communicator.cuda_call(self.device, self.stream, self._producers(others), wish, check)

    def call_messages(self, communicator: Communicator, others: Iterable[Any]) -> CudaCall:
        """As `call`, for messages."""
        return communicator.cuda_messages(self.device, self.stream, self._producers(others))

    def call_alone(self, others: Iterable[CudaMemory]) -> CudaCall:
        """As `call`, for what this process does by itself."""
        return self.device.call(self.stream, self._producers(others))

    def _producers(self, others: Iterable[Any]) -> list[int]:
        """Streams that the call's is to be ordered after."""
        producers = {other.producer for other in others if other is not None} - {None, self.stream}
        return [each for each in producers if each]


def memory_of(x: Any, what: str, stream: int | None) -> CudaMemory:
    """The memory of an array on a CUDA device, whose stream is ordered after the array's producer.

    BaguaError with `why_not()` without CUDA; TypeError for what cannot travel; NotImplementedError when the stream is
    being captured, before anything is enqueued.
    """
    stream = _stream(stream)
    if hasattr(x, "__dlpack__"):
        device = device_of(int(x.__dlpack_device__()[1]))
        device.refuse_capture([stream])
        capsule = capsule_of(x, what, stream=stream)
        lent = lent_by(capsule, what)
        return CudaMemory(
            lent.address,
            lent.shape,
            lent.dtype_name,
            device,
            stream,
            None,
            contiguous(lent.shape, lent.strides),
            lent.writable,
            x,
            capsule,
        )
    return _from_interface(x, what, stream)


def _from_interface(x: Any, what: str, stream: int) -> CudaMemory:
    interface = x.__cuda_array_interface__
    version = interface.get("version")
    if version not in (2, 3):
        raise TypeError(f"{what} has version {version} of __cuda_array_interface__; 2 and 3 can be read")
    if interface.get("mask") is not None:
        raise TypeError(f"{what} has a mask: masked arrays cannot travel")
    kind = np.dtype(interface["typestr"])
    name = _NAMES.get((kind.kind, kind.itemsize))
    if name is None or not kind.isnative:
        raise TypeError(f"{what} has elements of type {kind}; these can travel: {', '.join(DTYPES)}")
    address, read_only = interface["data"]
    shape = tuple(int(size) for size in interface["shape"])
    strides = interface.get("strides")
    producer = interface.get("stream")
    if producer == 0:
        raise ValueError(f"{what} names stream 0, which means nothing in __cuda_array_interface__")
    return CudaMemory(
        int(address or 0),
        shape,
        name,
        device_of(_number(int(address or 0), what) if 0 not in shape else 0),
        stream,
        None if producer is None else int(producer),
        contiguous(shape, None if strides is None else tuple(strides), kind.itemsize),
        not read_only,
        x,
    )


def _stream(stream: int | None) -> int:
    """A stream by DLPack's numbers; None is the legacy stream."""
    if stream is None:
        return _LEGACY
    if isinstance(stream, bool) or not isinstance(stream, int):
        raise TypeError(f"stream={stream!r} is no CUstream as an integer")
    if stream <= 0:
        raise ValueError(f"stream={stream} is no stream: 1 is the legacy stream, 2 that of the calling thread")
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
        raise TypeError(f"{what} lives in CUDA managed memory, which cannot travel")
    return number
