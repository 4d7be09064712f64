"""Shared memory in which the ranks of a host communicate in place, as buffers for arrays."""

from __future__ import annotations

import ctypes
import math
import sys
from typing import TYPE_CHECKING, Any

import numpy as np

from bagua import engine

if TYPE_CHECKING:
    from numpy.typing import DTypeLike

__all__ = ["empty", "memory"]


def memory(communicator: engine.Communicator, nbytes: int, label: str = "bagua-arena") -> ctypes.Array[ctypes.c_uint8]:
    """`nbytes` of zeroed memory, as an object with the buffer protocol, which owns it.

    Local: made by this rank alone. Verbs on tensors that lie in such memory at all ranks work on the peers' memory
    directly; where no peer shares memory with this rank it is ordinary memory.
    """
    arena = communicator.arena(nbytes, label=label)
    view = (ctypes.c_uint8 * nbytes).from_address(arena.address)
    # What is made over the view holds the view, and the view holds the memory.
    view.arena = arena  # type: ignore[attr-defined]
    return view


def empty(communicator: engine.Communicator, shape: int | tuple[int, ...], dtype: DTypeLike) -> np.ndarray[Any, Any]:
    """An array in such memory."""
    kind = np.dtype(dtype)
    count = shape if isinstance(shape, int) else math.prod(shape)
    if not 0 <= count * kind.itemsize <= sys.maxsize:
        raise ValueError(f"an array of shape {shape} and type {kind} cannot exist")
    view = memory(communicator, count * kind.itemsize)
    return np.ctypeslib.as_array(view).view(kind).reshape(shape)
