"""Assigns tensors to buckets. Each rank decides alone, and all ranks come to the same result."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..tensor import effective


def split(tensors: Sequence[torch.Tensor], limit: int) -> list[list[torch.Tensor]]:
    """Splits tensors into buckets of at most ``limit`` bytes, each of one dtype and device.

    A larger tensor gets a bucket of its own. Tensors keep their order, in which they become ready. A bucket is ordered
    by its last tensor: it cannot be sent before that tensor is ready, and must not delay buckets that can.
    """
    if limit <= 0:
        raise ValueError(f"a bucket size of {limit} bytes is not positive")
    closed: list[tuple[int, list[torch.Tensor]]] = []
    # (dtype, device) -> position of the last tensor, bytes, tensors.
    filling: dict[tuple[torch.dtype, torch.device], tuple[int, int, list[torch.Tensor]]] = {}
    for position, tensor in enumerate(tensors):
        kind, size = (tensor.dtype, tensor.device), tensor.numel() * tensor.element_size()
        last, used, bucket = filling.get(kind, (position, 0, []))
        if bucket and used + size > limit:
            closed.append((last, bucket))
            used, bucket = 0, []
        bucket.append(tensor)
        filling[kind] = (position, used + size, bucket)
    closed.extend((last, bucket) for last, _, bucket in filling.values())
    return [bucket for _, bucket in sorted(closed, key=lambda entry: entry[0])]


def split_effective(tensors: Sequence[torch.Tensor], limit: int) -> list[list[torch.Tensor]]:
    """Like :func:`split`, for Bagua tensors by the sizes of their effective tensors."""
    values = [effective(tensor) for tensor in tensors]
    by_id = {id(value): tensor for value, tensor in zip(values, tensors, strict=True)}
    return [[by_id[id(value)] for value in bucket] for bucket in split(values, limit)]
