"""Memory that the core works in, and the tensors over it that users have.

torch can replace the memory under every tensor that a user reaches. ``tensor.data = ...`` and ``set_`` do so for one
tensor; ``share_memory_()``, and a queue of torch.multiprocessing on a thread of its own, for all tensors of a storage,
whose old memory they free. So a tensor with which we keep memory alive, or by which we find it, is never given to a
user, nor is another tensor of its storage: a user gets tensors over the same memory, each in a storage of its own.
Whatever becomes of that storage, the memory stays, and comparing addresses shows that a tensor has other memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

_to_dlpack: Any = torch._C._to_dlpack
_from_dlpack: Any = torch._C._from_dlpack


def is_lazy_value(tensor: torch.Tensor) -> bool:
    """True if its memory holds the negatives or conjugates of its values, which torch computes when it reads."""
    return tensor.is_neg() or tensor.is_conj()


def resolved(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor whose memory holds its values: the same one, or a copy where :func:`is_lazy_value`."""
    return tensor.resolve_conj().resolve_neg()


def require_resolved(tensor: torch.Tensor, what: str) -> None:
    """ValueError where :func:`is_lazy_value`: the core would read the wrong values, and write wrong results."""
    if is_lazy_value(tensor):
        relation = "conjugate" if tensor.is_conj() else "negation"
        raise ValueError(
            f"{what} is the lazy {relation} of what its memory holds: call resolve_conj() and resolve_neg() on it"
        )


def layout_of(tensor: torch.Tensor) -> tuple[int, ...]:
    """Strides for the tensor's values in contiguous memory: its own if it has no gaps, else row-major ones."""
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
    """A tensor over the same host memory in a storage of its own, which begins at the first element, and which keeps
    ``memory`` alive; the reverse does not hold. On a device, where no storage is moved, in the same storage.
    """
    if memory.device.type != "cpu" or memory.numel() == 0:
        return memory.detach()
    found: torch.Tensor = _from_dlpack(_to_dlpack(memory.detach()))
    return found


def window(flat: torch.Tensor, shape: torch.Size, strides: Sequence[int], offset: int) -> torch.Tensor:
    """A tensor without gaps over a part of a flat tensor, from element ``offset``; :func:`flat_under` finds the part.

    In host memory it has a storage of its own, which begins there. torch up to 2.15 adds a sparse COO tensor without
    dense dimensions to a view at twice the view's storage offset: to another parameter, were they in one storage.
    """
    # Flat: DLPack changes strides of dimensions with one element in older versions of torch.
    part = flat.as_strided((shape.numel(),), (1,), flat.storage_offset() + offset)
    found = over(part)
    storage = found.untyped_storage()
    if storage._cdata != part.untyped_storage()._cdata:
        # torch keeps a storage's Python object, with its attributes, as long as the storage.
        vars(storage)["_bagua_part"] = part
    return found.as_strided(shape, strides)


def flat_under(tensor: torch.Tensor) -> torch.Tensor:
    """The part of a flat tensor that a :func:`window` was made over, in the flat one's storage; else the tensor."""
    part = vars(tensor.untyped_storage()).get("_bagua_part")
    # share_memory_() gives the same storage other memory.
    return part if part is not None and part.data_ptr() == tensor.data_ptr() else tensor


class FlatMemory:
    """The memory of a flattened bucket."""

    def __init__(self, own: torch.Tensor) -> None:
        #: One-dimensional, without gaps; never given to a user.
        self.own = own
        self._shown = over(own)
        #: Each shape of a slice, so that equal ones are one object: a bucket of many tensors has few shapes.
        self.shapes: dict[torch.Size, torch.Size] = {}

    def shown(self) -> torch.Tensor:
        """The same memory, for users."""
        if self._shown.data_ptr() != self.own.data_ptr():
            self._shown = over(self.own)
        return self._shown


class BucketSlice:
    """The slice of a bucket's memory that belongs to one tensor of the bucket. The tensors over it are made when they
    are first needed, which is in the first backward for a gradient that does not exist yet.
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
        """A tensor over the slice for a short time. Those of one bucket share a storage, so they are quickly made."""
        return self._in(self._flat.shown())

    def _window(self) -> torch.Tensor:
        return window(self._flat.own, self.shape, self.strides, self._offset)

    def holds(self, tensor: torch.Tensor) -> bool:
        """True if the tensor's values are those of the slice, element by element."""
        return (
            tensor.data_ptr() == self.address
            and tensor.stride() == self.strides
            and tensor.dtype is self.dtype
            and tensor.shape == self.shape
            and not is_lazy_value(tensor)
        )

    def tensor(self) -> torch.Tensor:
        """A new tensor over the slice, for users."""
        if self._shown is None or self._shown.data_ptr() != self.address:
            self._shown = self._window()
        return self._shown.data

    def put_back(self, tensor: torch.Tensor) -> None:
        """Gives a tensor that got other memory its slice again, with the values it has now. Not one of another type
        or shape, which was changed on purpose.
        """
        if tensor.dtype is self.dtype and tensor.shape == self.shape:
            self.take(tensor)
            tensor.data = self.tensor()

    def take(self, values: torch.Tensor) -> None:
        """Copies values into the slice."""
        if values.requires_grad:
            values = values.detach()
        # Other strides over the same memory: torch does not see that the two overlap, as their storages differ.
        self.own.copy_(values.clone() if values.data_ptr() == self.address else values)
