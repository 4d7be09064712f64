"""Linear algebra of low-rank and other compressed averages of torch tensors."""

from __future__ import annotations

import torch

__all__ = ["is_finite", "orthonormal", "wide"]


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which tensors of ``dtype`` are multiplied, and what is lost of them is kept: float64 for float64,
    else float32.
    """
    return torch.float64 if dtype is torch.float64 else torch.float32


def is_finite(tensor: torch.Tensor) -> bool:
    """Whether all elements are finite. Reads the tensor once, unless the sum overflows."""
    # The sum is not finite unless all elements are.
    return bool(torch.isfinite(tensor.sum(dtype=wide(tensor.dtype)))) or bool(torch.isfinite(tensor).all())


def orthonormal(matrix: torch.Tensor) -> torch.Tensor | None:
    """Orthonormal columns that span at least those of a matrix, by QR: n x min(n, m) for one of n x m, in its dtype.

    Dependent columns give orthonormal ones too. None where an element is not finite.
    """
    if not is_finite(matrix):
        return None
    basis: torch.Tensor = torch.linalg.qr(matrix).Q
    return basis
