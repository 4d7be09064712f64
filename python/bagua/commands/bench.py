"""`bagua bench`: compares all_reduce with gloo's in one run, and checks every answer.

Inside a job, the command measures that job. Otherwise torchrun starts its ranks on this host. Bagua and gloo take turns
in place on the same plain tensors. A turn is one batch: one call, or up to 200 calls on small tensors, each on its own
tensor; the ranks sleep before it. benchmarks/collectives.py, which made the table in the README, measures in the same
way.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import numpy as np

import bagua
from bagua import config, extension, launcher
from bagua.commands import tables
from bagua.errors import BaguaError

__all__ = ["add", "sizes_of"]

# Seconds for each size.
_BUDGET = 4.0

# Calls on fewer bytes are timed together, because one is shorter than the skew of the ranks' start.
_SMALL, _CALLS_TOGETHER, _BYTES_TOGETHER = 64 << 10, 200, 1 << 20

# Batches that warm caches and connections; seconds that ranks sleep before a batch, like a program between steps.
_UNTIMED, _PAUSE = 3, 0.05

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def add(commands: Any) -> None:
    parser = commands.add_parser(
        "bench",
        help="compare all_reduce with gloo",
        description="Compares the speed of all_reduce with torch's gloo, on ranks that it starts here or inside a job.",
        epilog="example: bagua bench --ranks 4 --sizes 4K,1M,16M",
    )
    parser.add_argument("--ranks", type=int, metavar="N", help="number of ranks to start on this host (default: 2)")
    parser.add_argument("--sizes", default="4K,1M,16M", metavar="LIST", help="sizes in bytes (default: 4K,1M,16M)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=_run_bench)


def sizes_of(text: str) -> list[int]:
    """Returns the bytes of "4K,1M,16MiB", in units of 1024. Raises ValueError unless each is a multiple of 4."""
    found = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*([0-9]+)\s*([KMG]?)(?:i?B)?\s*", part, re.IGNORECASE)
        size = int(match[1]) * _UNITS[match[2].upper()] if match else 0
        if size == 0 or size % 4:
            raise ValueError(f"--sizes: {part!r} is not a positive multiple of 4 bytes such as 4096, 4K or 16M")
        found.append(size)
    return found


def _run_bench(options: argparse.Namespace) -> int:
    sizes = sizes_of(options.sizes)
    if importlib.util.find_spec("torch") is None:
        raise ImportError('bagua bench needs torch, to compare with its gloo: pip install "torch>=2.5"')
    place = launcher.place()
    if launcher.found().name == "none":
        ranks = 2 if options.ranks is None else options.ranks
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        command += ["-m", "bagua", "bench", "--sizes", options.sizes, *(["--json"] if options.json else [])]
        environment = config.environment({"OMP_NUM_THREADS": "1"})
        return 1 if subprocess.run(command, env=environment, check=False).returncode else 0
    if options.ranks not in (None, place.world_size):
        raise ValueError(f"--ranks is {options.ranks}, but this is a rank of a job of {place.world_size}")
    joined = bagua.init()
    try:
        figures = _measure(joined, sizes)
    finally:
        bagua.shutdown()
    if joined.rank == 0:
        tables.show(json.dumps(figures, indent=2, allow_nan=False) if options.json else _text(figures))
    return 0


def _measure(joined: bagua.Group, sizes: Sequence[int]) -> dict[str, Any]:
    import torch
    import torch.distributed as dist
    from torch.distributed import TCPStore  # type: ignore[attr-defined, unused-ignore]

    torch.set_num_threads(1)
    server = partial(
        TCPStore, world_size=joined.size, timeout=timedelta(seconds=joined.timeout), wait_for_workers=False
    )
    host = joined.communicator.listen_host
    # Kept until the end, because rank 0's store is the server.
    store = server(host, 0, is_master=True) if joined.rank == 0 else None
    host, port = joined.broadcast_object((host, store.port if store else 0))
    store = store or server(host, port, is_master=False)
    try:
        dist.init_process_group("gloo", store=store, rank=joined.rank, world_size=joined.size)
    except RuntimeError as error:
        raise BaguaError(
            f"bench: gloo, to compare with, cannot start on rank {joined.rank}: {error}; set GLOO_SOCKET_IFNAME "
            "to the network interface by which the ranks reach each other"
        ) from error
    rows = [{"bytes": size, **_race(joined, size)} for size in sizes]
    joined.barrier()
    dist.destroy_process_group()
    build = {"ranks": joined.size, "collective": joined.collective, "optimized": extension.IS_OPTIMIZED}
    return {**build, "all_reduce": rows}


def _race(joined: bagua.Group, size: int) -> dict[str, float]:
    """Returns the results of all_reduce on `size` bytes for Bagua and gloo. Raises BaguaError for a wrong sum."""
    import torch
    import torch.distributed as dist

    base = torch.arange(size // 4, dtype=torch.float32) % 1000
    # Whole numbers below 2^24, so sums are exact in any order.
    own, expected = base + joined.rank, base * joined.size + joined.size * (joined.size - 1) / 2
    tensors = [own.clone() for _ in range(min(_CALLS_TOGETHER, _BYTES_TOGETHER // size) if size < _SMALL else 1)]
    # A call on this array costs as much as a call of bagua.torch_api on the tensor.
    contenders: dict[str, list[Callable[[], object]]] = {
        "bagua": [partial(joined.all_reduce, x.numpy()) for x in tensors],
        "gloo": [partial(dist.all_reduce, x) for x in tensors],
    }
    several_hosts = len(joined.communicator.machines) > 1
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    until, more = time.monotonic() + _BUDGET, np.ones(1, dtype=np.uint8)
    while more[0]:
        for name, calls in contenders.items():
            for x in tensors:
                x.copy_(own)
            time.sleep(_PAUSE)
            begun = time.perf_counter()
            for call in calls:
                call()
            ended = time.perf_counter()
            # Clocks of different hosts cannot be compared.
            span = np.array([0.0, ended - begun] if several_hosts else [begun, ended])
            # The time from the start of the last rank to the end of the last rank.
            joined.all_reduce(span, op="max")
            seconds[name].append(float(span[1] - span[0]) / len(calls))
            if not all(torch.equal(x, expected) for x in tensors):
                raise BaguaError(f"all_reduce of {size} bytes: {name} gave a wrong sum")
        # Rank 0 decides when all ranks stop.
        more[0] = time.monotonic() < until or len(seconds["gloo"]) <= _UNTIMED
        joined.broadcast(more, 0)
    ours, gloo = (statistics.median(seconds[name][_UNTIMED:]) for name in contenders)
    return {"seconds": ours, "gb_per_s": size / ours / 1e9, "gloo_seconds": gloo, "ratio": gloo / ours}


def _text(figures: dict[str, Any]) -> str:
    title = f"all_reduce, {figures['ranks']} ranks, {figures['collective']}"
    if not figures["optimized"]:
        title += ", NOT OPTIMIZED: build with make setup, or maturin develop --release"
    rows = [
        [
            f"{row['bytes']:,}",
            *(f"{row[name] * 1e6:,.1f}" for name in ("seconds", "gloo_seconds")),
            f"{row['ratio']:.2f}",
        ]
        for row in figures["all_reduce"]
    ]
    return tables.table(("bytes", "us", "gloo us", "gloo / bagua"), rows, title=title, left=0)
