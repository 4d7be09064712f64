"""The C++ half of torch.distributed, untyped: torch's stubs and its releases disagree about signatures."""

from __future__ import annotations

from typing import Any

from torch._C import _distributed_c10d

__all__ = ["BACKEND_HAS_CONSTRUCTOR", "c10d"]

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
