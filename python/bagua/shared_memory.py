"""Arrays in memory that the ranks of a host share."""

from __future__ import annotations

import ctypes
import math
import sys
from typing import TYPE_CHECKING, Any

import numpy as np

from bagua import extension

if TYPE_CHECKING:
    from numpy.typing import DTypeLike

__all__ = ["empty", "memory"]


def memory(
    communicator: extension.Communicator, nbytes: int, label: str = "bagua-arena"
) -> ctypes.Array[ctypes.c_uint8]:
    """Returns an object with the buffer protocol that owns `nbytes` of zeroed memory. Local to this rank.

    Verbs on tensors that lie in such memory on all ranks read the peers' memory directly. If no peer shares memory with
    this rank, this is ordinary memory.
    """
    arena = communicator.arena(nbytes, label=label)
    view = (ctypes.c_uint8 * nbytes).from_address(arena.address)
    # Arrays made from the view keep the view alive, and the view keeps the memory alive.
    view.arena = arena  # type: ignore[attr-defined]
    return view


def empty(communicator: extension.Communicator, shape: int | tuple[int, ...], dtype: DTypeLike) -> np.ndarray[Any, Any]:
    """Returns an array of zeros in memory from `memory`. Raises ValueError for an impossible size."""
    kind = np.dtype(dtype)
    count = shape if isinstance(shape, int) else math.prod(shape)
    if not 0 <= count * kind.itemsize <= sys.maxsize:
        raise ValueError(f"an array of shape {shape} and type {kind} cannot exist")
    view = memory(communicator, count * kind.itemsize)
    return np.ctypeslib.as_array(view).view(kind).reshape(shape)
