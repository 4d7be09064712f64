"""Packs several tensors into one message, and unpacks them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .backends import Group, find


def pack_tensors(
    tensors: Sequence[torch.Tensor], use_cuda: bool = False
) -> tuple[torch.Tensor, list[int], list[torch.Size]]:
    """Concatenates tensors of one dtype.

    Returns the flat tensor, the start index of each tensor followed by the total length (``len + 1`` numbers), and the
    shapes. The flat tensor is in CUDA memory if the first tensor is and ``use_cuda`` is set, else on the host. An empty
    sequence gives an empty float32 tensor. Raises TypeError if dtypes differ.
    """
    kinds = sorted({str(tensor.dtype) for tensor in tensors})
    if len(kinds) > 1:
        raise TypeError(f"tensors of different dtypes cannot be packed: {', '.join(kinds)}")
    indices = [0]
    for tensor in tensors:
        indices.append(indices[-1] + tensor.numel())
    if not tensors:
        return torch.empty(0), indices, []
    device = tensors[0].device if use_cuda and tensors[0].is_cuda else torch.device("cpu")
    return flatten(tensors, device), indices, [tensor.shape for tensor in tensors]


def unpack_tensors(aggregated: torch.Tensor, indices: Sequence[int], sizes: Sequence[torch.Size]) -> list[torch.Tensor]:
    """Returns the tensors that :func:`pack_tensors` concatenated, as views of the flat tensor."""
    return [aggregated[begin:end].view(size) for begin, end, size in zip(indices[:-1], indices[1:], sizes, strict=True)]


def flatten(tensors: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Returns a new flat tensor on ``device`` with all tensors' elements, each in logical (not memory) order."""
    return torch.cat([tensor.detach().reshape(-1).to(device) for tensor in tensors])


def global_average(
    sum: torch.Tensor | float,  # noqa: A002, RUF100
    count: torch.Tensor | float,
    *,
    group: Group = None,
) -> torch.Tensor:
    """Returns the sum of all ranks' sums divided by the sum of their counts, as a tensor without dimensions.

    The result has the dtype of ``sum`` if that is a floating-point tensor, else torch's default dtype. The sums are
    computed in float64.
    """
    kind = sum.dtype if isinstance(sum, torch.Tensor) and sum.is_floating_point() else torch.get_default_dtype()
    peers = find(group)
    both = torch.tensor([float(sum), float(count)], dtype=torch.float64)
    both = both.to(peers.place(both.device, False))
    peers.all_reduce(both, "sum")
    return (both[0] / both[1]).to(device="cpu", dtype=kind)
