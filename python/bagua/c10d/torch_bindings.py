"""The C++ half of torch.distributed, untyped: torch's stubs and its releases disagree about signatures."""

from __future__ import annotations

from typing import Any

import torch
from torch._C import _distributed_c10d

from bagua import config

__all__ = ["BACKEND_HAS_CONSTRUCTOR", "c10d", "device_types"]

#: `torch._C._distributed_c10d`.
c10d: Any = _distributed_c10d


def _has_constructor() -> bool:
    class Probe(c10d.Backend):  # type: ignore[misc]
        pass

    try:
        Probe(0, 1)
    except TypeError:
        return False
    return True


#: Whether Python can subclass torch's Backend: in 2.5 and 2.7 it cannot, in 2.15 it can. Else a group has no C++ half.
BACKEND_HAS_CONSTRUCTOR = _has_constructor()


def device_types() -> list[str]:
    """Returns the types of devices that the backend offers: "cuda" only on a machine that has such a device.

    torch prefers a type other than "cpu" for tensors of its own, such as those of `ShardedTensor.gather`, and then asks
    for a driver that may not be there. BAGUA_LIBCUDA names a driver that torch does not know.
    """
    has_cuda = torch.cuda.device_count() > 0 or config.text("BAGUA_LIBCUDA") is not None
    return ["cpu", "cuda"] if has_cuda else ["cpu"]
