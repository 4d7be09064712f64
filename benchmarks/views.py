"""Time from the death of a rank to the next view of all others, and its cost, for 2, 8 and 64 ranks of one host.

    python benchmarks/views.py --csv out

Runs `cargo bench --bench view`, which says what is measured, and keeps its figures: medians over `--runs`
deaths. `detected` is when the last of the others noticed the death, `first` and `last` when they had a lane of the new
group; messages and bytes are those about the agreement, of all ranks; CPU is the processor time of all ranks.
"""

from __future__ import annotations

import argparse
import json
import subprocess
from pathlib import Path
from typing import Any

from common import HERE, add_output_options, machine, save_if_asked


def main() -> None:
    """Parses the command line, runs, prints, keeps."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_output_options(parser)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 8, 64])
    parser.add_argument("--runs", type=int, default=5, help="deaths for each number of ranks")
    parser.add_argument("--program", type=Path, help="the built bench, instead of cargo bench")
    args = parser.parse_args()
    if args.quick:
        args.ranks, args.runs = [2, 4], 1
    cargo = ["cargo", "bench", "--quiet", "-p", "bagua-bench", "--bench", "view", "--"]
    options = ["--json", "--runs", str(args.runs), "--ranks", *map(str, args.ranks)]
    command = [str(args.program)] if args.program else cargo
    done = subprocess.run([*command, *options], cwd=HERE.parent, stdout=subprocess.PIPE, text=True, check=True)
    rows: list[dict[str, Any]] = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    print(machine())
    print(f"{'ranks':>6}{'detect ms':>10}{'first ms':>10}{'last ms':>10}{'messages':>10}{'bytes':>10}{'CPU ms':>10}")
    for row in rows:
        times = "".join(f"{row[key] * 1e3:>10.1f}" for key in ("detected_s", "first_s", "last_s"))
        print(f"{row['ranks']:>6}{times}{row['messages']:>10}{row['bytes']:>10}{row['cpu_s'] * 1e3:>10.1f}")
    save_if_asked(args, "views", rows)


if __name__ == "__main__":
    main()
