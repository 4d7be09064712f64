"""`bagua bench`: compares all_reduce with gloo's in one run, and checks every answer.

Inside a job, the command measures that job. Otherwise it starts its own ranks on this host. Bagua and gloo take turns
of a few batches, in place on the same plain tensors. A batch is one call, or up to 200 calls on small tensors, each on
its own tensor; the ranks sleep before each batch. benchmarks/collectives.py, which made the table in the README,
measures in the same way.
"""

from __future__ import annotations

import argparse
import ctypes
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
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import bagua
from bagua import config, extension, launcher
from bagua.commands import machine, tables
from bagua.distributed import end_with_parent
from bagua.errors import BaguaError
from bagua.metrics.server import why_not_local

__all__ = ["add", "sizes_of"]

# Number of tensors of one size that a rank holds at once.
_TENSORS = 4

# Seconds for all sizes, and for one of them.
_BUDGET, _BUDGET_OF_ONE = 12.0, 3.0

# Calls on fewer bytes are timed together, because one is shorter than the skew of the ranks' start.
_SMALL, _CALLS_TOGETHER, _BYTES_TOGETHER = 64 << 10, 200, 1 << 20

# Target duration of a batch and of a turn, in seconds.
_LONG = 0.02

# Batches per turn, untimed batches before them to warm the caches, and single calls after them.
_BATCHES, _UNTIMED, _SINGLES = 10, 2, 3

# Seconds that the ranks sleep before a batch, as a program does between steps, and before they check its sums.
_PAUSE, _PAUSE_OF_CHECK = 0.05, 0.01

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
    # The file through which ranks that this command started find each other.
    parser.add_argument("--rendezvous", help=argparse.SUPPRESS)
    parser.set_defaults(run=_run)


def sizes_of(text: str) -> list[int]:
    """Returns the bytes of "4K,1M,16MiB", in units of 1024. Raises ValueError unless each is a multiple of 4."""
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
        raise ImportError('bagua bench needs torch, to compare with its gloo: pip install "torch>=2.5"')
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
    needed, there = _TENSORS * size * ranks, machine.machine()["memory_bytes"]
    if needed > there:
        raise ValueError(
            f"--sizes: {size:,} bytes need {tables.amount(needed)} on this host, {_TENSORS} tensors on each of "
            f"{ranks} ranks, and it has {tables.amount(there)}"
        )


def _start(ranks: int, options: argparse.Namespace) -> int:
    """Runs the command as `ranks` ranks on this host. Returns 1 if one of them fails."""
    if ranks < 1:
        raise ValueError(f"--ranks is {ranks}; it must be at least 1")
    wrapper = [sys.executable, "-I", "-S", end_with_parent.__file__, str(os.getpid())]
    gloo = {}
    if why_not_local("127.0.0.1") is not None and config.text("GLOO_SOCKET_IFNAME") is None:
        # gloo does not find an IPv6 loopback address by itself.
        gloo["GLOO_SOCKET_IFNAME"] = machine.interface_of("::1") or ""
    with tempfile.TemporaryDirectory(prefix="bagua-bench-") as folder:
        command = [sys.executable, "-m", "bagua", "bench", "--sizes", options.sizes]
        command += ["--rendezvous", str(Path(folder, "rendezvous"))]
        if options.json:
            command.append("--json")
        processes: list[subprocess.Popen[bytes]] = []
        try:
            for rank in range(ranks):
                variables = {
                    "RANK": str(rank),
                    "WORLD_SIZE": str(ranks),
                    "LOCAL_RANK": str(rank),
                    "LOCAL_WORLD_SIZE": str(ranks),
                    "OMP_NUM_THREADS": "1",
                    **gloo,
                }
                # In a session of its own, so that Ctrl-C reaches only this process, which ends the ranks.
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
    while True:
        codes = [process.poll() for process in processes]
        if any(code not in (None, 0) for code in codes):
            return 1
        if all(code == 0 for code in codes):
            return 0
        time.sleep(0.05)


def _measure(joined: bagua.Group, sizes: Sequence[int]) -> dict[str, Any]:
    import torch
    import torch.distributed as dist

    from bagua.torch_api.membership import torch_destroy_process_group

    torch.set_num_threads(1)
    # Kept until the end, because rank 0's store is the server.
    store = _store(joined)
    try:
        dist.init_process_group("gloo", store=store, rank=joined.rank, world_size=joined.size)
    except RuntimeError as error:
        raise BaguaError(
            f"bench: gloo, to compare with, cannot start on rank {joined.rank}: {error}; set GLOO_SOCKET_IFNAME "
            "to the network interface by which the ranks reach each other"
        ) from error
    try:
        rows = []
        for size in sizes:
            rows.append({"bytes": size, **_race(joined, size, min(_BUDGET / len(sizes), _BUDGET_OF_ONE))})
        joined.barrier()
    finally:
        torch_destroy_process_group.destroy()
    return {
        "ranks": joined.size,
        "collective": joined.collective,
        "optimized": extension.IS_OPTIMIZED,
        "all_reduce": rows,
    }


def _store(joined: bagua.Group) -> Any:
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


class _Batch(NamedTuple):
    """Times in seconds of one batch on this rank, and the processors on which it began and ended."""

    begun: float
    ended: float
    first: int
    last: int


class _Contender:
    """One library's all_reduce on tensors of one size."""

    def __init__(self, joined: bagua.Group, name: str, calls: list[Callable[[], object]], tensors: _Tensors) -> None:
        # One call for each tensor.
        self._joined, self._name, self._functions, self._tensors = joined, name, calls, tensors
        self._batches: list[_Batch] = []
        # Batches of one call.
        self._singles: list[_Batch] = []
        self._turn(1, 1)  # opens connections and maps memory
        (first,) = self._turn(min(5, len(tensors.x)), 1)
        seconds = _maximum(joined, [first.ended - first.begun])[0] / min(5, len(tensors.x))
        self._calls = max(1, min(len(tensors.x), int(_LONG / seconds)))
        self._number = max(1, min(_BATCHES, int(_LONG / seconds / self._calls)))

    def play(self) -> None:
        """Runs one turn: batches, and then single calls if a batch has several."""
        untimed = _UNTIMED if self._number > 1 else 0
        batches = self._turn(self._calls, self._number + untimed)[untimed:]
        self._batches += batches
        self._singles += batches if self._calls == 1 else self._turn(1, _SINGLES)

    def _turn(self, calls: int, batches: int) -> list[_Batch]:
        """Times batches of `calls` calls. Raises BaguaError for a wrong sum."""
        clock, processor, functions = time.perf_counter, _processor(), self._functions[:calls]
        found = []
        for _ in range(batches):
            self._tensors.rewrite(calls)
            time.sleep(_PAUSE)
            first, begun = processor(), clock()
            for function in functions:
                function()
            found.append(_Batch(begun, clock(), first, processor()))
            time.sleep(_PAUSE_OF_CHECK)
            if not self._tensors.right(calls):
                raise BaguaError(f"all_reduce of {self._tensors.size} bytes: {self._name} gave a wrong sum")
        return found

    def seconds(self) -> float:
        """Returns the median seconds per call in a batch, from the last rank's start to the last rank's end."""
        begun, ended = ([getattr(batch, name) for batch in self._batches] for name in ("begun", "ended"))
        if len(self._joined.communicator.machines) > 1:
            # Clocks of different hosts cannot be compared.
            begun, ended = [0.0] * len(begun), [end - begin for begin, end in zip(begun, ended, strict=True)]
        pairs = zip(_maximum(self._joined, begun), _maximum(self._joined, ended), strict=True)
        return statistics.median(end - begin for begin, end in pairs) / self._calls

    def single_seconds(self) -> float:
        """Returns the median seconds of a single call on the slowest rank, with its wait for ranks that start later."""
        return statistics.median(_maximum(self._joined, [batch.ended - batch.begun for batch in self._singles]))

    def shared_processor(self) -> float:
        """Returns the share of batches in which two ranks shared a processor although another one was free."""
        own = np.array([(batch.first, batch.last) for batch in self._batches], dtype=np.int64)
        found = self._joined.all_gather(own.reshape(1, -1)).reshape(self._joined.size, -1, 2)
        processors = machine.machine()["cores"]
        shared = np.zeros(len(self._batches), dtype=bool)
        for ranks in self._joined.communicator.machines:
            for batch in range(len(shared)):
                sides = found[list(ranks), batch].T.tolist()
                shared[batch] |= any(len(set(side)) < min(len(side), processors) for side in sides)
        return float(shared.mean())


class _Tensors:
    """The tensors of one size, one for each call of a batch."""

    def __init__(self, joined: bagua.Group, size: int) -> None:
        import torch

        self.size = size
        base = torch.arange(size // 4, dtype=torch.float32) % 1000
        # Whole numbers below 2^24, so sums are exact in any order.
        self._own = base + joined.rank
        self._expected = base * joined.size + joined.size * (joined.size - 1) / 2
        copies = min(_CALLS_TOGETHER, _BYTES_TOGETHER // size) if size < _SMALL else 1
        self.x = [torch.empty_like(self._own) for _ in range(copies)]

    def rewrite(self, count: int) -> None:
        for x in self.x[:count]:
            x.copy_(self._own)

    def right(self, count: int) -> bool:
        import torch

        return all(torch.equal(x, self._expected) for x in self.x[:count])


def _processor() -> Callable[[], int]:
    return ctypes.CDLL(None).sched_getcpu


def _maximum(joined: bagua.Group, values: Sequence[float]) -> list[float]:
    found = np.array(values, dtype=np.float64)
    joined.all_reduce(found, op="max")
    return list(map(float, found))


def _race(joined: bagua.Group, size: int, budget: float) -> dict[str, float]:
    """Returns the results of all_reduce on `size` bytes for Bagua and gloo. Raises BaguaError for a wrong sum."""
    import torch.distributed as dist

    tensors = _Tensors(joined, size)
    # A call on this array costs as much as a call of bagua.torch_api on the tensor.
    ours = _Contender(joined, "bagua", [partial(joined.all_reduce, x.numpy()) for x in tensors.x], tensors)
    gloo = _Contender(joined, "gloo", [partial(dist.all_reduce, x) for x in tensors.x], tensors)
    until = time.monotonic() + budget
    more = np.ones(1, dtype=np.uint8)
    while more[0]:
        ours.play()
        gloo.play()
        more[0] = time.monotonic() < until
        # Rank 0 decides when all ranks stop.
        joined.broadcast(more, 0)
    seconds, gloo_seconds = ours.seconds(), gloo.seconds()
    return {
        "seconds": seconds,
        "gb_per_s": size / seconds / 1e9,
        "single_seconds": ours.single_seconds(),
        "gloo_seconds": gloo_seconds,
        "gloo_single_seconds": gloo.single_seconds(),
        "ratio": gloo_seconds / seconds,
        "shared_processor": ours.shared_processor(),
    }


def _report(figures: dict[str, Any], as_json: bool) -> None:
    if as_json:
        tables.show(json.dumps(figures, indent=2, allow_nan=False))
        return
    rows = [
        (
            f"{row['bytes']:,}",
            f"{row['seconds'] * 1e6:,.1f}",
            f"{row['gb_per_s']:.3f}",
            f"{row['gloo_seconds'] * 1e6:,.1f}",
            f"{row['ratio']:.2f}",
            f"{row['single_seconds'] * 1e6:,.1f}",
            f"{row['gloo_single_seconds'] * 1e6:,.1f}",
        )
        for row in figures["all_reduce"]
    ]
    title = f"all_reduce, {figures['ranks']} ranks, {figures['collective']}"
    if not figures["optimized"]:
        title += ", NOT OPTIMIZED: build with make setup, or maturin develop --release"
    columns = ("bytes", "us", "GB/s", "gloo us", "gloo / bagua", "single us", "gloo single us")
    lines = [
        tables.table(columns, rows, title=title, left=0),
        "",
        "us: a call in a batch, as in the README; single us: one call by itself, with the wait for the last rank",
    ]
    lines += [
        f"{row['bytes']:,} bytes: two ranks shared a processor in {row['shared_processor']:.0%} of batches; "
        "on an idle machine it is faster"
        for row in figures["all_reduce"]
        if row["shared_processor"] > 0.05
    ]
    tables.show("\n".join(lines))
