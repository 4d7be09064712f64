"""Models whose parts live on different ranks."""

from . import moe

__all__ = ["moe"]
