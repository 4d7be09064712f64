"""Many more ranks than cores, on one machine: seconds to join, descriptors, threads, memory, and whether all stay.

    python benchmarks/joining.py
    python benchmarks/joining.py --ranks 256 1024 --hosts 8 --idle 60

Each rank is a fork of this process, which has imported NumPy and bagua only. It joins, does nothing for `--idle`
seconds but exchange heartbeats, and sums with the others. A healthy rank that another one lost is an error. `joined_s`
is the time from the first fork to the last rank that has joined, `cpu_s` the processor time of all ranks until then;
the rest are those of the rank that has most.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import socket
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import numpy as np
from common import add_output_options, machine, save_if_asked

import bagua


def main() -> None:
    """Parses the command line, measures, prints, keeps."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_output_options(parser)
    parser.add_argument("--ranks", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--hosts", type=int, default=1, help="make this machine look like so many hosts")
    parser.add_argument("--idle", type=float, default=20.0, help="seconds without an operation")
    args = parser.parse_args()
    if args.quick:
        args.ranks, args.idle = [4], 0.5
    print(machine())
    columns = ("ranks", "hosts", "joined_s", "cpu_s", "descriptors", "threads", "pss_mib", "reduce_s")
    print("".join(f"{name:>12}" for name in columns))
    rows = []
    for ranks in args.ranks:
        rows.append(measure(ranks, args.hosts, args.idle))
        print("".join(f"{rows[-1][name]:>12.4g}" for name in columns), flush=True)
    save_if_asked(args, Path(__file__).stem, rows)


def measure(ranks: int, hosts: int, idle: float) -> dict[str, Any]:
    """Forks the ranks and waits for them; RuntimeError when one of them failed."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    begun, pipes, ids = time.monotonic(), list[int](), list[int]()
    for rank in range(ranks):
        reads, writes = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(reads)
            for other in pipes:
                os.close(other)
            os._exit(run(rank, ranks, rank * hosts // ranks if hosts > 1 else None, port, idle, writes))
        os.close(writes)
        pipes.append(reads)
        ids.append(child)
    said = []
    for pipe in pipes:
        with open(pipe) as lines:
            said.append(lines.read())
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in ids]
    bad = [f"rank {rank} ended with {code}: {said[rank][-300:]}" for rank, code in enumerate(codes) if code != 0]
    if bad:
        raise RuntimeError(f"{len(bad)} of {ranks} ranks failed:\n" + "\n".join(bad[:5]))
    found = [json.loads(text) for text in said]
    largest = {key: max(row[key] for row in found) for key in ("descriptors", "threads", "pss_mib", "reduce_s")}
    joined = max(row["joined"] for row in found) - begun
    return {"ranks": ranks, "hosts": hosts, "joined_s": joined, "cpu_s": sum(row["cpu_s"] for row in found), **largest}


def run(rank: int, ranks: int, host: int | None, port: int, idle: float, pipe: int) -> int:
    """One rank: writes what it saw into a pipe, and returns its exit code."""
    with open(pipe, "w") as says:
        try:
            if host is not None:
                os.environ["BAGUA_HOST_ID"] = f"pretended-host-{host}"
            bagua.init(rank=rank, world_size=ranks, init_method=f"tcp://127.0.0.1:{port}")
            row: dict[str, Any] = {"joined": time.monotonic()}
            times = resource.getrusage(resource.RUSAGE_SELF)
            row["cpu_s"] = times.ru_utime + times.ru_stime
            time.sleep(idle)
            x, begun = np.ones(256, np.float32), time.monotonic()
            bagua.all_reduce(x, op="sum")
            row["reduce_s"] = time.monotonic() - begun
            if not (x == ranks).all():
                raise AssertionError(f"{x[0]} is not the sum of {ranks} ones")
            row |= {"descriptors": len(os.listdir("/proc/self/fd")), "threads": len(os.listdir("/proc/self/task"))}
            row["pss_mib"] = proportional_size()
            bagua.shutdown()
            json.dump(row, says)
            return 0
        except BaseException:
            traceback.print_exc(file=says)
            sys.stderr.flush()
            return 1


def proportional_size() -> float:
    """MiB of this process, where a page that n processes map counts as an n-th."""
    line = next(line for line in Path("/proc/self/smaps_rollup").read_text().splitlines() if line.startswith("Pss:"))
    return int(line.split()[1]) / 1024


if __name__ == "__main__":
    main()
