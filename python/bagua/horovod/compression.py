"""What tensors are turned into before they are communicated."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["Compression", "Compressor"]


class Compressor:
    """Base of compressors: both methods are called on the class."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """The tensor to communicate, and what :meth:`decompress` needs."""
        raise NotImplementedError("a compressor has a static method compress(tensor)")

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """The communicated tensor in its former dtype."""
        raise NotImplementedError("a compressor has a static method decompress(tensor, ctx)")


class NoneCompressor(Compressor):
    """Leaves tensors as they are."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """The tensor itself."""
        return tensor, None

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """The tensor itself."""
        return tensor


class FP16Compressor(Compressor):
    """Real floating-point tensors travel as float16; beyond 65504 they become infinite. Others stay as they are."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """The nearest float16 values, and the former dtype."""
        return (tensor.half() if tensor.is_floating_point() else tensor), tensor.dtype

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """The values in the former dtype."""
        return tensor.to(ctx)


class Compression:
    """The compressors: ``Compression.none`` and ``Compression.fp16``."""

    none = NoneCompressor
    fp16 = FP16Compressor


def check_compression(compression: Any) -> None:
    """TypeError for what has no compress and decompress."""
    if not (callable(getattr(compression, "compress", None)) and callable(getattr(compression, "decompress", None))):
        raise TypeError(f"compression is hvd.Compression.none, hvd.Compression.fp16 or the like, not {compression!r}")
