"""Compares our collectives with torch's gloo, Intel MPI, MPICH and OpenMPI in one run, and checks every result.

    python benchmarks/collectives.py --csv out           # 2 and 4 ranks, every verb at 16 MiB, all_reduce at every
    size, every dtype
    python benchmarks/collectives.py --ranks 2 --verbs all_reduce --sizes 1KiB 1MiB --dtypes float32
    python benchmarks/collectives.py --placement         # on which processors two ranks run, and what that costs

Ours and gloo share one set of rank processes; each MPI has a set of its own (rank_set.py), because three MPIs cannot
live in one process. Every contender has one turn per round, and the order changes from round to round; the ranks of the
other sets sleep during a turn. A turn is up to ten timed batches, after two untimed ones where a batch is so short that
cold caches would count. A batch is one call, or up to 200 calls on small tensors, each on a tensor of its
own. Before each batch the ranks rewrite its buffers; before and after it they meet at a barrier that belongs to none of
the contenders. A call's time is that of its slowest rank; the figure is the median over batches. A ratio above 1 says
that ours is that many times faster.

No contender pins its ranks to processors; with --pin, rank r of every contender is pinned to the r-th processor.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import mpi
from common import add_output_options, machine, parse_size, percentile, pyplot, save_if_asked, show_size
from contenders import DTYPES, MPIS, OURS, VERBS
from rank_set import RankError, RankSet

SIZES = ("1KiB", "16KiB", "256KiB", "1MiB", "4MiB", "16MiB", "64MiB", "256MiB")
PEERS = ("gloo", *MPIS)
#: Below this many bytes several calls are timed together, because one is shorter than the skew of its start.
SMALL = 64 << 10
CALLS_TOGETHER = 200
#: Limit for the tensors of calls that are timed together, so that they stay in the caches.
BYTES_TOGETHER = 1 << 20
#: Seconds after which a batch need not be longer, and after which a turn needs no further batch.
LONG = 0.02
#: Limit for the timed batches of a turn, and the number of batches before them: at 256 KiB the first takes 2 to 4 times
#: as long as the third, because the caches hold the data of the contender before.
BATCHES, UNTIMED = 10, 2
#: all_reduce of float32 with 2 ranks: how many times faster than the best MPI ours should be, in ordinary tensors and
#: in arenas.
GOALS = {1 << 10: (1.0, 1.0), 256 << 10: (1.1, 2.5), 1 << 20: (1.2, 3.2), 16 << 20: (1.3, 3.5), 64 << 20: (3.0, 5.0)}
PLACEMENT_BATCHES = 48


class Batch(NamedTuple):
    """Seconds per call of the slowest rank, and the processor of each rank before and after the batch."""

    seconds: float
    processors: list[tuple[int, int]]

    def shared(self) -> bool:
        """Whether two ranks were on one processor before or after the batch."""
        return any(len(set(side)) < len(side) for side in zip(*self.processors, strict=True))


def turn(ranks: RankSet, name: str, calls: int, batches: int) -> list[Batch]:
    """Batches of a contender, one after the other."""
    by_rank = ranks.ask("time", name, calls, batches)
    return [
        Batch(max(seconds for seconds, _, _ in batch), [(first, last) for _, first, last in batch])
        for batch in zip(*by_rank, strict=True)
    ]


def copies_of(size: int) -> int:
    """Calls that are timed together, each on a copy of the buffers."""
    return min(CALLS_TOGETHER, BYTES_TOGETHER // size) if size < SMALL else 1


class Shape(NamedTuple):
    """The shape of a contender's turns on one case."""

    calls: int
    batches: int
    untimed: int


def shape_of(ranks: RankSet, name: str, copies: int) -> Shape:
    """Chooses the number of calls in a batch and of batches in a turn by the time of the first calls."""
    turn(ranks, name, 1, 1)  # opens connections
    seconds, _ = turn(ranks, name, min(5, copies), 1)[0]
    calls = max(1, min(copies, int(LONG / seconds)))
    batches = max(1, min(BATCHES, int(LONG / seconds / calls)))
    return Shape(calls, batches, UNTIMED if batches > 1 else 0)


def timed_turn(ranks: RankSet, name: str, shape: Shape) -> list[Batch]:
    """One turn of a contender, without its untimed batches."""
    return turn(ranks, name, shape.calls, shape.batches + shape.untimed)[shape.untimed :]


def measure(sets: Sequence[RankSet], case: tuple[str, str, int], budget: float) -> Iterator[dict[str, Any]]:
    """The row of each contender that has the case."""
    copies = copies_of(case[2])
    owners = {name: ranks for ranks in sets for name in ranks.ask("prepare", case, copies)[0]}
    shapes = {name: shape_of(ranks, name, copies) for name, ranks in owners.items()}
    begun = time.perf_counter()
    for name, ranks in owners.items():
        timed_turn(ranks, name, shapes[name])
    rounds = int(max(5, min(200, budget / (time.perf_counter() - begun))))
    batches: dict[str, list[Batch]] = {name: [] for name in owners}
    order = list(owners)
    for _ in range(rounds):
        # Each round begins with another contender: the one before influences where the kernel places ranks.
        order.append(order.pop(0))
        for name in order:
            batches[name] += timed_turn(owners[name], name, shapes[name])
    verb, dtype, size = case
    for name, found in batches.items():
        seconds = [batch.seconds for batch in found]
        yield {
            "ranks": sets[0].ranks,
            "verb": verb,
            "dtype": dtype,
            "bytes": size,
            "contender": name,
            "seconds": statistics.median(seconds),
            "p10_seconds": percentile(seconds, 0.1),
            "batches": len(seconds),
            "shared_processor": round(statistics.fmean(batch.shared() for batch in found), 2),
        }


@contextlib.contextmanager
def contenders(ranks: int, args: argparse.Namespace) -> Iterator[tuple[list[RankSet], dict[str, int]]]:
    """The sets of ranks, joined, and the threads that each contender added; prints why a contender is missing."""
    with contextlib.ExitStack() as stack:
        sets, threads = [], {}
        torch = [*OURS, *["gloo"] * ("gloo" in args.peers)]
        for name in ("torch", *(name for name in MPIS if name in args.peers)):
            try:
                if name == "torch":
                    started = RankSet(name, ranks, sys.executable, limit=args.limit)
                else:
                    started = mpi.start(name, ranks, args.limit, args.environments)
                stack.enter_context(started)
                if args.pin:
                    started.ask("pin")
                for contender in torch if name == "torch" else [name]:
                    threads[contender] = max(started.ask("join", contender))
            except RankError as error:
                if name == "torch":
                    raise
                print(f"no column for {name}: {error}", flush=True)
            else:
                sets.append(started)
        yield sets, threads


def grouped(rows: Sequence[dict[str, Any]]) -> dict[tuple[int, str, str, int], dict[str, Any]]:
    """Contenders' rows by case."""
    cases: dict[tuple[int, str, str, int], dict[str, Any]] = {}
    for row in rows:
        cases.setdefault((row["ranks"], row["verb"], row["dtype"], row["bytes"]), {})[row["contender"]] = row
    return cases


def best_mpi(by_name: dict[str, Any], statistic: str) -> str | None:
    """The fastest of the MPIs that have the case."""
    return min((name for name in MPIS if name in by_name), key=lambda name: by_name[name][statistic], default=None)


def show(rows: Sequence[dict[str, Any]], statistic: str = "seconds") -> None:
    """Prints the table of microseconds, the best MPI of each case, ratios, and the goals."""
    names = "".join(f"{name:>11}" for name in (*OURS, *PEERS))
    ratios = "".join(f"{peer + '/' + ours:>16}" for peer in ("gloo", "best") for ours in OURS)
    print(f"{'ranks':>5} {'verb':<15}{'dtype':<9}{'size':>7}{names}{'best MPI':>10}{ratios}")
    cases = grouped(rows)
    for (ranks, verb, dtype, size), by_name in cases.items():
        us = {name: row[statistic] * 1e6 for name, row in by_name.items()}
        best = best_mpi(by_name, statistic)
        cells = "".join(f"{us[name]:>11.1f}" if name in us else f"{'-':>11}" for name in (*OURS, *PEERS))
        cells += f"{best or '-':>10}"
        for peer in ("gloo", best):
            cells += "".join(f"{us[peer] / us[o]:>16.2f}" if peer in us and o in us else f"{'-':>16}" for o in OURS)
        print(f"{ranks:>5} {verb:<15}{dtype:<9}{show_size(size):>7}{cells}")
    for (ranks, verb, dtype, size), by_name in cases.items():
        full = cases.get((ranks, verb, "float32", size))
        if dtype != "float32" and full is not None:
            for name in OURS:
                ratio = by_name[name][statistic] / full[name][statistic]
                print(f"{ranks} ranks, {verb} of {show_size(size)}, {name}: {dtype} takes {ratio:.2f}x float32")
    for size, goals in GOALS.items():
        by_name = cases.get((2, "all_reduce", "float32", size), {})
        best = best_mpi(by_name, statistic)
        for name, goal in zip(OURS, goals, strict=True):
            if best and name in by_name:
                ratio = by_name[best][statistic] / by_name[name][statistic]
                verdict = "reached" if ratio >= goal else "missed"
                print(f"goal {verdict}: {show_size(size)}, {name} {ratio:.2f} times {best}, at least {goal}")
    for row in rows:
        if row["shared_processor"] > 0.05 and row["ranks"] <= len(os.sched_getaffinity(0)):
            case = f"{row['verb']} of {show_size(row['bytes'])} of {row['dtype']}"
            print(
                f"{row['contender']}, {case}: two ranks shared a processor in {row['shared_processor']:.0%} of batches"
            )


def plot(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """A log-log plot of all_reduce of float32, beside the CSV."""
    if (plt := pyplot()) is None:
        return

    rows = [row for row in rows if (row["verb"], row["dtype"]) == ("all_reduce", "float32")]
    worlds = sorted({row["ranks"] for row in rows})
    if not worlds:
        return
    figure, axes = plt.subplots(1, len(worlds), figsize=(6 * len(worlds), 4.5), squeeze=False)
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
    plt.close(figure)


def placement_row(name: str, number: int, batch: Batch) -> dict[str, Any]:
    """Prints one batch of :func:`placement`; returns its row."""
    where = ", ".join(
        f"rank {rank} on {first}" + (f" then {last}" if last != first else "")
        for rank, (first, last) in enumerate(batch.processors)
    )
    us = batch.seconds * 1e6
    print(f"{name:<11} batch {number:>2}: {us:>8.2f} us per call, {where}")
    return {"contender": name, "batch": number, "us": us, "processors": where, "shared_processor": int(batch.shared())}


def placement(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Two ranks call all_reduce of 1 KiB in batches of 200. The ranks sleep between batches: the kernel chooses their
    processors when it wakes them.
    """
    rows = []
    with contenders(2, args) as (sets, _):
        for ranks in sets:
            for name in ranks.ask("prepare", ("all_reduce", "float32", 1 << 10), CALLS_TOGETHER)[0]:
                turn(ranks, name, CALLS_TOGETHER, 1)
                found = [turn(ranks, name, CALLS_TOGETHER, 1)[0] for _ in range(args.batches)]
                rows += [placement_row(name, number, batch) for number, batch in enumerate(found)]
                us = [batch.seconds * 1e6 for batch in found]
                print(
                    f"{name}: best {min(us):.2f}, median {statistics.median(us):.2f}, worst {max(us):.2f} us,"
                    f" worst/best {max(us) / min(us):.1f} (goal on an idle machine: 3); of {len(us)} batches"
                    f" {sum(each > 3 * min(us) for each in us)} took more than 3 times the best, and"
                    f" {sum(batch.shared() for batch in found)} had both ranks on one processor"
                )
    return rows


def options(description: str | None) -> argparse.ArgumentParser:
    """The options of this benchmark and of growth.py."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_output_options(parser)
    parser.add_argument(
        "--peers", nargs="*", choices=PEERS, help="contenders beside ours: all, or none with --placement"
    )
    parser.add_argument("--environments", type=Path, default=mpi.ENVIRONMENTS, help="the folder of .venv-mpi-NAME")
    parser.add_argument("--pin", action="store_true", help="pin rank r of every contender to the r-th processor")
    parser.add_argument("--limit", type=float, default=3600.0, help="seconds after which ranks are ended")
    return parser


def main() -> None:
    """Parses the command line, measures, prints, saves."""
    parser = options(__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--verbs", nargs="+", choices=VERBS, default=list(VERBS))
    parser.add_argument("--sizes", nargs="+", type=parse_size, default=[parse_size(size) for size in SIZES])
    parser.add_argument("--dtypes", nargs="+", choices=list(DTYPES), default=list(DTYPES))
    parser.add_argument("--every-size", action="store_true", help="all sizes for every verb, not only for all_reduce")
    parser.add_argument("--budget", type=float, default=6.0, help="seconds per case, roughly")
    parser.add_argument(
        "--p10", action="store_true", help="also print the fastest tenth, which other programs disturb least"
    )
    parser.add_argument("--placement", action="store_true", help="only batches of small calls, with their processors")
    parser.add_argument("--batches", type=int, default=PLACEMENT_BATCHES, help="of --placement")
    args = parser.parse_args()
    if args.quick:
        args.ranks, args.sizes, args.dtypes, args.budget = (
            args.ranks[:1],
            [1 << 10, 1 << 20],
            ["float32", "bfloat16"],
            0.05,
        )
        args.batches = 4
    if args.peers is None:
        args.peers = [] if args.placement else list(PEERS)
    print(f"{machine()}, ranks pinned to processors: {'yes' if args.pin else 'no'}")
    if args.placement:
        save_if_asked(args, "placement", placement(args))
        return
    large = [16 << 20] if not args.quick else [1 << 20]
    cases = [
        (verb, dtype, size)
        for dtype in args.dtypes
        for verb in args.verbs
        for size in (args.sizes if verb == "all_reduce" or args.every_size else large)
    ]
    rows: list[dict[str, Any]] = []
    for ranks in args.ranks:
        with contenders(ranks, args) as (sets, _):
            for case in cases:
                rows += measure(sets, case, args.budget)
    show(rows)
    if args.p10:
        print("\nthe fastest tenth of the batches:")
        show(rows, "p10_seconds")
    for path in save_if_asked(args, "collectives", rows):
        plot(rows, path)


if __name__ == "__main__":
    main()
