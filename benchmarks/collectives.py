"""Compares our collectives with gloo, DeepSpeed, Intel MPI, MPICH and OpenMPI in one run, and checks every result.

    python benchmarks/collectives.py --csv out           # 2 and 4 ranks, every verb at 16 MiB, all_reduce at every
    size, every dtype
    python benchmarks/collectives.py --ranks 2 --verbs all_reduce --sizes 1KiB 1MiB --dtypes float32
    python benchmarks/collectives.py --placement         # batch by batch: the processors of the ranks, slow batches

Every contender runs as users start it: torchrun starts the ranks of ours and gloo, which have imported torch, and each
MPI's `mpiexec` starts its own (rank_set.py: one process cannot load three MPIs). No contender pins its ranks; with
--pin, rank r of every contender is pinned to the r-th processor. Every contender has one turn per round, and the order
changes from round to round; the ranks of the other sets sleep during a turn. A turn is up to ten timed batches, after
two untimed ones where a batch is so short that cold caches would count. A batch is one call, or up to 200 calls on
small tensors, each on a tensor of its own. Before each batch the ranks rewrite its buffers and sleep for --pause
seconds, so the kernel chooses their processors. A batch lasts from the moment when the last rank begins it until the
last rank ends it; the figure is the median over batches. A ratio above 1 says that ours is that many times faster.

With --barrier the ranks do not sleep: they meet at a barrier that spins and belongs to none of the contenders. A kernel
parts ranks that spin on one processor, so this is the time of ranks that are bound to processors.
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

import environments
from common import Timed, add_output_options, machine, parse_size, percentile, pyplot, save_if_asked, show_size
from contenders import DTYPES, MPIS, OURS, OURS_IN_TORCH, VERBS
from rank_set import RankError, RankSet

SIZES = ("1KiB", "16KiB", "256KiB", "1MiB", "4MiB", "16MiB", "64MiB", "256MiB")
PEERS = (OURS_IN_TORCH, "gloo", "deepspeed", *MPIS)
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
PLACEMENT_BATCHES, PLACEMENT_SIZES = 40, ("1KiB", "256KiB", "1MiB")
#: Seconds of sleep before each batch, as between the steps of a program that computes or reads in between.
PAUSE = 0.05


class Batch(NamedTuple):
    """Seconds per call of the slowest rank, and the processor of each rank before and after the batch."""

    seconds: float
    processors: list[tuple[int, int]]

    def shared(self) -> bool:
        """Returns True if two ranks shared a processor before or after the batch while another processor was free."""
        processors = len(os.sched_getaffinity(0))
        return any(len(set(side)) < min(len(side), processors) for side in zip(*self.processors, strict=True))


class Way(NamedTuple):
    """The behaviour of the ranks between two batches."""

    #: Seconds of sleep; None: they meet at a barrier that spins.
    pause: float | None = PAUSE
    #: A contender of the same processes that makes a call before each pause.
    beside: str | None = None


def turn(ranks: RankSet, name: str, calls: int, batches: int, way: Way) -> list[Batch]:
    """Batches of a contender, one after the other."""
    by_rank: list[list[Timed]] = ranks.ask("time", name, calls, batches, *way)
    return [
        Batch(
            (max(rank.ended for rank in batch) - max(rank.begun for rank in batch)) / calls,
            [(rank.first, rank.last) for rank in batch],
        )
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


def shape_of(ranks: RankSet, name: str, copies: int, way: Way) -> Shape:
    """Chooses the number of calls in a batch and of batches in a turn by the time of the first calls."""
    turn(ranks, name, 1, 1, way)  # opens connections
    seconds, _ = turn(ranks, name, min(5, copies), 1, way)[0]
    calls = max(1, min(copies, int(LONG / seconds)))
    batches = max(1, min(BATCHES, int(LONG / seconds / calls)))
    return Shape(calls, batches, UNTIMED if batches > 1 else 0)


def timed_turn(ranks: RankSet, name: str, shape: Shape, way: Way) -> list[Batch]:
    """One turn of a contender, without its untimed batches."""
    return turn(ranks, name, shape.calls, shape.batches + shape.untimed, way)[shape.untimed :]


def measure(sets: Sequence[RankSet], case: tuple[str, str, int], budget: float, way: Way) -> Iterator[dict[str, Any]]:
    """The row of each contender that has the case."""
    copies = copies_of(case[2])
    owners = {name: ranks for ranks in sets for name in ranks.ask("prepare", case, copies)[0]}
    shapes = {name: shape_of(ranks, name, copies, way) for name, ranks in owners.items()}
    begun = time.perf_counter()
    for name, ranks in owners.items():
        timed_turn(ranks, name, shapes[name], way)
    rounds = int(max(5, min(200, budget / (time.perf_counter() - begun))))
    turns: dict[str, list[list[Batch]]] = {name: [] for name in owners}
    order = list(owners)
    for _ in range(rounds):
        # Each round begins with another contender: the one before influences where the kernel places ranks.
        order.append(order.pop(0))
        for name in order:
            turns[name].append(timed_turn(owners[name], name, shapes[name], way))
    medians = {
        name: [statistics.median(batch.seconds for batch in one) for one in found] for name, found in turns.items()
    }
    verb, dtype, size = case
    for name, by_round in turns.items():
        found = [batch for one in by_round for batch in one]
        seconds = [batch.seconds for batch in found]
        rounds_with_deepspeed = zip(medians.get("deepspeed", ()), medians[name], strict=False)
        yield {
            "ranks": sets[0].ranks,
            "verb": verb,
            "dtype": dtype,
            "bytes": size,
            "contender": name,
            "seconds": statistics.median(seconds),
            "p10_seconds": percentile(seconds, 0.1),
            "batches": len(seconds),
            "slow": slow(seconds, min(seconds)),
            "shared_processor": round(statistics.fmean(batch.shared() for batch in found), 2),
            "deepspeed_ratio": statistics.median([theirs / own for theirs, own in rounds_with_deepspeed] or [0.0]),
        }


@contextlib.contextmanager
def contenders(ranks: int, args: argparse.Namespace) -> Iterator[tuple[list[RankSet], dict[str, int]]]:
    """The sets of ranks, joined, and the threads that each contender added; prints why a contender is missing."""
    with contextlib.ExitStack() as stack:
        sets, threads = [], {}
        torch = [*OURS, *(name for name in (OURS_IN_TORCH, "gloo") if name in args.peers)]
        for name in ("torch", *(name for name in args.peers if name not in torch)):
            try:
                if name == "torch":
                    started = RankSet(name, ranks, sys.executable, limit=args.limit)
                else:
                    started = environments.start(name, ranks, args.limit, args.environments)
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
    for (ranks, verb, dtype, size), by_name in cases.items():
        for name in (*OURS, OURS_IN_TORCH):
            if name in by_name and "deepspeed" in by_name:
                ratio = by_name[name]["deepspeed_ratio"]
                case = f"{ranks} ranks, {verb} of {show_size(size)} of {dtype}"
                print(f"{case}: {name} is {ratio:.2f} times as fast as DeepSpeed (median over the rounds)")
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


def slow(values: Sequence[float], best: float) -> int:
    """How many of the values are above 3 times the best one."""
    return sum(value > 3 * best for value in values)


def placement_row(name: str, case: dict[str, Any], number: int, batch: Batch) -> dict[str, Any]:
    """Prints one batch of :func:`placement`; returns its row."""
    where = ", ".join(
        f"rank {rank} on {first}" + (f" then {last}" if last != first else "")
        for rank, (first, last) in enumerate(batch.processors)
    )
    us = batch.seconds * 1e6
    print(f"{name:<11} batch {number:>2}: {us:>8.2f} us per call, {where}")
    row = {"batch": number, "us": us, "processors": where, "shared_processor": int(batch.shared())}
    return {**case, "contender": name, **row}


def placement(ranks: int, sizes: Sequence[int], args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Batches of up to 200 calls of all_reduce, one contender after the other, with the processor of each rank.

    After ours, `with gloo`: in the same processes, gloo makes a call before each pause. The best batch is the fastest
    of these batches and of some further ones with the ranks pinned: in a bad placement all batches may be slow.
    """
    summaries = []
    with contenders(ranks, args) as (sets, _):
        for size in sizes:
            calls, case = copies_of(size), {"ranks": ranks, "bytes": size}
            for owner in sets:
                names: list[str] = owner.ask("prepare", ("all_reduce", "float32", size), calls)[0]
                beside = [(name, "gloo") for name in names if name in OURS and "gloo" in names]
                for name, other in [*((name, None) for name in names), *beside]:
                    way = Way(args.pause, other)
                    found = turn(owner, name, calls, args.batches + 1, way)[1:]
                    owner.ask("pin")
                    bound = [batch.seconds for batch in turn(owner, name, calls, args.batches // 4 + 1, way)[1:]]
                    owner.ask("unpin")
                    shown = f"{name} with gloo" if other else name
                    yield from (placement_row(shown, case, number, batch) for number, batch in enumerate(found))
                    us = [batch.seconds * 1e6 for batch in found]
                    best = min(*us, *(seconds * 1e6 for seconds in bound))
                    summaries.append(
                        f"{ranks} ranks, {show_size(size)}, {shown:<20} best {best:>8.2f}, median"
                        f" {statistics.median(us):>8.2f}, worst {max(us):>8.2f} us ({max(us) / best:>5.1f} times the"
                        f" best); of {len(us)} batches {slow(us, best)} took more than 3 times the best, and"
                        f" {sum(batch.shared() for batch in found)} had ranks on one processor beside a free one"
                    )
    print("\n".join(summaries), flush=True)


def options(description: str | None) -> argparse.ArgumentParser:
    """The options of this benchmark and of growth.py."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_output_options(parser)
    parser.add_argument("--peers", nargs="*", choices=PEERS, default=list(PEERS), help="contenders beside ours")
    parser.add_argument("--pause", type=float, default=PAUSE, help="seconds of sleep before each batch")
    parser.add_argument(
        "--barrier", dest="pause", action="store_const", const=None, help="a barrier that spins in place of the pause"
    )
    parser.add_argument(
        "--environments", type=Path, default=environments.ENVIRONMENTS, help="the folder of .venv-mpi-NAME"
    )
    parser.add_argument("--pin", action="store_true", help="pin rank r of every contender to the r-th processor")
    parser.add_argument("--limit", type=float, default=3600.0, help="seconds after which ranks are ended")
    return parser


def main() -> None:
    """Parses the command line, measures, prints, saves."""
    parser = options(__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--verbs", nargs="+", choices=VERBS, default=list(VERBS))
    parser.add_argument("--sizes", nargs="+", type=parse_size)
    parser.add_argument("--dtypes", nargs="+", choices=list(DTYPES), default=list(DTYPES))
    parser.add_argument("--every-size", action="store_true", help="all sizes for every verb, not only for all_reduce")
    parser.add_argument("--budget", type=float, default=6.0, help="seconds per case, roughly")
    parser.add_argument(
        "--p10", action="store_true", help="also print the fastest tenth, which other programs disturb least"
    )
    parser.add_argument("--placement", action="store_true", help="only all_reduce of float32, batch by batch")
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
    before = "at a barrier that spins" if args.pause is None else f"after {args.pause} s of sleep"
    print(f"{machine()}, ranks pinned to processors: {'yes' if args.pin else 'no'}; each batch begins {before}")
    if args.placement:
        sizes = args.sizes or [parse_size(size) for size in PLACEMENT_SIZES]
        save_if_asked(args, "placement", [row for ranks in args.ranks for row in placement(ranks, sizes, args)])
        return
    args.sizes = args.sizes or [parse_size(size) for size in SIZES]
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
                rows += measure(sets, case, args.budget, Way(args.pause))
    show(rows)
    if args.p10:
        print("\nthe fastest tenth of the batches:")
        show(rows, "p10_seconds")
    for path in save_if_asked(args, "collectives", rows):
        plot(rows, path)


if __name__ == "__main__":
    main()
