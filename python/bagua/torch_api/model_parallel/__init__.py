"""Models with different parts on different ranks."""

from . import moe

__all__ = ["moe"]
