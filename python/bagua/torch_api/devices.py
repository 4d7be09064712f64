"""Where the tensors of a model are: on the host, or on a CUDA device, and what the engine takes for that.

`bagua.cuda.tensors` knows torch's streams. It is imported when there is a tensor on a device, and not before: importing
`bagua.cuda` decides to which process CUDA belongs.
"""

from __future__ import annotations

from typing import Any

import torch

from bagua import config

from .process_group import check_place

__all__ = ["bucket_options", "check_place", "device_of", "memory_options", "stream_options"]


def device_of(tensor: torch.Tensor) -> torch.device | None:
    """The CUDA device of a tensor; None for the host."""
    return tensor.device if tensor.device.type == "cuda" else None


def stream_options(device: torch.device | None) -> dict[str, Any]:
    """What the engine takes for work on the current stream of a device; nothing for the host."""
    if device is None:
        return {}
    from bagua.cuda import tensors

    return {"stream": tensors.current_stream(device)}


def memory_options(device: torch.device | None, keep: object) -> dict[str, Any]:
    """What the engine takes with an address on a device, whose owner is `keep`; nothing for the host."""
    if device is None:
        return {}
    from bagua.cuda import arrays

    return {"device": arrays.device_of(device.index), "keep": keep}


def bucket_options(device: torch.device | None, keep: object) -> dict[str, Any]:
    """What a bucket takes with the addresses of its tensors; nothing for the host."""
    if device is None:
        return {}
    return memory_options(device, keep) | {"collective": config.cuda_collective(), "check": config.cuda_check()}
