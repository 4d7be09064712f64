"""How time per operation and threads per rank grow with the number of ranks: 2, 8 and 32, more than there are cores.

    python benchmarks/growth.py
    python benchmarks/growth.py --ranks 2 8

Same race as collectives.py. With more ranks than cores a figure says what waiting costs: read the ratios, and how they
change from row to row. Threads are those that joining and a first all_reduce added to a rank.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from collectives import race, show
from common import add_options, keep_if_asked, machine, openmpi_missing, parse_size


def main() -> None:
    """Parses the command line, races, prints, keeps."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 8, 32])
    parser.add_argument("--sizes", nargs="+", type=parse_size, default=[1 << 10, 1 << 20])
    parser.add_argument("--budget", type=float, default=5.0, help="seconds per case, roughly")
    args = parser.parse_args()
    if args.quick:
        args.ranks, args.sizes, args.budget = args.ranks[:1], args.sizes[:1], 0.05
    why = "it was left out" if args.no_mpi else openmpi_missing()
    if why:
        print(f"no column for openmpi: {why}")
    print(machine())
    rows, threads = [], []
    for ranks in args.ranks:
        found, about = race(ranks, [("all_reduce", "float32", size) for size in args.sizes], args, not why)
        rows += [{**row, "threads": about["threads"][row["contender"]]} for row in found]
        threads.append(f"{ranks} ranks, threads added per rank: {about['threads']}")
    show(rows)
    print("\n".join(threads))
    keep_if_asked(args, Path(__file__).stem, rows)


if __name__ == "__main__":
    main()
