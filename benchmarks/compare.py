"""Compares two builds of Bagua in one run: all_reduce, verbs, training steps, hand-over to the communication thread.

    python benchmarks/compare.py BEFORE/python AFTER/python
    python benchmarks/compare.py BEFORE/python AFTER/python --only all_reduce step --rounds 100

BEFORE and AFTER are `python/` directories of two work trees, each with a built extension. Each build has its own rank
processes (rank_set.py), and both answer in one measurement: in every round each build has one turn, the order reversed
from round to round, while the ranks of the other build sleep. Within a round the figure of a build is the median of its
batches, and the ratio is that of AFTER to BEFORE: above 1, AFTER is slower. Processes of one and the same build differ
too, by the pages that they get, so they are started several times. The table has the median of the ratios of all
rounds, its 95 % confidence interval, and the lowest and highest median of one start. Compare a build with a copy of
itself to see the differences that this machine cannot resolve.

Every result is checked. The losses of both builds are compared at every step: bit for bit, and within 0.1 %.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from collectives import Shape, Way, copies_of, shape_of, timed_turn, turn
from common import add_output_options, commit, machine, refuse_extension_of_tests, save_if_asked, show_size
from contenders import OURS, VERBS
from rank_set import RankSet
from train import MODELS

SIZES = (1 << 10, 256 << 10, 1 << 20, 16 << 20)
VERB_SIZE = 1 << 20
PARTS = ("all_reduce", "verbs", "step", "handover")
#: The pause before a batch: short, because each case has thousands of batches.
WAY = Way(pause=0.005)
#: The tolerated slowdown.
TOLERANCE = 0.03
BUILDS = ("before", "after")
Take = Callable[[RankSet], float]


def collective(sets: Sequence[RankSet], verb: str, size: int) -> Iterator[tuple[str, Take]]:
    """A verb on ordinary tensors and in arenas."""
    copies = copies_of(size)
    for ranks in sets:
        ranks.ask("prepare", (verb, "float32", size), copies)
    for name in OURS:
        # One shape for both builds; finding it opens the connections of each.
        shape, *_ = [shape_of(ranks, name, copies, WAY) for ranks in sets]

        def take(ranks: RankSet, name: str = name, shape: Shape = shape) -> float:
            return statistics.median(batch.seconds for batch in timed_turn(ranks, name, shape, WAY))

        yield f"{verb} {show_size(size)} {name}", take


def cases(
    sets: Sequence[RankSet], parts: Sequence[str], sizes: Sequence[int], models: Sequence[str]
) -> Iterator[tuple[str, Take]]:
    """The name of each case and a function that makes one turn of it; a case is prepared when it is reached."""
    if "all_reduce" in parts:
        for size in sizes:
            yield from collective(sets, "all_reduce", size)
    if "verbs" in parts:
        for verb in VERBS[1:]:
            yield from collective(sets, verb, VERB_SIZE)
    if "step" in parts:
        for model in models:
            for ranks in sets:
                ranks.ask("prepare_step", model)
            yield f"step {model}", lambda ranks: turn(ranks, "ours", 1, 1, WAY)[0].seconds
            compare_losses(model, [ranks.ask("losses") for ranks in sets])
    if "handover" in parts:
        for ranks in sets:
            ranks.ask("prepare_handover")
        yield "handover", lambda ranks: statistics.median(batch.seconds for batch in turn(ranks, "ours", 1, 30, WAY))
        for ranks in sets:
            ranks.ask("end_handover")


def compare_losses(model: str, losses: list[list[list[float]]]) -> None:
    """AssertionError when the losses of the builds differ by more than rounding; prints it when they differ at all."""
    before, after = losses
    if before == after:
        return
    pairs = [pair for one, other in zip(before, after, strict=True) for pair in zip(one, other, strict=True)]
    worst = max(abs(a - b) / max(abs(a), 1e-6) for a, b in pairs)
    if not worst <= 1e-3:
        raise AssertionError(f"the losses of {model} differ between the builds, relatively by {worst:.2g}")
    print(f"the losses of {model} are not equal bit for bit; they differ relatively by up to {worst:.2g}")


def interval(values: Sequence[float]) -> tuple[float, float]:
    """The 95 % confidence interval of the median: n values lie below it in a binomial number, deviation sqrt(n) / 2."""
    ordered, n = sorted(values), len(values)
    low = max(0, int(n / 2 - 0.98 * n**0.5))
    return ordered[low], ordered[n - 1 - low]


def verdict(low: float, high: float, starts: Sequence[float]) -> str:
    """Says if the ratio is within the tolerance, above it in every start, or neither is certain."""
    if high <= 1 + TOLERANCE:
        return "faster" if high < 1 - TOLERANCE else "within 3 %"
    return "SLOWER" if min(low, *starts) > 1 + TOLERANCE else "undecided"


def main() -> None:
    """Parses the command line, measures, prints, saves."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path, help="a python/ directory with a built extension")
    parser.add_argument("after", type=Path, help="another one")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS), help="of the steps")
    parser.add_argument("--rounds", type=int, default=40, help="of each case and start")
    parser.add_argument("--starts", type=int, default=5, help="how often the processes are started")
    parser.add_argument("--pin", action="store_true", help="pin rank r of both builds to the r-th processor")
    parser.add_argument("--limit", type=float, default=3600.0, help="seconds after which ranks are ended")
    add_output_options(parser)
    args = parser.parse_args()
    sizes: Sequence[int] = SIZES
    models: Sequence[str] = args.models
    if args.quick:
        args.rounds, args.starts, sizes, models = 2, 1, SIZES[:1], MODELS[-1:]
    folders = {name: getattr(args, name).resolve() for name in BUILDS}
    for folder in folders.values():
        if not list(folder.glob("bagua/_bagua*.so")):
            parser.error(f"there is no built extension in {folder}/bagua")
        refuse_extension_of_tests(folder)
    print(machine())
    for name in BUILDS:
        print(f"{name}: {folders[name]}, commit {commit(folders[name])}")
    seconds: dict[str, dict[str, list[float]]] = {}
    for start in range(args.starts):
        with ExitStack() as stack:
            sets = {}
            for name in BUILDS if start % 2 == 0 else BUILDS[::-1]:
                env = {"PYTHONPATH": str(folders[name])}
                sets[name] = stack.enter_context(RankSet(name, args.ranks, sys.executable, env=env, limit=args.limit))
                for source in sets[name].ask("source"):
                    if folders[name] not in Path(source).parents:
                        raise SystemExit(f"{name}: imported {source}, which is not in {folders[name]}")
                if args.pin:
                    sets[name].ask("pin")
                for contender in OURS:
                    sets[name].ask("join", contender)
            order = list(BUILDS)
            for case, take in cases([sets[name] for name in BUILDS], args.only, sizes, models):
                found = seconds.setdefault(case, {name: [] for name in BUILDS})
                for _ in range(args.rounds):
                    order.reverse()
                    for name in order:
                        found[name].append(take(sets[name]))
    save_if_asked(args, "compare", show(seconds, args.rounds, {name: commit(folders[name]) for name in BUILDS}))


def show(seconds: dict[str, dict[str, list[float]]], rounds: int, commits: dict[str, str]) -> list[dict[str, Any]]:
    """Prints the table; returns its rows."""
    print(f"{'case':<34}{'before us':>11}{'after us':>11}{'ratio':>8}{'95 %':>16}{'starts':>16}  verdict")
    rows = []
    for case, found in seconds.items():
        ratios = [after / before for before, after in zip(found["before"], found["after"], strict=True)]
        us = {name: statistics.median(found[name]) * 1e6 for name in BUILDS}
        ratio, (low, high) = statistics.median(ratios), interval(ratios)
        starts = [statistics.median(ratios[first : first + rounds]) for first in range(0, len(ratios), rounds)]
        print(
            f"{case:<34}{us['before']:>11.2f}{us['after']:>11.2f}{ratio:>8.3f}{f'{low:.3f}-{high:.3f}':>16}"
            f"{f'{min(starts):.3f}-{max(starts):.3f}':>16}  {verdict(low, high, starts)}"
        )
        rows.append(
            {
                "case": case,
                **{f"{name}_commit": commits[name] for name in BUILDS},
                **{f"{name}_us": us[name] for name in BUILDS},
                "ratio": ratio,
                "low": low,
                "high": high,
                "lowest_start": min(starts),
                "highest_start": max(starts),
                "rounds": len(ratios),
            }
        )
    return rows


if __name__ == "__main__":
    main()
