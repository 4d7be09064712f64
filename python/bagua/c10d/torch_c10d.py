"""The C++ half of torch.distributed, untyped: torch's stubs and its releases disagree about signatures."""

from __future__ import annotations

from typing import Any

from torch._C import _distributed_c10d

__all__ = ["c10d"]

#: `torch._C._distributed_c10d`.
c10d: Any = _distributed_c10d
