"""Packs many tensors into one message, and unpacks them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .peers import Group, find


def pack_tensors(
    tensors: Sequence[torch.Tensor], use_cuda: bool = False
) -> tuple[torch.Tensor, list[int], list[torch.Size]]:
    """Concatenates tensors of one dtype.

    Returns the flat tensor, the index where each tensor begins with the total length at the end (so ``len + 1``
    numbers), and the shapes. The flat tensor lies in CUDA memory if the first tensor does and ``use_cuda`` is set, else
    on the host. No tensors make an empty float32 tensor. TypeError for different dtypes.
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
    """The tensors that :func:`pack_tensors` concatenated, as views into the flat tensor."""
    return [aggregated[begin:end].view(size) for begin, end, size in zip(indices[:-1], indices[1:], sizes, strict=True)]


def flatten(tensors: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """A fresh flat tensor on ``device`` with the elements of all, in order and in logical (not memory) order."""
    return torch.cat([tensor.detach().reshape(-1).to(device) for tensor in tensors])


def global_average(
    sum: torch.Tensor | float,  # noqa: A002, RUF100
    count: torch.Tensor | float,
    *,
    group: Group = None,
) -> torch.Tensor:
    """The sum of all ranks' sums, divided by the sum of their counts: a tensor without dimensions.

    Its dtype is that of ``sum`` if that is a floating-point tensor, torch's default otherwise; what is added up in
    between is float64.
    """
    kind = sum.dtype if isinstance(sum, torch.Tensor) and sum.is_floating_point() else torch.get_default_dtype()
    peers = find(group)
    both = torch.tensor([float(sum), float(count)], dtype=torch.float64)
    both = both.to(peers.place(both.device, False))
    peers.all_reduce(both, "sum")
    return (both[0] / both[1]).to(device="cpu", dtype=kind)
