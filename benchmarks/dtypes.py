"""all_reduce of each element type against float32 of as many bytes: same tensors, call by call in random order.

    python benchmarks/dtypes.py                          # 2 ranks, ordinary tensors and an arena
    python benchmarks/dtypes.py --sizes 16MiB --budget 60

`collectives.py` times one element type after another. On a virtual machine whose host moves the two processors between
core complexes, calls of one type take up to three times as long from one minute to the next. Here every round times
every type once, on the same memory, which is rewritten before every call. Ratios are of the fastest call, the fastest
tenth and the median; above 1, the type takes longer than float32.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from pathlib import Path
from typing import Any, TypeAlias

from common import (
    Barrier,
    add_rank_options,
    machine,
    parse_size,
    percentile,
    run_ranks,
    save_if_asked,
    show_size,
    this_rank,
    write_row,
)
from contenders import CONTENDERS, DTYPES, OURS, Array, Buffers, Call, Case

SIZES = ("256KiB", "1MiB", "4MiB", "16MiB")
STATISTICS = {"min": 0.0, "p10": 0.1, "p50": 0.5}


Calls: TypeAlias = dict[tuple[str, str], tuple[Buffers, Call]]


def prepare(size: int, rank: int, ranks: int, contenders: dict[str, Any]) -> Calls:
    """The calls of every contender and element type; all types of a contender are in the same memory."""
    calls: Calls = {}
    for name, contender in contenders.items():
        contender.begin(Case("all_reduce", "float32", size), 1)
        memory: Array = contender.empty(size)
        for dtype in DTYPES:
            buffers = Buffers(Case("all_reduce", dtype, size), rank, ranks, lambda nbytes, m=memory: m[:nbytes])  # type: ignore[misc]
            calls[name, dtype] = buffers, contender.call(buffers)
    return calls


def child(options: dict[str, Any]) -> None:
    """One rank: times every case; rank 0 writes the rows."""
    rank, ranks, folder = this_rank(), options["ranks"], options["folder"]
    barrier = Barrier(folder, rank, ranks)
    contenders = {name: CONTENDERS[name](rank, ranks, folder) for name in OURS}
    # Every rank shuffles alike.
    shuffle = random.Random(1).shuffle
    for size in options["sizes"]:
        calls = prepare(size, rank, ranks, contenders)
        times: dict[tuple[str, str], list[float]] = {name: [] for name in calls}
        order = list(calls)
        begun, rounds = time.perf_counter(), 0
        while rounds < 5 or barrier.broadcast(time.perf_counter() - begun) < options["budget"]:
            rounds += 1
            shuffle(order)
            for case in order:
                buffers, call = calls[case]
                buffers.rewrite()
                barrier.wait()
                start = time.perf_counter()
                call()
                times[case].append(time.perf_counter() - start)
                barrier.wait()
                buffers.check(case[0])
        Path(folder, f"times-{rank}").write_text(json.dumps(list(times.values())))
        barrier.wait()
        if rank == 0:
            every = [json.loads(Path(folder, f"times-{other}").read_text()) for other in range(ranks)]
            for (name, dtype), *theirs in zip(times, *every, strict=True):
                # A call's time is that of its slowest rank.
                slowest = [max(call) for call in zip(*theirs, strict=True)]
                seconds = {statistic: percentile(slowest, share) for statistic, share in STATISTICS.items()}
                row = {"ranks": ranks, "bytes": size, "contender": name, "dtype": dtype, "rounds": rounds}
                write_row(options, {**row, **seconds})
        barrier.wait()


def show(rows: list[dict[str, Any]]) -> None:
    """Prints the ratios to float32."""
    base = {(row["bytes"], row["contender"]): row for row in rows if row["dtype"] == "float32"}
    print(f"{'size':>7} {'tensors':<11}{'rounds':>7}  {'dtype':<9}" + "".join(f"{name:>7}" for name in STATISTICS))
    for row in rows:
        full = base[row["bytes"], row["contender"]]
        cells = "".join(f"{row[name] / full[name]:>7.2f}" for name in STATISTICS)
        print(f"{show_size(row['bytes']):>7} {row['contender']:<11}{row['rounds']:>7}  {row['dtype']:<9}{cells}")


def main() -> None:
    """Parses the command line, measures, prints, saves."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_rank_options(parser)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--sizes", nargs="+", type=parse_size, default=[parse_size(size) for size in SIZES])
    parser.add_argument("--budget", type=float, default=10.0, help="seconds per size")
    args = parser.parse_args()
    if args.child:
        child(json.loads(args.child))
        return
    if args.quick:
        args.sizes, args.budget = [1 << 20], 0.5
    print(machine())
    options = {"sizes": args.sizes, "budget": args.budget}
    rows = run_ranks(__file__, args.ranks, options, limit=args.limit)
    show(rows)
    save_if_asked(args, "dtypes", rows)


if __name__ == "__main__":
    main()
