"""Measures time per all_reduce and threads per rank with 2, 8 and 32 ranks, more than there are cores.

    python benchmarks/growth.py
    python benchmarks/growth.py --ranks 2 8

The measurement is that of collectives.py. With more ranks than cores a figure shows the cost of waiting: read the
ratios, and their change from row to row. Threads are those that joining and a first all_reduce add to a rank.
"""

from __future__ import annotations

from pathlib import Path

from collectives import Way, contenders, measure, options, show
from common import machine, parse_size, save_if_asked


def main() -> None:
    """Parses the command line, measures, prints, saves."""
    parser = options(__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 8, 32])
    parser.add_argument("--sizes", nargs="+", type=parse_size, default=[1 << 10, 1 << 20])
    parser.add_argument("--budget", type=float, default=5.0, help="seconds per case, roughly")
    args = parser.parse_args()
    if args.quick:
        args.ranks, args.sizes, args.budget = args.ranks[:1], args.sizes[:1], 0.05
    print(machine())
    rows, shown = [], []
    for ranks in args.ranks:
        with contenders(ranks, args) as (sets, threads):
            for size in args.sizes:
                found = measure(sets, ("all_reduce", "float32", size), args.budget, Way(args.pause))
                rows += [{**row, "threads": threads[row["contender"]]} for row in found]
        shown.append(f"{ranks} ranks, threads added per rank: {threads}")
    show(rows)
    print("\n".join(shown))
    save_if_asked(args, Path(__file__).stem, rows)


if __name__ == "__main__":
    main()
