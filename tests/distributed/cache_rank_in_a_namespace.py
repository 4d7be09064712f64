"""One rank of test_contrib_cache_hosts.py: shares the job's cache servers with the other hosts, until they are cut off.

Prints one JSON object per line: what it has found while all hosts see each other, and what after the cut. Then waits.
"""

from __future__ import annotations

import json
import logging
import signal
import socket
from typing import Any

import redis
import torch

import bagua.torch_api as bagua
from bagua.torch_api.contrib import CachedDataset

LENGTH = 80


def say(**words: object) -> None:
    print(json.dumps(words), flush=True)


class Squares(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """Counts how often a sample was computed here."""

    computed = 0

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> Any:
        self.computed += 1
        return torch.tensor([index, index * index])


class Warnings(logging.Handler):
    """Keeps what was logged."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def wrong(cached: CachedDataset) -> list[int]:
    """Indices whose samples are not theirs."""
    found = cached.__getitems__(range(LENGTH))
    return [index for index, sample in enumerate(found) if sample.tolist() != [index, index * index]]


def refuses_strangers(host: str, port: int) -> bool:
    stranger = redis.Redis(host=host, port=port, socket_timeout=5)
    try:
        stranger.get("d_0")
    except redis.exceptions.AuthenticationError:
        return True
    finally:
        stranger.close()
    return False


def listens_on_loopback(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=5).close()
    except ConnectionRefusedError:
        return False
    return True


def main() -> None:
    torch.set_num_threads(1)
    warned = Warnings()
    logging.getLogger("bagua").addHandler(warned)
    bagua.init_process_group()
    inner = Squares()
    cached = CachedDataset(inner, "redis", "d", capacity_per_node=1 << 25, timeout=4.0)
    for index in range(bagua.get_rank(), LENGTH, bagua.get_world_size()):
        cached[index]
    cached.cache_loader.flush()
    bagua.barrier()
    servers = [store._options for store in cached.cache_loader.store.stores]  # type: ignore[attr-defined]
    say(
        wrong=wrong(cached),
        computed=inner.computed,
        keys=cached.cache_loader.num_keys(),
        parts=[store.num_keys() for store in cached.cache_loader.store.stores],  # type: ignore[attr-defined]
        servers=[server["host"] for server in servers],
        refused=[refuses_strangers(server["host"], server["port"]) for server in servers],
        loopback=[listens_on_loopback(server["port"]) for server in servers],
        warnings=warned.texts,
    )
    found: list[int] = []
    while not warned.texts:
        found += wrong(cached)
    found += wrong(cached)
    say(wrong=found, computed=inner.computed, warnings=warned.texts)
    # Ends by being killed, so that no server ends before all ranks have looked.
    signal.pause()
