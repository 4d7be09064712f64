"""Checks whether tensors are contiguous in memory, and makes them so."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch

from ...bucket_memory import flat_under, layout_of, window


def adjacent(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Returns True if ``second`` begins where ``first`` ends, in the same storage."""
    return (
        second.data_ptr() == first.data_ptr() + first.numel() * first.element_size()
        and flat_under(first).untyped_storage().data_ptr() == flat_under(second).untyped_storage().data_ptr()
    )


def whole(pieces: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Returns a flat tensor over the memory of contiguous dense tensors; None if they are not contiguous."""
    if any(piece.stride() != layout_of(piece) for piece in pieces):
        return None
    if any(not adjacent(one, other) for one, other in pairwise(pieces)):
        return None
    return flat_under(pieces[0]).detach().as_strided((sum(piece.numel() for piece in pieces),), (1,))


def cut(flat: torch.Tensor, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Returns views of a flat tensor, one after the other, with the shapes and strides of the tensors in ``like``."""
    views = []
    start = 0
    for model in like:
        views.append(window(flat, model.shape, model.stride(), start))
        start += model.numel()
    return views


def room_for(like: Sequence[torch.Tensor], dtype: torch.dtype | None = None) -> torch.Tensor:
    """Returns a new uninitialised flat tensor with the number of elements of all tensors in ``like``."""
    return torch.empty(
        sum(model.numel() for model in like), dtype=like[0].dtype if dtype is None else dtype, device=like[0].device
    )
