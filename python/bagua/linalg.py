"""Linear algebra for low-rank averages of torch tensors."""

from __future__ import annotations

import torch

__all__ = ["is_finite", "orthonormal", "wide"]


def wide(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype for products and errors of tensors of ``dtype``: float64 for float64, else float32."""
    return torch.float64 if dtype is torch.float64 else torch.float32


def is_finite(tensor: torch.Tensor) -> bool:
    """Returns True if all elements are finite. Reads the tensor once, unless the sum overflows."""
    # The sum is finite only if all elements are.
    return bool(torch.isfinite(tensor.sum(dtype=wide(tensor.dtype)))) or bool(torch.isfinite(tensor).all())


def orthonormal(matrix: torch.Tensor) -> torch.Tensor | None:
    """Returns orthonormal columns whose span includes a matrix's columns, by QR. None if an element is not finite.

    For n x m elements the result is n x min(n, m), in the same dtype. The columns of the matrix may be dependent.
    """
    if not is_finite(matrix):
        return None
    basis: torch.Tensor = torch.linalg.qr(matrix).Q
    return basis
