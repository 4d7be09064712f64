"""Wraps a module for communication, and unwraps it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

__all__ = ["inner", "is_wrapped", "unwrap", "wrap"]


def wrap(
    module: torch.nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    algorithm: Any,
    *,
    flatten: bool,
    find_unused_parameters: bool,
    broadcast_buffers: bool,
    bucket_size: int | None,
) -> torch.nn.Module:
    """Returns the module in Bagua's ``DistributedDataParallel``. Collective. ``bucket_size`` is in bytes."""
    from bagua.torch_api.data_parallel import DistributedDataParallel

    return DistributedDataParallel(
        module,
        bucket_cap_mb=None if bucket_size is None else bucket_size / 2**20,
        find_unused_parameters=find_unused_parameters,
        broadcast_buffers=broadcast_buffers,
        gradient_as_bucket_view=flatten,
        optimizers=optimizers,
        algorithm=algorithm,
    )


def is_wrapped(module: Any) -> bool:
    """Returns True if :func:`wrap` made the module."""
    from bagua.torch_api.data_parallel import DistributedDataParallel

    return isinstance(module, DistributedDataParallel)


def unwrap(wrapped: Any) -> None:
    """Removes the wrapper's hooks and ends its engine. The module inside then trains without communication."""
    from bagua.torch_api.distributed import unwrap as end

    end(wrapped)


def inner(module: Any) -> Any:
    """Returns the module inside a wrapper, or the module itself if it is not wrapped."""
    return module.module if is_wrapped(module) else module
