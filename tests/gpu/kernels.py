"""The kernels, launched by the driver from machine code that NVRTC made, on arrays in pinned memory of the host.

`python -m tests.gpu.kernels` checks a selection of all cases, for compute-sanitizer too.
"""

from __future__ import annotations

import ctypes
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from bagua.extension import CUDA_KERNELS
from tests.cuda import kernel_cases, kernels_on_host
from tests.cuda.driver import Driver
from tests.cuda.kernels_on_host import THREADS, UNWRITTEN, Bytes, Kernels

_CAPABILITY_MAJOR, _CAPABILITY_MINOR = 75, 76

#: Writes the machine code of every program into a folder, in a process of its own.
COMPILE = """
import sys
from pathlib import Path
from bagua import config
from bagua.extension import CUDA_KERNELS, CudaLibraries
libraries, places = CudaLibraries(), config.cuda_places()
for name in CUDA_KERNELS:
    Path(sys.argv[1], f"{name}.cubin").write_bytes(libraries.cubin(places, None, name, int(sys.argv[2])))
"""


class DeviceKernels(Kernels):
    """Kernels on device 0. Arrays of `room` have one address for the host and the device; 256 MiB of them at a time."""

    def __init__(self) -> None:
        self.driver = Driver()
        self.driver.start()
        attribute = [
            self.driver.get("cuDeviceGetAttribute", which, 0, kind=ctypes.c_int32)
            for which in (_CAPABILITY_MAJOR, _CAPABILITY_MINOR)
        ]
        self._functions: dict[str, int] = {}
        with tempfile.TemporaryDirectory(prefix="bagua-kernels-") as folder:
            subprocess.run([sys.executable, "-c", COMPILE, folder, f"{attribute[0]}{attribute[1]}"], check=True)
            for image in Path(folder).glob("*.cubin"):
                module = self.driver.get("cuModuleLoadData", image.read_bytes())
                for name in CUDA_KERNELS[image.name.split(".")[0]]:
                    self._functions[name] = self.driver.get("cuModuleGetFunction", module, name.encode())
        self._pool = self.driver.pinned(256 << 20)
        self._memory: Bytes = np.frombuffer(self._pool, np.uint8)
        self._used = 0

    def room(self, size: int, offset: int = 0) -> Bytes:
        """Like `kernels_on_host.room`. Starts again at the front when the memory is used up."""
        total = (offset + size + 15) // 16 * 16
        if self._used + total > self._memory.size:
            self._used = 0
        whole = self._memory[self._used : self._used + offset + size]
        # Its own base, for `is_untouched_before`.
        whole = np.frombuffer((ctypes.c_uint8 * whole.size).from_address(whole.ctypes.data), np.uint8)  # type: ignore[call-overload]
        whole[:] = UNWRITTEN
        self._used += total
        view = _Room(whole.shape, np.uint8, whole.data)
        return view[offset:]

    def launch(self, kernel: str, blocks: tuple[int, ...], *arguments: Any, shared: int = 0) -> None:
        """A launch that must succeed, and its end."""
        values = [
            ctypes.c_void_p(it.ctypes.data if isinstance(it, np.ndarray) else None)
            if it is None or isinstance(it, np.ndarray)
            else it
            for it in arguments
        ]
        addresses = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
        grid = (*blocks, *[1] * (3 - len(blocks)))
        self.driver.cuLaunchKernel(self._functions[kernel], *grid, THREADS, 1, 1, shared, None, addresses, None)
        self.driver.cuCtxSynchronize()

    def close(self) -> None:
        """Gives the pinned memory back."""
        self.driver.free_pinned(self._pool)


class _Room(np.ndarray[Any, np.dtype[np.uint8]]):
    """An array whose views have it as their base."""


def check_all(rank: int = 0) -> int:
    """How many cases were checked."""
    kernels = DeviceKernels()
    mine = kernels.room
    for module in (kernels_on_host, kernel_cases):
        module.room = mine  # type: ignore[attr-defined]
    done = kernel_cases.check_all(kernels)
    kernels.close()
    return done


if __name__ == "__main__":
    print(check_all(), "cases")
