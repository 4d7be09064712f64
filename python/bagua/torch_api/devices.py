"""The device of a model's tensors, and the arguments that the engine needs for it.

``bagua.cuda.tensors`` knows torch's streams. It is imported only when a tensor is on a CUDA device, because importing
``bagua.cuda`` decides which process owns CUDA.
"""

from __future__ import annotations

from typing import Any

import torch

from bagua import config

from .process_group import check_place

__all__ = ["bucket_options", "check_place", "device_of", "memory_options", "stream_options"]


def device_of(tensor: torch.Tensor) -> torch.device | None:
    """Returns the CUDA device of a tensor; None for the host."""
    return tensor.device if tensor.device.type == "cuda" else None


def stream_options(device: torch.device | None) -> dict[str, Any]:
    """Returns the engine's keyword arguments for work on a device's current stream. Empty for the host."""
    if device is None:
        return {}
    from bagua.cuda import tensors

    return {"stream": tensors.current_stream(device)}


def memory_options(device: torch.device | None, keep: object) -> dict[str, Any]:
    """Returns the engine's keyword arguments for memory on a device. ``keep`` owns the memory. Empty for the host."""
    if device is None:
        return {}
    from bagua.cuda import arrays

    return {"device": arrays.device_of(device.index), "keep": keep}


def bucket_options(device: torch.device | None, keep: object) -> dict[str, Any]:
    """Returns a bucket's keyword arguments for tensors on a device. ``keep`` owns the memory. Empty for the host."""
    if device is None:
        return {}
    return memory_options(device, keep) | {"collective": config.cuda_collective(), "check": config.cuda_check()}
