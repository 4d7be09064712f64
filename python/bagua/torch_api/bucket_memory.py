"""Memory that the core works in, and tensors over it that users get.

torch can replace the memory under every tensor that a user holds. ``tensor.data = ...`` and ``set_`` do so for one
tensor. ``share_memory_()``, and a queue of torch.multiprocessing on its own thread, do so for all tensors of a storage,
and free the old memory. Tensors that keep memory alive, or by which the core's memory is found, are therefore never
given to a user, nor is another tensor of the same storage. A user gets tensors over the same memory, each in its own
storage. Whatever happens to that storage, the memory stays, and comparing addresses shows whether a tensor has moved.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

_to_dlpack: Any = torch._C._to_dlpack
_from_dlpack: Any = torch._C._from_dlpack


@functools.lru_cache(maxsize=16)
def factor_for(value: float, dtype: torch.dtype) -> float | torch.Tensor:
    """Returns a number in the form in which torch multiplies and divides small tensors of this type fastest.

    For float32 that is a tensor, with the same results: 1.6 us instead of 3.4 us for 1,024 elements. A tensor of a
    shorter type would round the number.
    """
    return torch.tensor(value, dtype=dtype, device="cpu") if dtype is torch.float32 else value


def is_lazy_value(tensor: torch.Tensor) -> bool:
    """Returns True if the memory holds negated or conjugated values, which torch resolves when it reads them."""
    return tensor.is_neg() or tensor.is_conj()


def resolved(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the tensor, or a copy whose memory holds the actual values if :func:`is_lazy_value`."""
    return tensor.resolve_conj().resolve_neg()


def require_resolved(tensor: torch.Tensor, what: str) -> None:
    """Raises ValueError if :func:`is_lazy_value`, because the core would read and write wrong values."""
    if is_lazy_value(tensor):
        relation = "conjugate" if tensor.is_conj() else "negation"
        raise ValueError(
            f"{what} is the lazy {relation} of what its memory holds: call resolve_conj() and resolve_neg() on it"
        )


def layout_of(tensor: torch.Tensor) -> tuple[int, ...]:
    """Returns strides for the values in contiguous memory: the tensor's own if it has no gaps, else row-major ones."""
    if tensor.is_contiguous():
        return tensor.stride()
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return torch.empty(tensor.shape, device="meta").stride()
        expected *= size
    return tensor.stride()


def over(memory: torch.Tensor) -> torch.Tensor:
    """Returns a tensor over the same host memory in a storage of its own, which keeps ``memory`` alive.

    The reverse does not hold. The new storage begins at the tensor's first element. On a device, where storages do not
    move, the tensor shares the storage.
    """
    if memory.device.type != "cpu" or memory.numel() == 0:
        return memory.detach()
    found: torch.Tensor = _from_dlpack(_to_dlpack(memory.detach()))
    return found


def window(flat: torch.Tensor, shape: torch.Size, strides: Sequence[int], offset: int) -> torch.Tensor:
    """Returns a dense tensor over a part of a flat tensor, from element ``offset`` on. :func:`flat_under` finds the
    part.

    In host memory the result has its own storage, which begins at that element. The reason is that torch up to 2.15
    adds a sparse COO tensor without dense dimensions to a view at twice the view's storage offset. In a shared storage
    that would be another parameter.
    """
    # Flat, because DLPack changes strides of dimensions with one element in older versions of torch.
    part = flat.as_strided((shape.numel(),), (1,), flat.storage_offset() + offset)
    found = over(part)
    storage = found.untyped_storage()
    if storage._cdata != part.untyped_storage()._cdata:
        # torch keeps a storage's Python object, with its attributes, as long as the storage.
        vars(storage)["_bagua_part"] = part
    return found.as_strided(shape, strides)


def flat_under(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the part of a flat tensor that a :func:`window` was made over, or any other tensor itself."""
    part = vars(tensor.untyped_storage()).get("_bagua_part")
    # share_memory_() gives the same storage other memory.
    return part if part is not None and part.data_ptr() == tensor.data_ptr() else tensor


class FlatMemory:
    """The memory of a flattened bucket."""

    def __init__(self, own: torch.Tensor) -> None:
        #: The memory as a flat, dense tensor. Users get another tensor over it: :meth:`shown`.
        self.own = own
        self._shown = over(own)
        #: Shapes of slices, so that equal shapes are one object. A bucket of many tensors has few shapes.
        self.shapes: dict[torch.Size, torch.Size] = {}

    def shown(self) -> torch.Tensor:
        """Returns a tensor over the same memory for users."""
        if self._shown.data_ptr() != self.own.data_ptr():
            self._shown = over(self.own)
        return self._shown


class BucketSlice:
    """The slice of a bucket's memory that belongs to one tensor of the bucket.

    Tensors over the slice are made when they are first needed. For a gradient that does not exist yet, that is the
    first backward.
    """

    __slots__ = ("_flat", "_offset", "_own", "_shown", "address", "dtype", "shape", "strides")

    def __init__(self, flat: FlatMemory, like: torch.Tensor, offset: int) -> None:
        self._flat = flat
        self._offset = offset
        self.shape, self.strides, self.dtype = (
            flat.shapes.setdefault(like.shape, like.shape),
            layout_of(like),
            like.dtype,
        )
        # torch's address of a tensor without elements is 0.
        self.address = flat.own.data_ptr() + offset * self.dtype.itemsize if self.shape.numel() else 0
        self._own: torch.Tensor | None = None
        self._shown: torch.Tensor | None = None

    @property
    def own(self) -> torch.Tensor:
        """The tensor over the slice that is never given to a user."""
        if self._own is None:
            self._own = self._in(self._flat.own)
        return self._own

    def _in(self, flat: torch.Tensor) -> torch.Tensor:
        return flat.as_strided(self.shape, self.strides, flat.storage_offset() + self._offset)

    def stand_in(self) -> torch.Tensor:
        """Returns a temporary tensor over the slice. This is cheap, because the tensors of a bucket share a storage."""
        return self._in(self._flat.shown())

    def _window(self) -> torch.Tensor:
        return window(self._flat.own, self.shape, self.strides, self._offset)

    def holds(self, tensor: torch.Tensor) -> bool:
        """Returns True if the tensor lies exactly in the slice, element by element."""
        return (
            tensor.data_ptr() == self.address
            and tensor.stride() == self.strides
            and tensor.dtype is self.dtype
            and tensor.shape == self.shape
            and not is_lazy_value(tensor)
        )

    def tensor(self) -> torch.Tensor:
        """Returns a new tensor over the slice, for users."""
        if self._shown is None or self._shown.data_ptr() != self.address:
            self._shown = self._window()
        return self._shown.data

    def put_back(self, tensor: torch.Tensor) -> None:
        """Moves a tensor that got other memory back to its slice, with its current values.

        A tensor whose dtype or shape was changed, on purpose, is left alone.
        """
        if tensor.dtype is self.dtype and tensor.shape == self.shape:
            self.take(tensor)
            tensor.data = self.tensor()

    def take(self, values: torch.Tensor, factor: float = 1.0) -> None:
        """Copies values, multiplied by ``factor``, into the slice. With factor 0, they lose what is not finite."""
        if values.requires_grad:
            values = values.detach()
        # The values may have other strides over the same memory. torch does not notice this overlap, because the
        # storages differ.
        values = values.clone() if values.data_ptr() == self.address else values
        if factor == 0:
            self.own.zero_()
        elif factor == 1:
            self.own.copy_(values)
        else:
            torch.mul(values, factor_for(factor, self.dtype), out=self.own)
