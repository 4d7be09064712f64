"""`bagua bench`: all_reduce beside gloo's, in one run, with every answer checked.

Ranks of a job measure that job. Without a launcher the command starts its own ranks on this host. Both contenders work
in place on the same plain tensor, alternately, after a barrier; the time of a size is the median of its rounds on the
slowest rank.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np

import bagua
from bagua import config, engine, launcher
from bagua.commands import machine, tables
from bagua.commands.parser import output_file
from bagua.distributed import end_with_parent
from bagua.errors import BaguaError

__all__ = ["add", "sizes_of"]

# Tensors of a size that each rank has at once.
_TENSORS = 4

# Seconds for all sizes, and for one of them.
_BUDGET, _BUDGET_OF_ONE = 6.0, 2.0

_FEWEST_ROUNDS, _MOST_ROUNDS = 3, 200

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def add(commands: Any) -> None:
    """Adds the command to the command line."""
    parser = commands.add_parser(
        "bench",
        help="all_reduce against gloo",
        description="Times all_reduce against torch's gloo, on ranks that it starts here or as the ranks of a job.",
        epilog="example: bagua bench --ranks 4 --sizes 4K,1M,16M",
    )
    parser.add_argument("--ranks", type=int, metavar="N", help="ranks to start on this host (2)")
    parser.add_argument("--sizes", default="4K,1M,16M", metavar="LIST", help="bytes, such as 4K,1M,16M, the default")
    parser.add_argument("--json", type=output_file, metavar="FILE", help="write the figures to a file")
    # The file by which ranks that the command itself has started find each other.
    parser.add_argument("--rendezvous", help=argparse.SUPPRESS)
    parser.set_defaults(run=_run)


def sizes_of(text: str) -> list[int]:
    """The bytes of "4K,1M,16MiB": units of 1024. ValueError for anything that is no number of float32 elements."""
    found = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*([0-9]+)\s*([KMG]?)(?:i?B)?\s*", part, re.IGNORECASE)
        if match is None:
            raise ValueError(f"--sizes: {part!r} is not a number of bytes such as 4096, 4K or 16M")
        size = int(match[1]) * _UNITS[match[2].upper()]
        if size == 0 or size % 4:
            raise ValueError(f"--sizes: {part!r} is not a positive multiple of 4 bytes")
        found.append(size)
    return found


def _run(options: argparse.Namespace) -> int:
    sizes = sizes_of(options.sizes)
    place = launcher.place()
    starts = options.rendezvous is None and place.world_size == 1
    ranks = (2 if options.ranks is None else options.ranks) if starts else place.local_world_size or 1
    _check_memory(max(sizes), ranks)
    if importlib.util.find_spec("torch") is None:
        raise ImportError('bagua bench needs torch, whose gloo it measures too: pip install "torch>=2.5"')
    if starts:
        return _start(ranks, options)
    if options.ranks not in (None, place.world_size):
        raise ValueError(f"--ranks is {options.ranks}, but this is a rank of a job of {place.world_size}")
    joined = bagua.init(init_method="env://" if options.rendezvous is None else f"file://{options.rendezvous}")
    try:
        figures = _measure(joined, sizes)
    finally:
        bagua.shutdown()
    if joined.rank == 0:
        _report(figures, options.json)
    return 0


def _check_memory(size: int, ranks: int) -> None:
    """ValueError for a size of which the ranks of this host cannot hold their tensors."""
    needed, there = _TENSORS * size * ranks, machine.machine()["memory_bytes"]
    if needed > there:
        raise ValueError(
            f"--sizes: {size:,} bytes need {tables.amount(needed)} on this host, {_TENSORS} tensors on each of "
            f"{ranks} ranks, and it has {tables.amount(there)}"
        )


def _start(ranks: int, options: argparse.Namespace) -> int:
    """Runs the command as so many ranks of this host; 1 when one of them fails."""
    if ranks < 1:
        raise ValueError(f"--ranks is {ranks}; it must be at least 1")
    wrapper = [sys.executable, "-I", "-S", end_with_parent.__file__, str(os.getpid())]
    with tempfile.TemporaryDirectory(prefix="bagua-bench-") as folder:
        command = [sys.executable, "-m", "bagua", "bench", "--sizes", options.sizes]
        command += ["--rendezvous", str(Path(folder, "rendezvous"))]
        if options.json is not None:
            command += ["--json", str(options.json.absolute())]
        processes: list[subprocess.Popen[bytes]] = []
        try:
            for rank in range(ranks):
                variables = {
                    "RANK": str(rank),
                    "WORLD_SIZE": str(ranks),
                    "LOCAL_RANK": str(rank),
                    "LOCAL_WORLD_SIZE": str(ranks),
                    "OMP_NUM_THREADS": "1",
                }
                # In sessions of their own: Ctrl-C reaches this process alone, which ends them.
                started = subprocess.Popen(
                    [*wrapper, *command], env=config.environment(variables), start_new_session=True
                )
                processes.append(started)
            return _wait(processes)
        finally:
            for process in processes:
                process.kill()
                process.wait()


def _wait(processes: Sequence[subprocess.Popen[bytes]]) -> int:
    """0 when all have ended with 0; 1 as soon as one has not."""
    while True:
        codes = [process.poll() for process in processes]
        if any(code not in (None, 0) for code in codes):
            return 1
        if all(code == 0 for code in codes):
            return 0
        time.sleep(0.05)


def _measure(joined: bagua.Group, sizes: Sequence[int]) -> dict[str, Any]:
    """The figures of all sizes, equal on all ranks."""
    import torch
    import torch.distributed as dist

    from bagua.torch_api.membership import torch_destroy

    torch.set_num_threads(1)
    # Kept until the end: on rank 0 it serves.
    store = _store(joined)
    dist.init_process_group("gloo", store=store, rank=joined.rank, world_size=joined.size)
    try:
        rows = []
        for size in sizes:
            ours, gloos = _race(joined, size, min(_BUDGET / len(sizes), _BUDGET_OF_ONE))
            rows.append(
                {
                    "bytes": size,
                    "seconds": ours,
                    "gb_per_s": size / ours / 1e9,
                    "gloo_seconds": gloos,
                    "ratio": gloos / ours,
                }
            )
        joined.barrier()
    finally:
        torch_destroy.destroy()
    return {"ranks": joined.size, "collective": joined.collective, "optimized": engine.IS_OPTIMIZED, "all_reduce": rows}


def _store(joined: bagua.Group) -> Any:
    """A store of torch that rank 0 serves, on all ranks."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined, unused-ignore]

    limit = timedelta(seconds=joined.timeout)
    host = joined.communicator.listen_host
    store = None
    if joined.rank == 0:
        store = TCPStore(host, 0, joined.size, True, limit, wait_for_workers=False)
    host, port = joined.broadcast_object((host, 0 if store is None else store.port))
    if store is None:
        store = TCPStore(host, port, joined.size, False, limit, wait_for_workers=False)
    return store


def _race(joined: bagua.Group, size: int, budget: float) -> tuple[float, float]:
    """Seconds of one all_reduce of `size` bytes: ours and gloo's. BaguaError for a wrong sum."""
    import torch
    import torch.distributed as dist

    base = torch.arange(size // 4, dtype=torch.float32) % 1000
    # Whole numbers below 2^24, so sums are exact in any order.
    own, expected = base + joined.rank, base * joined.size + joined.size * (joined.size - 1) / 2
    x = torch.empty_like(own)
    contenders: list[tuple[str, Callable[[], object]]] = [
        ("bagua", lambda: joined.all_reduce(x)),
        ("gloo", lambda: dist.all_reduce(x)),
    ]
    times: list[list[float]] = [[], []]

    def play() -> None:
        for (name, call), found in zip(contenders, times, strict=True):
            x.copy_(own)
            joined.barrier()
            began = time.perf_counter()
            call()
            found.append(time.perf_counter() - began)
            if not torch.equal(x, expected):
                raise BaguaError(f"all_reduce of {size} bytes: {name} gave a wrong sum")

    # The first round opens connections and maps memory.
    play()
    for found in times:
        found.clear()
    until = time.monotonic() + budget
    more = np.ones(1, dtype=np.uint8)
    while more[0]:
        play()
        done = len(times[0])
        more[0] = done < _FEWEST_ROUNDS or (done < _MOST_ROUNDS and time.monotonic() < until)
        # All go on for as long as rank 0 does.
        joined.broadcast(more, 0)
    medians = np.array([statistics.median(found) for found in times])
    joined.all_reduce(medians, op="max")
    return float(medians[0]), float(medians[1])


def _report(figures: dict[str, Any], path: Path | None) -> None:
    if path is not None:
        path.write_text(json.dumps(figures, indent=2, allow_nan=False) + "\n", encoding="utf-8")
    rows = [
        (
            f"{row['bytes']:,}",
            f"{row['seconds'] * 1e6:,.1f}",
            f"{row['gb_per_s']:.3f}",
            f"{row['gloo_seconds'] * 1e6:,.1f}",
            f"{row['ratio']:.2f}",
        )
        for row in figures["all_reduce"]
    ]
    title = f"all_reduce, {figures['ranks']} ranks, {figures['collective']}"
    if not figures["optimized"]:
        title += ", NOT OPTIMIZED: build with make setup, or maturin develop --release"
    tables.show(tables.table(("bytes", "us", "GB/s", "gloo us", "gloo / bagua"), rows, title=title, left=0))
