"""Measures all_reduce over TLS beside plain TCP, between two ranks on this machine's loopback interface.

    python benchmarks/tls.py
    python benchmarks/tls.py --sizes 1KiB 1MiB 16MiB

Both groups are in the same two processes. Batches on one and on the other alternate, and begin with either in turn;
the figure is the median over pairs of neighbouring batches of the ratio of their times. Loopback is faster than any
network, and both ends share the processors of one machine: between machines TLS costs less than this.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

from common import (
    Barrier,
    add_rank_options,
    parse_size,
    percentile,
    run_ranks,
    save_if_asked,
    show_size,
    this_rank,
    write_row,
)

RANKS = 2
SIZES = (1 << 10, 1 << 20, 16 << 20)
#: Seconds of a batch, roughly, and calls in it at most.
BATCH, CALLS = 0.05, 500


def measure(options: dict[str, Any]) -> None:
    """One rank: times batches on either group; rank 0 writes a row per size."""
    import numpy as np

    import bagua
    from bagua import group

    rank, folder = this_rank(), options["folder"]
    os.environ |= {"BAGUA_TRANSPORT": "tcp", "BAGUA_JOB_SECRET": "of a benchmark"}
    groups = {}
    for name in ("tcp", "tls"):
        os.environ["BAGUA_TLS"] = "1" if name == "tls" else "0"
        method = f"file://{Path(folder, f'rendezvous-{name}')}"
        groups[name] = bagua.init(rank, RANKS, method, local_rank=rank, local_world_size=RANKS)
        if groups[name].transports[1 - rank] != name:
            raise AssertionError(f"the ranks use {groups[name].transports}, not {name}")
        group.set_default(None)
    barrier = Barrier(folder, rank, RANKS)

    def batch(name: str, x: Any, calls: int) -> float:
        x[:] = rank
        barrier.wait()
        begun = time.perf_counter_ns()
        for _ in range(calls):
            groups[name].all_reduce(x, "max")
        taken = (time.perf_counter_ns() - begun) / calls
        if not (x == RANKS - 1).all():
            raise AssertionError("a wrong maximum")
        return taken

    for size in options["sizes"]:
        x = np.zeros(size // 4, np.float32)
        # About 1 GB/s each way; the number must be the same on both ranks.
        calls = max(1, min(CALLS, int(BATCH / (20e-6 + size / 1e9))))
        times: dict[str, list[float]] = {"tcp": [], "tls": []}
        for pair in range(options["pairs"] + 3):
            for name in ("tcp", "tls") if pair % 2 == 0 else ("tls", "tcp"):
                taken = batch(name, x, calls)
                # The first pairs warm up.
                if pair >= 3:
                    times[name].append(taken)
        if rank == 0:
            ratios = [tls / tcp for tcp, tls in zip(times["tcp"], times["tls"], strict=True)]
            row = {
                "bytes": size,
                "tcp_us": statistics.median(times["tcp"]) / 1e3,
                "tls_us": statistics.median(times["tls"]) / 1e3,
                "ratio": statistics.median(ratios),
                "ratio_p25": percentile(ratios, 0.25),
                "ratio_p75": percentile(ratios, 0.75),
                "ratio_of_fastest": min(times["tls"]) / min(times["tcp"]),
            }
            write_row(options, row)
    bagua.shutdown()


def main() -> None:
    """Prints the ratios, and saves them if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", type=parse_size, default=list(SIZES))
    parser.add_argument("--pairs", type=int, default=60, help="pairs of batches of each size")
    add_rank_options(parser)
    args = parser.parse_args()
    if args.child:
        measure(json.loads(args.child))
        return
    options = {"pairs": 2 if args.quick else args.pairs, "sizes": args.sizes}
    rows = run_ranks(__file__, RANKS, options, limit=args.limit)
    for row in rows:
        print(
            f"all_reduce of {show_size(row['bytes'])}: {row['tcp_us']:.0f} us over TCP, {row['tls_us']:.0f} us over "
            f"TLS: ratio {row['ratio']:.2f} (quartiles {row['ratio_p25']:.2f} to {row['ratio_p75']:.2f}, of the "
            f"fastest batches {row['ratio_of_fastest']:.2f})"
        )
    save_if_asked(args, "tls", rows)


if __name__ == "__main__":
    main()
