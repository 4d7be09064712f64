"""Checkpoints of a training job on a file system that all ranks share."""

from .loading import load_checkpoint
from .saving import save_checkpoint

__all__ = ["load_checkpoint", "save_checkpoint"]
