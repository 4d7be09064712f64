"""The store of torch.distributed that the environment names, by which the ranks of a job find each other."""

from __future__ import annotations

from datetime import timedelta

from torch._C._distributed_c10d import HashStore, Store, TCPStore
from torch.distributed import DistError
from torch.distributed.rendezvous import rendezvous

from bagua import config, launcher
from bagua.errors import BaguaTimeoutError
from bagua.lifecycle import torch_state
from bagua.store_requests import StoreRequests

_state = torch_state()


def environment_store(rank: int, world_size: int) -> Store:
    """The store at MASTER_ADDR and MASTER_PORT, which the launcher or rank 0 serves."""
    if world_size == 1 and config.text("MASTER_ADDR") is None:
        # A plain `python script.py`: a world of one rank.
        return HashStore()
    place = launcher.master()
    if place not in _state.stores:
        _state.stores[place] = _open_store(*place, rank, world_size)
    found: Store = _state.stores[place]
    return found


def _open_store(host: str, port: int, rank: int, world_size: int) -> Store:
    limit = config.settings().timeout
    if config.agent_serves_store():
        found: Store = next(rendezvous("env://", rank, world_size, timeout=timedelta(seconds=limit)))[0]
        return found

    def open_store() -> Store:
        # As torch's rendezvous does, but without waiting for workers: a rank that is missing is found, and named, when
        # the addresses are exchanged.
        return TCPStore(
            host, port, world_size, rank == 0, timedelta(seconds=limit), wait_for_workers=False, multi_tenant=True
        )

    try:
        return StoreRequests().ask(open_store, limit)
    except (DistError, TimeoutError) as failure:
        if rank == 0:
            raise
        text = f"init_process_group: rank 0 does not serve {host}:{port} after {limit:.1f} s"
        raise BaguaTimeoutError(text, missing=(0,), after=limit, noticed_by=rank) from failure
