"""all_reduce of each element type against float32 of as many bytes: same tensors, call by call in random order.

    python benchmarks/dtypes.py                          # 2 ranks, ordinary tensors and an arena
    python benchmarks/dtypes.py --sizes 16MiB --budget 60

`collectives.py` times one element type after another. On a virtual machine whose host moves the two cores together and
apart, calls of one type may take three times as long from one minute to the next. Here every round times every type
once, on the same memory, which is rewritten before every call. Ratios are of the fastest call, the fastest tenth and
the median; above 1, the type takes longer than float32.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from typing import Any

from common import (
    Meeting,
    add_options,
    keep_if_asked,
    machine,
    parse_size,
    percentile,
    run_ranks,
    show_size,
    this_rank,
    write_row,
)

DTYPES = ("float32", "float16", "bfloat16", "int32")
SIZES = ("256KiB", "1MiB", "4MiB", "16MiB")
STATISTICS = {"min": 0.0, "p10": 0.1, "p50": 0.5}


def child(options: dict[str, Any]) -> None:
    """One rank: times every case, and lets rank 0 write the rows."""
    import torch
    import torch.distributed as dist
    from contenders import Buffers, Case, Ours, OursInArena

    rank, ranks = this_rank(), options["ranks"]
    torch.set_num_threads(1)
    meeting = Meeting(options["folder"], rank, ranks)
    store = dist.FileStore(f"{options['folder']}/times", ranks)
    contenders = [contender(rank, ranks, options["folder"]) for contender in (Ours, OursInArena)]
    # Every rank shuffles alike.
    shuffle = random.Random(1).shuffle
    for size in options["sizes"]:
        calls: dict[tuple[str, str], tuple[Buffers, Any]] = {}
        for contender in contenders:
            whole = Case("all_reduce", "uint8", size)
            contender.begin(whole, 1, ranks)
            memory = contender.empty(size, torch.uint8)
            for dtype in DTYPES:
                case = Case("all_reduce", dtype, size)
                buffers = Buffers(case, rank, ranks, lambda count, kind, memory=memory: memory.view(kind)[:count])
                calls[contender.name, dtype] = buffers, contender.call(buffers)
        times: dict[tuple[str, str], list[float]] = {name: [] for name in calls}
        order = list(calls)
        begun, rounds = time.perf_counter(), 0
        while rounds < 5 or meeting.tell(time.perf_counter() - begun) < options["budget"]:
            rounds += 1
            shuffle(order)
            for name in order:
                buffers, call = calls[name]
                buffers.rewrite()
                meeting.wait()
                start = time.perf_counter()
                call()
                times[name].append(time.perf_counter() - start)
                meeting.wait()
                buffers.check(name[0])
        store.set(f"{size}/{rank}", json.dumps(list(times.values())))
        every = [json.loads(store.get(f"{size}/{other}")) for other in range(ranks)]
        for index, (contender_name, dtype) in enumerate(times):
            # A call takes as long as on its slowest rank.
            slowest = [max(call) for call in zip(*(theirs[index] for theirs in every), strict=True)]
            if rank == 0:
                seconds = {name: percentile(slowest, share) for name, share in STATISTICS.items()}
                row = {"ranks": ranks, "bytes": size, "contender": contender_name, "dtype": dtype, "rounds": rounds}
                write_row(options, {**row, **seconds})


def show(rows: list[dict[str, Any]]) -> None:
    """Prints the ratios to float32."""
    base = {(row["bytes"], row["contender"]): row for row in rows if row["dtype"] == "float32"}
    print(f"{'size':>7} {'tensors':<11}{'rounds':>7}  {'dtype':<9}" + "".join(f"{name:>7}" for name in STATISTICS))
    for row in rows:
        full = base[row["bytes"], row["contender"]]
        cells = "".join(f"{row[name] / full[name]:>7.2f}" for name in STATISTICS)
        print(f"{show_size(row['bytes']):>7} {row['contender']:<11}{row['rounds']:>7}  {row['dtype']:<9}{cells}")


def main() -> None:
    """Parses the command line, measures, prints, keeps."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
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
    rows = run_ranks(__file__, args.ranks, options, mpi=False, limit=args.limit)
    show(rows)
    keep_if_asked(args, "dtypes", rows)


if __name__ == "__main__":
    main()
