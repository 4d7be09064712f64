"""Arrays on the simulated driver or a true one, by ctypes: what a framework with CUDA arrays would give to Bagua."""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from tests.cuda.driver import Driver

LEGACY = 1

_DTYPES = {"f": 2, "i": 0, "u": 1, "b": 6, "c": 5}


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
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    )


_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype = ctypes.py_object
_new_capsule.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)


class Cuda:
    """The driver of a rank, with the primary context of one device current on the thread that made it.

    By default it is device 0, and a device of the rank's own where ranks communicate by NCCL, or OWN_DEVICE is set.
    """

    def __init__(self, device: int | None = None) -> None:
        self.driver = Driver()
        if device is None:
            own = os.environ.get("BAGUA_CUDA_COLLECTIVE") == "nccl" or "OWN_DEVICE" in os.environ
            device = int(os.environ["RANK"]) if own else 0
        self.device = device
        self.driver.start(device)
        self.arrays: list[DeviceArray] = []
        # Bytes that copies of ours on streams read from or write to, until `close`.
        self._pinned: list[Any] = []
        self._streams: list[int] = []
        self._gates: list[Gate] = []

    def stream(self) -> int:
        """A stream that is not ordered with the legacy stream."""
        stream = self.driver.stream()
        self._streams.append(stream)
        return stream

    def array(self, values: Any, *, dlpack: bool = False, stream: int = LEGACY, **interface: Any) -> DeviceArray:
        """An array of these values, which `stream` writes late: when a call waits for it."""
        values = np.ascontiguousarray(values)
        made = DeviceArray(self, values.shape, values.dtype, dlpack, stream, interface)
        made.write(values, stream)
        return made

    def empty(self, shape: Any, dtype: Any, *, dlpack: bool = False, **interface: Any) -> DeviceArray:
        """An array of NaNs or the like."""
        shape = (shape,) if isinstance(shape, int) else tuple(shape)
        return DeviceArray(self, shape, np.dtype(dtype), dlpack, LEGACY, interface)

    def pinned(self, size: int) -> Any:
        """Pinned bytes, which are valid until `close`."""
        found = self.driver.pinned(max(size, 1))
        self._pinned.append(found)
        return found

    def order(self, before: int, after: int) -> None:
        """Makes work that `after` gets from now on wait for the work that `before` has."""
        event = self.driver.event()
        self.driver.cuEventRecord(event, before)
        self.driver.cuStreamWaitEvent(after, event, 0)
        self.driver.cuEventDestroy_v2(event)

    def late(self, stream: int) -> Gate:
        """Makes work that the stream gets from now on wait until the gate is opened.

        On the simulated driver it begins when a call waits for it, gate or not.
        """
        gate = Gate(self, stream)
        self._gates.append(gate)
        return gate

    def close(self) -> None:
        """Waits for the device and frees everything."""
        for gate in self._gates:
            gate.open()
        self.driver.cuCtxSynchronize()
        for array in self.arrays:
            array.free()
        for each in self._pinned:
            self.driver.free_pinned(each)
        for stream in self._streams:
            self.driver.cuStreamDestroy_v2(stream)


class Gate:
    """Work of a stream that waits until the host opens it."""

    def __init__(self, cuda: Cuda, stream: int) -> None:
        self._word = None if cuda.driver.simulated else cuda.pinned(4)
        if self._word is not None:
            self._word.raw = bytes(4)
            # Legacy and other streams are ordered behind a stream that waits for the word: 1 is "greater or equal".
            own = cuda.stream()
            cuda.driver.cuStreamWaitValue32_v2(own, self._word, 1, 0)
            cuda.order(own, stream)

    def open(self) -> None:
        """Lets the stream go on."""
        if self._word is not None:
            self._word.raw = (1).to_bytes(4, "little")

    @contextmanager
    def opened_after(self, seconds: float) -> Iterator[None]:
        """Opens it so many seconds after now, from another thread, which has ended when this ends."""
        timer = threading.Timer(seconds, self.open)
        timer.start()
        try:
            yield
        finally:
            self.open()
            timer.join()


class DeviceArray:
    """An array on the device, of its owner's; freed by `Cuda.close` or by `free`."""

    def __init__(
        self, cuda: Cuda, shape: tuple[int, ...], dtype: np.dtype[Any], dlpack: bool, stream: int, interface: Any
    ) -> None:
        self.cuda, self.shape, self.dtype, self.stream = cuda, shape, dtype, stream
        self.nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        self.address = cuda.driver.memory(max(self.nbytes, 1))
        self._interface = interface
        self._exported: list[Any] = []
        #: What `__dlpack__` was asked to order.
        self.asked: list[int | None] = []
        if dlpack:
            self.__class__ = _Exporting
        cuda.arrays.append(self)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "version": 3,
            "shape": self.shape,
            "typestr": self.dtype.str,
            "data": (self.address, False),
            "strides": None,
            "stream": self.stream,
        } | self._interface

    def write(self, values: Any, stream: int) -> None:
        """A stream writes these values, when it has come so far."""
        data = np.ascontiguousarray(values, self.dtype).tobytes()
        if data:
            pinned = self.cuda.pinned(len(data))
            pinned.raw = data
            self.cuda.driver.cuMemcpyHtoDAsync_v2(self.address, pinned, len(data), stream)

    def read(self, stream: int = LEGACY) -> np.ndarray[Any, Any]:
        """The values as work of `stream` sees them; waits for it."""
        pinned = self.cuda.pinned(self.nbytes)
        if self.nbytes:
            self.cuda.driver.cuMemcpyDtoHAsync_v2(pinned, self.address, self.nbytes, stream)
            event = self.cuda.driver.event()
            self.cuda.driver.cuEventRecord(event, stream)
            while (code := self.cuda.driver.code("cuEventQuery", event)) == 600:
                time.sleep(1e-4)  # the other ranks need the processor
            assert code == 0, code
            self.cuda.driver.cuEventDestroy_v2(event)
        return np.frombuffer(bytes(pinned.raw[: self.nbytes]), self.dtype).reshape(self.shape).copy()

    def free(self) -> None:
        """Gives the memory back, once."""
        if self.address:
            self.cuda.driver.cuMemFree_v2(self.address)
            self.address = 0


class _Exporting(DeviceArray):
    """The same by DLPack."""

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, self.cuda.device

    def __dlpack__(self, *, stream: int | None = None) -> Any:
        self.asked.append(stream)
        if stream is not None and stream != self.stream:
            self.cuda.order(self.stream, stream)
        shape = (ctypes.c_int64 * len(self.shape))(*self.shape)
        code, bits = _DTYPES[self.dtype.kind], self.dtype.itemsize * 8
        if self._interface.get("bfloat16"):
            code = 4
        tensor = _Tensor(self.address, 2, self.cuda.device, len(self.shape), code, bits, 1, shape, None, 0, None, None)
        self._exported.append((shape, tensor))
        return _new_capsule(ctypes.addressof(tensor), b"dltensor", None)
