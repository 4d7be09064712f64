"""The Redis servers of a job. Each host starts one, and the ranks exchange the addresses through torch's store."""

from __future__ import annotations

import ipaddress
import json
import os
import weakref
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from bagua import config
from bagua.errors import BaguaTimeoutError
from bagua.torch_api import env

from .cache_state import cache_state
from .redis_server import RedisServer, address_towards, new_password

__all__ = ["Server", "job_servers", "stop_job_servers"]

#: The entries "host", "port" and "password" of one server.
Server = dict[str, Any]

_state = cache_state()


def job_servers(capacity: int) -> tuple[list[Server], int]:
    """Returns the job's servers, ordered by host, and the index of this host's server. Starts the servers if necessary.

    Collective over torch.distributed's world if it is initialised. ``capacity`` is in bytes per host. If the world has
    changed since the last call, for example after a rebuild, hosts keep those servers whose owners are still there.

    Raises RuntimeError, with the reason, on every rank if a host cannot start its server. Raises BaguaTimeoutError,
    with the missing ranks, if ranks do not call this function.
    """
    with _state.job_lock:
        world = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
        if _state.job_servers is None or (world is not None and world is not _state.job_world()):
            if world is not None and world.size() > 1:
                _state.job_servers = _together(capacity)
            else:
                _state.job_servers = [_described(_own_server("127.0.0.1", capacity))], 0
            _state.job_world = (lambda: None) if world is None else weakref.ref(world)
        return _state.job_servers


def stop_job_servers() -> None:
    """Ends the server that this process started, if any. The next call of :func:`job_servers` starts new servers."""
    with _state.job_lock:
        if _state.own_server is not None:
            _state.own_server.stop()
        _state.job_servers = _state.own_server = None


def _own_server(address: str, capacity: int) -> RedisServer:
    """Returns this process's server if other hosts can reach it; otherwise starts one on ``address``."""
    known: RedisServer | None = _state.own_server
    if known is None or (known.host != address and ipaddress.ip_address(known.host).is_loopback):
        known = _state.own_server = RedisServer(address, capacity, password=new_password())
    return known


def _described(server: RedisServer) -> Server:
    return {"host": server.host, "port": server.port, "password": server.password}


def _together(capacity: int) -> tuple[list[Server], int]:
    board = _StoreExchange()
    hosts = board.all_gather("host", _host_identity())
    # The lowest rank of each host starts its server.
    leaders = [hosts.index(host) for host in dict.fromkeys(hosts)]
    mine = leaders.index(hosts.index(hosts[board.rank]))
    if board.rank in leaders:
        try:
            address = _own_address(board, leaders)
            said: dict[str, Any] = _described(_own_server(address, capacity))
        except Exception as failure:
            # Sent to the other ranks, so that they raise at once instead of timing out.
            said = {"error": f"rank {board.rank}: {failure}"}
        board.write("server", json.dumps(said))
    servers: list[Server] = [json.loads(text) for text in board.read("server", leaders)]
    if wrong := [str(server["error"]) for server in servers if "error" in server]:
        if _state.own_server is not None:
            _state.own_server.stop()
            _state.own_server = None
        raise RuntimeError("the job's cache servers did not start: " + "; ".join(wrong))
    return servers, mine


class _StoreExchange:
    """Exchanges texts between ranks through torch's default store, for one call of :func:`job_servers`."""

    def __init__(self) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        store: Any = dist.distributed_c10d._get_default_store()
        # The number of the call separates keys, so that a restarted job does not read keys of its predecessor.
        count = store.add(f"bagua/cache/rank{self.rank}/calls", 1)
        self._store: Any = PrefixStore(f"bagua/cache/{count}", store)

    def write(self, what: str, text: str) -> None:
        self._store.set(f"{what}{self.rank}", text)

    def read(self, what: str, ranks: list[int]) -> list[str]:
        limit = config.settings().timeout
        keys = [f"{what}{rank}" for rank in ranks]
        try:
            self._store.wait(keys, timedelta(seconds=limit))
        except Exception as failure:
            missing = tuple(rank for rank, key in zip(ranks, keys, strict=True) if not self._store.check([key]))
            ranks_missing = ", ".join(map(str, missing))
            text = f"starting cache servers: timed out after {limit:.1f} s waiting for rank(s) {ranks_missing}"
            raise BaguaTimeoutError(text, missing=missing, after=limit, noticed_by=self.rank) from failure
        return [self._store.get(key).decode() for key in keys]

    def all_gather(self, what: str, text: str) -> list[str]:
        self.write(what, text)
        return self.read(what, list(range(self.size)))


def _host_identity() -> str:
    """Returns text that ranks share if they reach each other by loopback: BAGUA_HOST_ID, or boot id and network."""
    if given := config.settings().host_id:
        return given
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/net')}"
    except OSError:
        return f"node {env.get_node_rank()}"


def _own_address(board: _StoreExchange, leaders: list[int]) -> str:
    """Returns the address at which other hosts reach this one; loopback if there is only one host."""
    if len(leaders) == 1:
        return "127.0.0.1"
    try:
        found = address_towards(env.get_master_addr())
    except OSError:
        # The master's name cannot be resolved here. The address of another host may do.
        found = "127.0.0.1"
    board.write("address", found)
    others = board.read("address", leaders)
    if ipaddress.ip_address(found).is_loopback:
        # The master may resolve its own name to loopback. The route to another host then tells this host's address.
        for other in others:
            if not ipaddress.ip_address(other).is_loopback:
                return address_towards(other)
    return found
