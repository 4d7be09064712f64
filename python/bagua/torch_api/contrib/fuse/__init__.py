"""Fused optimizers: one update for many parameters."""

from .optimizer import fuse_optimizer, is_fused_optimizer

__all__ = ["fuse_optimizer", "is_fused_optimizer"]
