"""Measures what the flight recorder adds to a blocking all_reduce of 1 KiB between two ranks in shared memory.

    python benchmarks/recorder.py

Batches with and without recording alternate in one run, on the same group and tensor, and begin with either in turn.
The figure is the median over pairs of neighbouring batches of the ratio of their times: what else runs on the machine
changes both batches of a pair.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

from common import Barrier, add_rank_options, percentile, run_ranks, save_if_asked, this_rank, write_row

RANKS = 2
CALLS = 500


def measure(options: dict[str, Any]) -> None:
    """One rank: times batches with and without recording; rank 0 writes the row."""
    import numpy as np

    import bagua
    from bagua import extension

    rank, folder = this_rank(), options["folder"]
    group = bagua.init(rank, RANKS, f"file://{Path(folder, 'rendezvous')}", local_rank=rank, local_world_size=RANKS)
    if group.collective != "shm":
        raise AssertionError(f"the ranks use {group.collective}, not shared memory")
    x = np.zeros(256, np.float32)
    barrier = Barrier(folder, rank, RANKS)

    def batch(recording: bool) -> float:
        extension.set_recording(recording)
        x[:] = rank
        barrier.wait()
        begun = time.perf_counter_ns()
        for _ in range(CALLS):
            group.all_reduce(x, "max")
        taken = (time.perf_counter_ns() - begun) / CALLS
        if not (x == RANKS - 1).all():
            raise AssertionError("a wrong maximum")
        return taken

    with_, without = [], []
    for pair in range(options["pairs"] + 5):
        first = pair % 2 == 0
        times = {first: batch(first), not first: batch(not first)}
        # The first pairs warm up.
        if pair >= 5:
            with_.append(times[True])
            without.append(times[False])
    recorded = len(bagua.flight_recorder())
    if recorded != 1000:
        raise AssertionError(f"the recorder holds {recorded} operations")
    extension.set_recording(True)
    bagua.shutdown()
    if rank == 0:
        ratios = [a / b for a, b in zip(with_, without, strict=True)]
        row = {
            "bytes": x.nbytes,
            "recorded_ns": statistics.median(with_),
            "unrecorded_ns": statistics.median(without),
            "ratio": statistics.median(ratios),
            "ratio_p25": percentile(ratios, 0.25),
            "ratio_p75": percentile(ratios, 0.75),
            "ratio_of_fastest": min(with_) / min(without),
        }
        write_row(options, row)


def main() -> None:
    """Prints the ratio, and saves it if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_rank_options(parser)
    args = parser.parse_args()
    if args.child:
        measure(json.loads(args.child))
        return
    rows = run_ranks(__file__, RANKS, {"pairs": 20 if args.quick else 2000}, limit=args.limit)
    for row in rows:
        print(
            f"all_reduce of {row['bytes']} bytes: {row['recorded_ns']:.0f} ns recorded, {row['unrecorded_ns']:.0f} ns "
            f"not: ratio {row['ratio']:.3f} (quartiles {row['ratio_p25']:.3f} to {row['ratio_p75']:.3f}, of the "
            f"fastest batches {row['ratio_of_fastest']:.3f})"
        )
    save_if_asked(args, "recorder", rows)


if __name__ == "__main__":
    main()
