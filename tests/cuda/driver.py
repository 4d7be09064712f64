"""The CUDA driver API by ctypes, for scenarios on the simulated driver and on a true one."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tests.waits import until as until  # Scenarios take all names of this module.


class Driver:
    """`cuda.cuMemFree_v2(…)` raises where the call fails; `cuda.code("cuMemFree_v2", …)` returns what it returned."""

    def __init__(self) -> None:
        self.library = ctypes.CDLL(os.environ.get("BAGUA_LIBCUDA", "libcuda.so.1"))

    @property
    def simulated(self) -> bool:
        """Returns True for the simulated driver, whose work begins when a call waits for it."""
        return hasattr(self.library, "simLibrary")

    def code(self, name: str, *arguments: Any) -> int:
        """Calls a function and returns its code. Passes integers in 64 bits, which suit every integer parameter."""
        passed = [ctypes.c_int64(each) if isinstance(each, int) else each for each in arguments]
        return int(getattr(self.library, name)(*passed))

    def __getattr__(self, name: str) -> Callable[..., None]:
        def call(*arguments: Any) -> None:
            code = self.code(name, *arguments)
            assert code == 0, f"{name} returned {code}"

        return call

    def get(self, name: str, *arguments: Any, kind: Any = ctypes.c_int64, first: bool = True) -> Any:
        """Calls a function and returns the value that it writes through its first (or last) parameter."""
        value = kind(0)
        place = ctypes.byref(value)
        getattr(self, name)(*((place, *arguments) if first else (*arguments, place)))
        return value.value

    def start(self, device: int = 0) -> int:
        """Initializes the driver and makes a device's primary context current."""
        self.cuInit(0)
        context = int(self.get("cuDevicePrimaryCtxRetain", device))
        self.cuCtxSetCurrent(context)
        return context

    def memory(self, data: bytes | int) -> int:
        """Device memory of so many bytes, or with these."""
        address = int(self.get("cuMemAlloc_v2", data if isinstance(data, int) else len(data)))
        if isinstance(data, bytes):
            self.cuMemcpyHtoD_v2(address, data, len(data))
        return address

    def pinned(self, data: bytes | int) -> Any:
        """Pinned memory of so many bytes, or with these, as a ctypes array."""
        size = data if isinstance(data, int) else len(data)
        array = (ctypes.c_char * size).from_address(self.get("cuMemHostAlloc", size, 0))
        if isinstance(data, bytes):
            array.raw = data
        return array

    def free_pinned(self, array: Any) -> None:
        """Frees what `pinned` made."""
        self.cuMemFreeHost(ctypes.addressof(array))

    def stream(self, flags: int = 1) -> int:
        """A stream, by default one that is not ordered with the legacy stream."""
        return int(self.get("cuStreamCreate", flags))

    def event(self, flags: int = 2) -> int:
        """An event, by default without time."""
        return int(self.get("cuEventCreate", flags))

    @contextmanager
    def captured(self, stream: int, mode: int = 0) -> Iterator[None]:
        """A capture of the stream, which nothing may add to or make invalid."""
        self.cuStreamBeginCapture_v2(stream, mode)
        yield
        graph = self.get("cuStreamEndCapture", stream, first=False)
        assert self.get("cuGraphGetNodes", graph, None, first=False) == 0
        self.cuGraphDestroy(graph)

    def read(self, address: int, size: int) -> bytes:
        """The bytes of device memory. The host waits for the legacy stream and those ordered with it."""
        data = ctypes.create_string_buffer(size)
        self.cuMemcpyDtoH_v2(data, address, size)
        return data.raw
