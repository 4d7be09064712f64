"""Races our collectives against torch's gloo and OpenMPI: same processes, calls interleaved, every answer checked.

    python benchmarks/collectives.py --csv out           # 2 and 4 ranks, every verb at 16 MiB, all_reduce at every
    size, every dtype
    python benchmarks/collectives.py --ranks 2 --verbs all_reduce --sizes 1KiB 1MiB --dtypes float32
    python benchmarks/collectives.py --door              # what a blocking verb costs in Python, with nobody to talk to

All contenders live in every rank. They take turns, round by round in another order, and every buffer is rewritten
before every call, so that none meets warmer caches or a quieter machine than the others. Ranks meet before each timed
call by a barrier that belongs to none of them (common.Meeting). Calls on small tensors are timed in batches, each call
on a tensor of its own. A call's time is that of its slowest rank; the figure is the median over calls. A ratio above 1
says that ours is that many times faster.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common import (
    Meeting,
    add_options,
    keep_if_asked,
    machine,
    openmpi_missing,
    parse_size,
    percentile,
    run_ranks,
    show_size,
    this_rank,
    write_row,
)

VERBS = ("all_reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all")
DTYPES = ("float32", "bfloat16", "float16")
SIZES = ("1KiB", "16KiB", "256KiB", "1MiB", "4MiB", "16MiB", "64MiB", "256MiB")
OURS = ("ours", "ours-arena")
PEERS = ("gloo", "openmpi")
#: Below this many bytes several calls are timed together, because one is shorter than the skew of its start.
SMALL = 64 << 10
CALLS_TOGETHER = 200
#: Their tensors must not take more than this: caches hold what a program has just used.
BYTES_TOGETHER = 1 << 20
#: Seconds that calls together need not exceed: by then it does not matter who begins first.
LONG = 0.02


def time_case(
    case: Any, contenders: list[Any], rank: int, ranks: int, budget: float, meeting: Meeting
) -> dict[str, list[float]]:
    """Seconds per call on this rank, of each contender that has the case."""
    import torch
    from contenders import Buffers

    together = min(CALLS_TOGETHER, BYTES_TOGETHER // case.size) if case.size < SMALL else 1
    turns: dict[str, list[tuple[Buffers, Any]]] = {}
    ordinary = [
        Buffers(case, rank, ranks, lambda count, dtype: torch.empty(count, dtype=dtype)) for _ in range(together)
    ]
    for contender in contenders:
        contender.begin(case, together, ranks)
        own = contender.name == "ours-arena"
        buffers = [Buffers(case, rank, ranks, contender.empty) for _ in range(together)] if own else ordinary
        calls = [(b, call) for b in buffers if (call := contender.call(b)) is not None]
        if calls:
            turns[contender.name] = calls

    def once(name: str, most: int | None = None) -> float:
        calls = turns[name][:most]
        for buffers, _ in calls:
            buffers.rewrite()
        functions = [call for _, call in calls]
        meeting.wait()
        begun = time.perf_counter()
        for call in functions:
            call()
        elapsed = time.perf_counter() - begun
        # With more ranks than cores, a rank that went on to check would keep the core from one that is not done yet.
        meeting.wait()
        for buffers, _ in calls:
            buffers.check(name)
        return elapsed / len(calls)

    # Rank 0's clock decides for all: every rank must make the same number of calls.
    for name in turns:
        once(name, 1)  # connects what is lazy
        enough = int(meeting.tell(LONG / once(name, 5)))
        turns[name] = turns[name][: max(1, enough)]
    begun = time.perf_counter()
    for name in turns:
        once(name)
    rounds = int(meeting.tell(max(5, min(200, budget / (time.perf_counter() - begun)))))
    times: dict[str, list[float]] = {name: [] for name in turns}
    order = list(turns)
    for _ in range(rounds):
        # Another one begins each time: who follows a slow contender finds the peers at other places.
        order.append(order.pop(0))
        for name in order:
            times[name].append(once(name))
    return times


def threads() -> int:
    """Threads of this process."""
    return len(os.listdir("/proc/self/task"))


def child(options: dict[str, Any]) -> None:
    """One rank: joins as every contender, runs every case, and lets rank 0 write the rows."""
    import torch
    import torch.distributed as dist
    from contenders import Case, Gloo, OpenMpi, Ours, OursInArena
    from torch._C._distributed_c10d import FileStore

    torch.set_num_threads(1)
    rank, ranks, folder = this_rank(), int(options["ranks"]), str(options["folder"])
    meeting = Meeting(folder, rank, ranks)
    kinds = [Ours, *[OursInArena] * (not OursInArena.missing()), Gloo, *[OpenMpi] * bool(options["mpi"])]
    contenders, added = [], {}
    small = Case("all_reduce", "float32", 1024)
    dist.init_process_group("gloo", store=FileStore(f"{folder}/torch", ranks), rank=rank, world_size=ranks)
    for kind in kinds:
        before = threads()
        contender = kind(rank, ranks, folder)
        time_case(small, [contender], rank, ranks, 0.0, meeting)  # what starts threads only when it is used
        added[contender.name] = threads() - before
        contenders.append(contender)
    if rank == 0:
        write_row(options, {"threads": added, "ranks": ranks, "without": OursInArena.missing()})
    for text in options["cases"]:
        case = Case(*text)
        times = time_case(case, contenders, rank, ranks, float(options["budget"]), meeting)
        gathered: list[Any] = [None] * ranks
        dist.all_gather_object(gathered, times)
        if rank == 0:
            for name in times:
                slowest = [max(each) for each in zip(*(theirs[name] for theirs in gathered), strict=True)]
                write_row(
                    options,
                    {
                        "ranks": ranks,
                        "verb": case.verb,
                        "dtype": case.dtype,
                        "bytes": case.size,
                        "contender": name,
                        "seconds": statistics.median(slowest),
                        "p10_seconds": percentile(slowest, 0.1),
                        "calls": len(slowest),
                    },
                )
    dist.barrier()


def race(ranks: int, cases: list[tuple[str, str, int]], args: argparse.Namespace, mpi: bool) -> tuple[list[Any], Any]:
    """The rows of all cases with this many ranks, and the row about the contenders."""
    options = {"budget": args.budget, "cases": cases}
    about, *rows = run_ranks(str(Path(__file__).with_name("collectives.py")), ranks, options, mpi=mpi, limit=args.limit)
    return rows, about


def grouped(rows: list[Any]) -> dict[tuple[int, str, str, int], dict[str, Any]]:
    """Contenders' rows by case."""
    cases: dict[tuple[int, str, str, int], dict[str, Any]] = {}
    for row in rows:
        cases.setdefault((row["ranks"], row["verb"], row["dtype"], row["bytes"]), {})[row["contender"]] = row
    return cases


def show(rows: list[Any], statistic: str = "seconds") -> None:
    """Prints the table of microseconds and ratios."""
    ratios = [(ours, peer) for peer in PEERS for ours in OURS]
    names = "".join(f"{name:>12}" for name in (*OURS, *PEERS))
    print(f"{'ranks':>5} {'verb':<15}{'dtype':<9}{'size':>7}{names}" + "".join(f"{p + '/' + o:>20}" for o, p in ratios))
    for (ranks, verb, dtype, size), theirs in grouped(rows).items():
        us = {name: row[statistic] * 1e6 for name, row in theirs.items()}
        cells = "".join(f"{us[name]:>12.1f}" if name in us else f"{'-':>12}" for name in (*OURS, *PEERS))
        cells += "".join(f"{us[p] / us[o]:>20.2f}" if o in us and p in us else f"{'-':>20}" for o, p in ratios)
        print(f"{ranks:>5} {verb:<15}{dtype:<9}{show_size(size):>7}{cells}")
    for (ranks, verb, dtype, size), theirs in grouped(rows).items():
        full = grouped(rows).get((ranks, verb, "float32", size))
        if dtype != "float32" and full is not None:
            for name in theirs.keys() & full.keys() & set(OURS):
                ratio = theirs[name][statistic] / full[name][statistic]
                print(f"{ranks} ranks, {verb} of {show_size(size)}, {name}: {dtype} takes {ratio:.2f}x float32")


def plot(rows: list[Any], path: Path) -> None:
    """A log-log plot of all_reduce of float32, beside the CSV."""
    try:
        import matplotlib
    except ImportError:
        print("matplotlib is not installed (requirements/bench.in): no plot")
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = [row for row in rows if (row["verb"], row["dtype"]) == ("all_reduce", "float32")]
    worlds = sorted({row["ranks"] for row in rows})
    if not worlds:
        return
    figure, axes = pyplot.subplots(1, len(worlds), figsize=(6 * len(worlds), 4.5), squeeze=False)
    for axis, ranks in zip(axes[0], worlds, strict=True):
        for name in (*OURS, *PEERS):
            points = sorted((r["bytes"], r["seconds"]) for r in rows if (r["ranks"], r["contender"]) == (ranks, name))
            if points:
                axis.loglog(*zip(*points, strict=True), marker="o", label=name)
        axis.set(title=f"all_reduce, float32, {ranks} ranks", xlabel="bytes", ylabel="seconds, median of slowest rank")
        axis.grid(visible=True, which="both", alpha=0.3)
        axis.legend()
    figure.tight_layout()
    figure.savefig(path.with_suffix(".png"), dpi=110)
    pyplot.close(figure)


def beside_a_busy_thread(storeys: dict[str, Callable[[], Any]]) -> list[dict[str, Any]]:
    """The same calls one by one while another Python thread computes: whoever gives the GIL away waits 5 ms for it."""
    over = threading.Event()

    def compute() -> None:
        while not over.is_set():
            sum(range(100))

    thread = threading.Thread(target=compute)
    thread.start()
    rows = []
    for name, call in storeys.items():
        times = []
        for _ in range(400):
            begun = time.perf_counter_ns()
            call()
            times.append(time.perf_counter_ns() - begun)
        name = f"{name}, busy thread"
        rows.append(
            {"call": name, "ns": statistics.median(times), "ns_min": min(times), "ns_mean": statistics.fmean(times)}
        )
    over.set()
    thread.join()
    return rows


def door(batches: int) -> list[dict[str, Any]]:
    """Nanoseconds of a blocking all_reduce of 1 KiB in a world of one, at each storey of the Python side."""
    import torch
    from torch._C._distributed_c10d import FileStore

    import bagua.torch_api as api
    from bagua import group

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="bagua-bench-") as folder:
        api.init_process_group(FileStore(f"{folder}/ours", 1), 0, 1, 1)
        world = group.default(required=True)
        x = torch.ones(256)
        array, address, raw, total = x.numpy(), x.data_ptr(), world.communicator, api.ReduceOp.SUM
        storeys: dict[str, Callable[[], Any]] = {
            "nothing (the loop of this measurement)": lambda: None,
            "extension, barrier (a no-op collective)": raw.barrier,
            "extension, by address": lambda: raw.run(1, None, address, 256, 2, 0),
            "bagua, NumPy array": lambda: world.all_reduce(array),
            "torch_api, tensor": lambda: api.allreduce_inplace(x, total),
        }
        rows = []
        for name, call in storeys.items():
            times = []
            for _ in range(batches):
                begun = time.perf_counter_ns()
                for _ in range(200):
                    call()
                times.append((time.perf_counter_ns() - begun) / 200)
            rows.append({"call": name, "ns": statistics.median(times), "ns_min": min(times)})
        rows += beside_a_busy_thread({name: storeys[name] for name in list(storeys)[1:]})
        if not bool((x == 1).all()):
            raise AssertionError("a sum over one rank changed the tensor")
        api.destroy_process_group()
    return rows


def main() -> None:
    """Parses the command line, races, prints, keeps."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--verbs", nargs="+", choices=VERBS, default=list(VERBS))
    parser.add_argument("--sizes", nargs="+", type=parse_size, default=[parse_size(size) for size in SIZES])
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--every-size", action="store_true", help="all sizes for every verb, not only for all_reduce")
    parser.add_argument("--budget", type=float, default=3.0, help="seconds per case, roughly")
    parser.add_argument("--p10", action="store_true", help="also show the fastest tenth: less of other programs in it")
    parser.add_argument("--door", action="store_true", help="what a blocking verb costs in Python; nothing else")
    args = parser.parse_args()
    if args.child:
        child(json.loads(args.child))
        return
    if args.door:
        rows = door(10 if args.quick else 100)
        for row in rows:
            mean = f", mean {row['ns_mean']:.0f}" if "ns_mean" in row else ""
            print(f"{row['call']:<42}{row['ns']:>9.0f} ns (fastest {row['ns_min']:.0f}{mean})")
        keep_if_asked(args, "door", rows)
        return
    if args.quick:
        args.ranks, args.sizes, args.dtypes, args.budget = (
            args.ranks[:1],
            [1 << 10, 1 << 20],
            ["float32", "bfloat16"],
            0.05,
        )
    why = "it was left out" if args.no_mpi else openmpi_missing()
    if why:
        print(f"no column for openmpi: {why}")
    large = [16 << 20] if not args.quick else [1 << 20]
    cases = [
        (verb, dtype, size)
        for dtype in args.dtypes
        for verb in args.verbs
        for size in (args.sizes if verb == "all_reduce" or args.every_size else large)
    ]
    print(machine())
    rows = []
    for ranks in args.ranks:
        found, about = race(ranks, cases, args, not why)
        rows += found
        if about["without"]:
            print(f"no column for ours-arena: {about['without']}")
    show(rows)
    if args.p10:
        print("\nthe fastest tenth of the calls:")
        show(rows, "p10_seconds")
    for path in keep_if_asked(args, "collectives", rows):
        plot(rows, path)


if __name__ == "__main__":
    main()
