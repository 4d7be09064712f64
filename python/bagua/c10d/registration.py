"""Registers the backend with torch.distributed."""

from __future__ import annotations

import torch.distributed as dist

from .membership import create

__all__ = ["register"]


def register() -> None:
    """Makes "bagua" a backend of torch.distributed, for CPU and CUDA tensors. Idempotent.

    Importing `bagua.c10d` calls it.
    """
    if "BAGUA" not in dist.Backend._plugins:
        dist.Backend.register_backend("bagua", create, extended_api=True, devices=["cpu", "cuda"])
