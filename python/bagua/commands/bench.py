"""`bagua bench`: all_reduce beside gloo's, in one run, with every answer checked.

Ranks of a job measure that job. Without a launcher the command starts its own ranks on this host. Both contenders work
in place on the same plain tensors, in turns of a few batches. A batch is one call, or up to 200 calls on small tensors,
each on a tensor of its own; the ranks sleep before each batch. benchmarks/collectives.py, which made the table in the
README, measures in the same way.
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
from bagua import config, engine, launcher
from bagua.commands import machine, tables
from bagua.distributed import end_with_parent
from bagua.errors import BaguaError
from bagua.metrics.server import why_not_local

__all__ = ["add", "sizes_of"]

# Tensors of a size that each rank has at once.
_TENSORS = 4

# Seconds for all sizes, and for one of them.
_BUDGET, _BUDGET_OF_ONE = 12.0, 3.0

# Below this many bytes several calls are timed together, because one is shorter than the skew of its start; their
# tensors together stay in the caches.
_SMALL, _CALLS_TOGETHER, _BYTES_TOGETHER = 64 << 10, 200, 1 << 20

# Seconds after which a batch or a turn is long enough.
_LONG = 0.02

# Timed batches of a turn, and batches before them: the caches hold the data of the other contender. Then the calls by
# themselves.
_BATCHES, _UNTIMED, _SINGLES = 10, 2, 3

# Seconds that the ranks sleep before a batch, as between the steps of a program, and before they check its sums.
_PAUSE, _PAUSE_OF_CHECK = 0.05, 0.01

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
    parser.add_argument("--json", action="store_true", help="print one JSON object")
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
    gloo = {}
    if why_not_local("127.0.0.1") is not None and config.text("GLOO_SOCKET_IFNAME") is None:
        # gloo knows no other loopback address by itself.
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
    try:
        dist.init_process_group("gloo", store=store, rank=joined.rank, world_size=joined.size)
    except RuntimeError as error:
        raise BaguaError(
            f"bench: gloo, which it measures too, cannot start on rank {joined.rank}: {error}; set GLOO_SOCKET_IFNAME "
            "to the network interface by which the ranks reach each other"
        ) from error
    try:
        rows = []
        for size in sizes:
            rows.append({"bytes": size, **_race(joined, size, min(_BUDGET / len(sizes), _BUDGET_OF_ONE))})
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


class _Batch(NamedTuple):
    """One batch of this rank: seconds of its clock, and the processors before and after."""

    begun: float
    ended: float
    first: int
    last: int


class _Contender:
    """One library's all_reduce on the tensors of a size."""

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
        """Plays one turn: batches, and single calls if a batch has several."""
        untimed = _UNTIMED if self._number > 1 else 0
        batches = self._turn(self._calls, self._number + untimed)[untimed:]
        self._batches += batches
        self._singles += batches if self._calls == 1 else self._turn(1, _SINGLES)

    def _turn(self, calls: int, batches: int) -> list[_Batch]:
        """Times batches of `calls` calls. BaguaError for a wrong sum."""
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
        """Median seconds of a call in a batch, from when the last rank begins the batch until the last rank ends it."""
        begun, ended = ([getattr(batch, name) for batch in self._batches] for name in ("begun", "ended"))
        if len(self._joined.communicator.machines) > 1:
            # Hosts have no clock in common.
            begun, ended = [0.0] * len(begun), [end - begin for begin, end in zip(begun, ended, strict=True)]
        pairs = zip(_maximum(self._joined, begun), _maximum(self._joined, ended), strict=True)
        return statistics.median(end - begin for begin, end in pairs) / self._calls

    def single_seconds(self) -> float:
        """Median seconds of one call by itself on the slowest rank, with its wait for the ranks that begin later."""
        return statistics.median(_maximum(self._joined, [batch.ended - batch.begun for batch in self._singles]))

    def shared_processor(self) -> float:
        """Share of batches in which two ranks of a host were on one processor although another one was free."""
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
    """The tensors of one size: as many as a batch has calls."""

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
        """Makes the first tensors this rank's."""
        for x in self.x[:count]:
            x.copy_(self._own)

    def right(self, count: int) -> bool:
        """Returns True if the first tensors are the sums of all ranks'."""
        import torch

        return all(torch.equal(x, self._expected) for x in self.x[:count])


def _processor() -> Callable[[], int]:
    """The function that returns the processor of the calling thread."""
    return ctypes.CDLL(None).sched_getcpu


def _maximum(joined: bagua.Group, values: Sequence[float]) -> list[float]:
    """The maximum over all ranks of each value."""
    found = np.array(values, dtype=np.float64)
    joined.all_reduce(found, op="max")
    return list(map(float, found))


def _race(joined: bagua.Group, size: int, budget: float) -> dict[str, float]:
    """The figures of all_reduce of `size` bytes, ours and gloo's. BaguaError for a wrong sum."""
    import torch.distributed as dist

    tensors = _Tensors(joined, size)
    # An array in a tensor's memory costs a call what a tensor costs a call of bagua.torch_api.
    ours = _Contender(joined, "bagua", [partial(joined.all_reduce, x.numpy()) for x in tensors.x], tensors)
    gloo = _Contender(joined, "gloo", [partial(dist.all_reduce, x) for x in tensors.x], tensors)
    until = time.monotonic() + budget
    more = np.ones(1, dtype=np.uint8)
    while more[0]:
        ours.play()
        gloo.play()
        more[0] = time.monotonic() < until
        # All go on for as long as rank 0 does.
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
