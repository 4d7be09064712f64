"""The backend "bagua" of torch.distributed, for CPU tensors. Its collectives also take CUDA tensors.

    import bagua.c10d  # before torch 2.15, which finds backends by their entry points

    torch.distributed.init_process_group("bagua")

Rank, world size and store come from torch. The page "torch.distributed" says what works and what differs from
gloo.
"""

from bagua.require_torch import require

require("bagua.c10d")

from .group_creation import register
from .process_group import BaguaProcessGroup
from .work import Work

__all__ = ["BaguaProcessGroup", "Work", "register"]

register()
