"""all_reduce of float32 tensors: Bagua and torch's gloo in turn, in the same processes, answers checked.

The two take turns call by call, so that whatever else the machine does meets both. Every buffer is rewritten before
each call: a result that is still in the cache from the call before would flatter whoever comes second.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import os
import platform
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed
import torch.multiprocessing

import bagua.torch_api

ROOT = Path(__file__).resolve().parent.parent
RECORD = ROOT / "benchmarks" / "record" / "all_reduce_vs_gloo.csv"
WARM_UP = 3


def measure(tensor: torch.Tensor, rank: int, size: int, once: Callable[[torch.Tensor], object]) -> float:
    """Seconds of one call on this rank, with its result checked."""
    tensor.fill_(rank + 1)
    torch.distributed.barrier()
    start = time.perf_counter()
    once(tensor)
    seconds = time.perf_counter() - start
    expected = size * (size + 1) / 2
    if not bool((tensor == expected).all()):
        raise AssertionError(f"rank {rank}: not all elements are {expected}")
    return seconds


def rank_main(rank: int, size: int, mib: float, repeats: int, folder: str) -> None:
    """One rank: rank 0 leaves the medians in `folder`."""
    torch.set_num_threads(1)
    store = torch.distributed.FileStore(f"{folder}/store", size)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=size)
    ours_store = torch.distributed.PrefixStore("bagua", store)
    bagua.torch_api.init_process_group(ours_store, rank=rank, world_size=size, local_world_size=size)
    tensor = torch.empty(int(mib * 2**20 / 4))
    contestants: dict[str, Callable[[torch.Tensor], object]] = {
        "bagua": bagua.torch_api.allreduce_inplace,
        "gloo": torch.distributed.all_reduce,
    }
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for turn in range(WARM_UP + repeats):
        for name, once in contestants.items():
            # A call lasts as long as its slowest rank.
            slowest = torch.tensor(measure(tensor, rank, size, once))
            torch.distributed.all_reduce(slowest, torch.distributed.ReduceOp.MAX)
            if turn >= WARM_UP:
                seconds[name].append(slowest.item())
    if rank == 0:
        medians = [statistics.median(seconds[name]) for name in contestants]
        Path(folder, "medians").write_text(" ".join(map(repr, medians)))
    bagua.torch_api.destroy_process_group()
    torch.distributed.destroy_process_group()


def processor() -> str:
    """The processor's name, or the architecture where Linux does not tell."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def commit() -> str:
    """The commit that was measured, with a plus sign when the tree has changes."""
    shown = subprocess.run(
        ["git", "describe", "--always", "--dirty=+"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return shown.stdout.strip() or "unknown"


def record(row: dict[str, object]) -> None:
    """Adds one line to the record."""
    fresh = not RECORD.exists()
    with RECORD.open("a", newline="") as file:
        writer = csv.DictWriter(file, list(row))
        if fresh:
            writer.writeheader()
        writer.writerow(row)


def main() -> None:
    """Starts the ranks, prints the comparison."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=float, default=16.0, help="size of the tensor (default: 16)")
    parser.add_argument("--ranks", type=int, default=2, help="number of processes (default: 2)")
    parser.add_argument("--repeats", type=int, default=30, help="measured calls of each (default: 30)")
    parser.add_argument("--record", action="store_true", help=f"add a line to {RECORD.relative_to(ROOT)}")
    options = parser.parse_args()

    with tempfile.TemporaryDirectory() as folder:
        arguments = (options.ranks, options.mib, options.repeats, folder)
        torch.multiprocessing.spawn(rank_main, args=arguments, nprocs=options.ranks)
        ours, gloo = map(float, Path(folder, "medians").read_text().split())

    size = options.mib * 2**20
    case = f"all_reduce of {options.mib:g} MiB float32, {options.ranks} ranks, median of {options.repeats}"
    print(f"{case}, on {processor()}, {os.cpu_count()} cores")
    for name, seconds in (("bagua", ours), ("gloo", gloo)):
        print(f"  {name:6} {seconds * 1e3:9.3f} ms  {size / seconds / 1e9:7.2f} GB/s")
    print(f"  ratio  {gloo / ours:9.1f} times as fast as gloo")
    if options.record:
        now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
        row = {
            "date": now,
            "commit": commit(),
            "processor": processor(),
            "cores": os.cpu_count(),
            "torch": torch.__version__,
        }
        row |= {
            "ranks": options.ranks,
            "mib": options.mib,
            "repeats": options.repeats,
            "bagua_s": ours,
            "gloo_s": gloo,
            "ratio": gloo / ours,
        }
        record(row)
        print(f"  recorded in {RECORD.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
