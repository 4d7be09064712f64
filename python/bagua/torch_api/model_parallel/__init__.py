"""Models whose parts are on different ranks."""

from . import moe

__all__ = ["moe"]
