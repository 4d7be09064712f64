"""The kernels of rust/bagua-cuda as functions of the host, and arrays for them at any alignment.

`make cuda-kernels-host` compiles them with g++: the threads of a block are fibers (tests/cuda/host/fibers.h).
"""

from __future__ import annotations

import ctypes
import functools
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]
#: What memory holds before the first write.
UNWRITTEN = 0xA5
THREADS = 256

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
Array = np.ndarray[Any, Any]


def compiled(variant: str = "") -> Path:
    """The library, made where it is missing or old; `variant`: `.sanitized`. RuntimeError without g++ or make."""
    for tool in ("g++", "make"):
        if shutil.which(tool) is None:
            raise RuntimeError(f"there is no {tool} to compile the kernels for the host with")
    name = f"target/cuda-sim/libkernels{variant}.so"
    made = subprocess.run(["make", "-s", name], cwd=ROOT, capture_output=True, text=True, check=False)
    if made.returncode != 0:
        raise AssertionError(f"make {name} failed: {made.stderr}")
    return ROOT / name


def room(size: int, offset: int = 0) -> Bytes:
    """Unwritten bytes, the first of them `offset` behind a multiple of 16, the last one at the end of an allocation."""
    whole = np.full(offset + size, UNWRITTEN, np.uint8)
    assert whole.ctypes.data % 16 == 0, "malloc aligns to 16"
    return whole[offset:]


def placed(values: Array, offset: int = 0) -> Bytes:
    """A copy of the bytes of an array, as `room`."""
    bytes_of = np.frombuffer(values.tobytes(), np.uint8)
    copy = room(bytes_of.size, offset)
    copy[:] = bytes_of
    return copy


def is_untouched_before(array: Bytes) -> bool:
    """Returns True if nothing was written in front of the memory that `room` returned."""
    base = array.base
    return base is None or bool(np.all(base[: base.size - array.size] == UNWRITTEN))


class Sources(ctypes.Structure):
    """Addresses of up to eight arrays."""

    _fields_ = [("at", ctypes.c_void_p * 8)]


def sources(arrays: list[Bytes]) -> Sources:
    """The addresses that are not used are nowhere."""
    return Sources((ctypes.c_void_p * 8)(*(array.ctypes.data for array in arrays), *[16] * (8 - len(arrays))))


class Kernels:
    """A library of kernels."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._library = ctypes.CDLL(str(path))

    def parameters(self, kernel: str) -> list[int] | None:
        """The bytes of each parameter; None: there is no such kernel."""
        sizes = (ctypes.c_size_t * 16)()
        number = self._library.bagua_host_parameters(kernel.encode(), sizes, 16)
        return None if number < 0 else list(sizes[:number])

    def launch(self, kernel: str, blocks: tuple[int, ...], *arguments: Any, shared: int = 0) -> None:
        """A launch that must succeed. An argument is an array, which means its address; None; or a value of ctypes."""
        values = [
            ctypes.c_void_p(it.ctypes.data if isinstance(it, np.ndarray) else None)
            if it is None or isinstance(it, np.ndarray)
            else it
            for it in arguments
        ]
        sizes = [ctypes.sizeof(value) for value in values]
        assert self.parameters(kernel) == sizes, f"{kernel}: {self.parameters(kernel)}, not {sizes}"
        grid = (ctypes.c_uint * 3)(*blocks, *[1] * (3 - len(blocks)))
        block = (ctypes.c_uint * 3)(THREADS, 1, 1)
        addresses = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
        outcome = self._library.bagua_host_launch(kernel.encode(), grid, block, ctypes.c_size_t(shared), addresses)
        assert outcome == 0, f"{kernel} ended with {outcome}"


@functools.cache
def compiled_kernels() -> Kernels:
    """The library without sanitizers. RuntimeError without g++ or make."""
    return Kernels(compiled())


@pytest.fixture(scope="module")
def kernels() -> Kernels:
    """The kernels as functions of this process."""
    try:
        return compiled_kernels()
    except RuntimeError as missing:
        pytest.skip(str(missing))
