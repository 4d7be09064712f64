"""Data-parallel training with a wrapper around the model, and differentiable collectives."""

from . import functional
from .wrapper import DistributedDataParallel

__all__ = ["DistributedDataParallel", "functional"]
