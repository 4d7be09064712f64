"""Initialises torch.distributed again, on the ranks that are left of its group."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from bagua import group as neutral

from ..process_group import Communicator
from . import torch_destroy, torch_init
from .state import membership_state
from .store_client import StoreClient, connect

__all__ = ["restart"]


def restart(world: neutral.Group, communicator: Communicator) -> None:
    """Initialises torch.distributed for the ranks of a new group, by a store of the lowest.

    The server of the old store may have been a rank that is gone. An error of any kind when a rank is lost meanwhile.
    """
    if dist.is_initialized():
        torch_destroy.destroy()
    limit = timedelta(seconds=world.timeout)
    own, host = None, world.communicator.listen_host
    if world.rank == 0:
        own = TCPStore(host, 0, world.size, True, limit, wait_for_workers=False)
    host, port = communicator.broadcast_object((host, own.port if own is not None else 0))
    if own is not None:
        client = StoreClient(own)
    else:
        client = connect(host, port, world.size, world.timeout, lambda: world.communicator.cause())
    # Until the process ends, as that of init_process_group.
    membership_state.stores[host, port] = client
    torch_init.begin(client, world)
