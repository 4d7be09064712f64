"""The C++ half of torch.distributed, untyped because torch's stubs and versions disagree about signatures."""

from __future__ import annotations

from typing import Any

import torch
from torch._C import _distributed_c10d

from bagua import config

__all__ = ["BACKEND_HAS_CONSTRUCTOR", "c10d", "device_types"]

c10d: Any = _distributed_c10d


def _has_constructor() -> bool:
    class Probe(c10d.Backend):  # type: ignore[misc]
        pass

    try:
        Probe(0, 1)
    except TypeError:
        return False
    return True


#: True if Python can subclass torch's Backend: not in 2.5 and 2.7, but in 2.15. Otherwise a group has no C++ half.
BACKEND_HAS_CONSTRUCTOR = _has_constructor()


def device_types() -> list[str]:
    """Returns the device types that the backend offers: "cuda" only on a machine that has such a device.

    torch prefers a type other than "cpu" for its own tensors, such as those of ``ShardedTensor.gather``, and would then
    need a driver that may not exist. BAGUA_LIBCUDA names a driver that torch does not know.
    """
    has_cuda = torch.cuda.device_count() > 0 or config.text("BAGUA_LIBCUDA") is not None
    return ["cpu", "cuda"] if has_cuda else ["cpu"]
