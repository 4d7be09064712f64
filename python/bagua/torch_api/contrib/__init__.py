"""Useful beside training: a fused optimizer and batch normalisation over all ranks."""

from . import sync_batchnorm
from .fuse.optimizer import fuse_optimizer

__all__ = ["fuse_optimizer", "sync_batchnorm"]
