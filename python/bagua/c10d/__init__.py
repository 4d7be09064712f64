"""The backend "bagua" of torch.distributed, on CPU tensors; its collectives take CUDA tensors too.

    import bagua.c10d  # where torch does not find backends by their entry points (before 2.15)

    torch.distributed.init_process_group("bagua")

Rank, world size and store come from torch alone. The page "torch.distributed" has what works, and what
differs from gloo.
"""

from bagua.torch_needed import require

require("bagua.c10d")

from .membership import register
from .process_group import BaguaProcessGroup
from .work import Work

__all__ = ["BaguaProcessGroup", "Work", "register"]

register()
