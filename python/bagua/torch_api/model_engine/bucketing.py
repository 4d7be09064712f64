"""Which tensors share a bucket: decided on each rank alone, with the same outcome on all."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..tensor import effective


def split(tensors: Sequence[torch.Tensor], limit: int) -> list[list[torch.Tensor]]:
    """Buckets of at most ``limit`` bytes (a larger tensor has one of its own), each of one dtype and device.

    Tensors keep their order, which is the order in which they become ready. A bucket has the position of its last
    tensor: it cannot be sent before that one is ready, and must not delay buckets that can.
    """
    if limit <= 0:
        raise ValueError(f"a bucket size of {limit} bytes is not positive")
    closed: list[tuple[int, list[torch.Tensor]]] = []
    # Per dtype and device: the position of the last tensor, bytes, tensors.
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
    """:func:`split` of Bagua tensors, by what their effective tensors are."""
    values = [effective(tensor) for tensor in tensors]
    by_id = {id(value): tensor for value, tensor in zip(values, tensors, strict=True)}
    return [[by_id[id(value)] for value in bucket] for bucket in split(values, limit)]
