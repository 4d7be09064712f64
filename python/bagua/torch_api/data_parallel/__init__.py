"""Data-parallel training by a wrapper around the model, and collectives with gradients."""

from . import functional
from .wrapper import DistributedDataParallel

__all__ = ["DistributedDataParallel", "functional"]
