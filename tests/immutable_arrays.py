"""Arrays that must not be written, of frameworks that export their memory by DLPack."""

from __future__ import annotations

import ctypes

import numpy as np

from bagua.dlpack import _Versioned

_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype = ctypes.py_object
_new_capsule.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
_READ_ONLY = 1


class Flagged:
    """Exports a vector of float32 by DLPack 1.0, which flags it as read-only. Its capsules are valid while it lives."""

    def __init__(self, x: np.ndarray, flags: int = _READ_ONLY) -> None:
        self.x = x
        self.shape = (ctypes.c_int64 * 1)(x.size)
        self.managed = _Versioned(major=1, minor=0, flags=flags)
        tensor = self.managed.tensor
        tensor.data, tensor.device_type, tensor.ndim, tensor.shape = x.ctypes.data, 1, 1, self.shape
        tensor.code, tensor.bits, tensor.lanes = 2, 32, 1

    def __dlpack__(self, *, max_version: tuple[int, int] | None = None) -> object:
        if max_version is None or max_version < (1, 0):
            raise BufferError("an unversioned capsule cannot say that the memory is read-only")
        return _new_capsule(ctypes.addressof(self.managed), b"dltensor_versioned", None)

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0)


class Unversioned:
    """Stands for `jax.Array`: takes max_version and exports an unversioned capsule."""

    def __init__(self, x: np.ndarray) -> None:
        self.x = x

    def __dlpack__(self, *, max_version: tuple[int, int] | None = None) -> object:
        return self.x.__dlpack__()

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0)


class Old(Unversioned):
    """Stands for `jax.Array` of an older version, which does not know max_version."""

    def __dlpack__(self) -> object:  # type: ignore[override]
        return self.x.__dlpack__()


Unversioned.__module__ = Old.__module__ = "jaxlib._jax"

#: How each kind is made of a vector of float32.
IMMUTABLE = {"flagged by DLPack 1.0": Flagged, "jax": Unversioned, "older jax": Old}
