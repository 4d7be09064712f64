"""The torch.distributed store that the environment names, through which the ranks of a job exchange addresses."""

from __future__ import annotations

from datetime import timedelta

from torch._C._distributed_c10d import HashStore, TCPStore
from torch.distributed import DistError
from torch.distributed.rendezvous import rendezvous

from bagua import config, launcher
from bagua.errors import BaguaTimeoutError

from .state import membership_state
from .torch_store_connection import StoreClient, connect


def environment_store(rank: int, world_size: int) -> StoreClient:
    """Returns the store at MASTER_ADDR and MASTER_PORT, which the launcher or rank 0 serves."""
    if world_size == 1 and config.text("MASTER_ADDR") is None:
        # A plain ``python script.py`` is a world of one rank.
        return StoreClient(HashStore())
    place = launcher.master()
    known = membership_state.stores.get(place)
    if known is None:
        known = membership_state.stores[place] = _open_store(*place, rank, world_size)
    return known


def _open_store(host: str, port: int, rank: int, world_size: int) -> StoreClient:
    limit = config.settings().timeout
    launcher.require_name(host, "init_process_group", limit)
    if config.agent_serves_store():
        return StoreClient(next(rendezvous("env://", rank, world_size, timeout=timedelta(seconds=limit)))[0])
    if rank == 0:
        # Like torch's rendezvous, but without waiting for workers: the exchange of addresses names missing ranks.
        own = TCPStore(
            host, port, world_size, True, timedelta(seconds=limit), wait_for_workers=False, multi_tenant=True
        )
        return StoreClient(own, serves=True)
    try:
        return connect(host, port, world_size, limit)
    except (DistError, OSError) as failure:
        text = f"init_process_group: rank 0 does not serve {host}:{port} after {limit:.1f} s"
        raise BaguaTimeoutError(text, missing=(0,), after=limit, noticed_by=rank) from failure
