"""What the benchmarks share: starting ranks, meeting before a timed call, naming sizes, keeping results.

A rank is the benchmark's own script, started again with `--child`. With OpenMPI it is `mpirun` that starts the ranks,
because only then OpenMPI can take part; without, they are started directly.
"""

from __future__ import annotations

import argparse
import csv
import importlib.util
import itertools
import json
import mmap
import os
import platform
import shutil
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
UNITS = {"GiB": 1 << 30, "MiB": 1 << 20, "KiB": 1 << 10, "B": 1}


def parse_size(text: str) -> int:
    """Turns "16MiB" into bytes."""
    for unit, factor in UNITS.items():
        if text.endswith(unit):
            return int(float(text.removesuffix(unit)) * factor)
    return int(text)


def show_size(size: int) -> str:
    """Turns bytes into "16MiB"."""
    unit = next((unit for unit, factor in UNITS.items() if size >= factor), "B")
    return f"{size / UNITS[unit]:g}{unit}"


class Meeting:
    """A barrier of the ranks that none of the contenders provides, so that none of them is warm or late because of it.

    Every rank counts in a word of its own of a mapped file, on a cache line of its own, and looks at the others' until
    they have come as far. Between looks it lets others run, so that it also ends with more ranks than cores. Ordering
    relies on x86 or on the system call between looks, which is a barrier elsewhere.
    """

    LINE = 128

    def __init__(self, folder: str, rank: int, ranks: int, limit: float = 300.0) -> None:
        self._rank, self._ranks, self._limit = rank, ranks, limit
        self._count = 0
        path = Path(folder, "meeting")
        with open(os.open(path, os.O_RDWR | os.O_CREAT, 0o600), "r+b") as file:
            # Every rank asks for the same length, so it does not matter who is first.
            os.ftruncate(file.fileno(), self.LINE * (ranks + 1))
            self._words = mmap.mmap(file.fileno(), self.LINE * (ranks + 1))

    def wait(self) -> None:
        """Returns when all ranks have called it as often as this one. TimeoutError when one does not come."""
        self._count += 1
        words, count = self._words, self._count
        struct.pack_into("q", words, self._rank * self.LINE, count)
        looks = 0
        begun = time.monotonic()
        for peer in range(self._ranks):
            while struct.unpack_from("q", words, peer * self.LINE)[0] < count:
                looks += 1
                if looks % 8 == 0:
                    os.sched_yield()
                if looks % 4096 == 0 and time.monotonic() - begun > self._limit:
                    raise TimeoutError(f"rank {peer} did not come to meeting {count} within {self._limit} s")

    def tell(self, value: float) -> float:
        """Rank 0's value, on every rank."""
        self.wait()
        if self._rank == 0:
            struct.pack_into("d", self._words, self._ranks * self.LINE, value)
        self.wait()
        return float(struct.unpack_from("d", self._words, self._ranks * self.LINE)[0])


def openmpi_missing() -> str:
    """Why OpenMPI cannot take part; empty when it can."""
    if shutil.which("mpirun") is None:
        return "mpirun is not installed (Debian: openmpi-bin)"
    if importlib.util.find_spec("mpi4py") is None:
        return "mpi4py is not installed (requirements/bench.in)"
    return ""


def run_ranks(
    script: str,
    ranks: int,
    options: dict[str, Any],
    *,
    mpi: bool,
    limit: float,
    env: dict[str, str] | None = None,
    through: Sequence[Sequence[str]] | None = None,
) -> list[dict[str, Any]]:
    """Starts `ranks` processes of `script`, waits for them, and returns the rows of :func:`write_row`.

    `through` is, for each rank, a command to start it with. RuntimeError when a rank failed or took longer than `limit`
    seconds; none is left running.
    """
    with tempfile.TemporaryDirectory(prefix="bagua-bench-") as folder:
        given = json.dumps({**options, "ranks": ranks, "folder": folder, "mpi": mpi})
        command = [sys.executable, str(Path(script).resolve()), "--child", given]
        # One thread per rank: a numerical library's threads would fight for the cores that the other ranks need.
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", **(env or {})}
        if mpi:
            launcher = ["mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-n", str(ranks)]
            started = [subprocess.Popen([*launcher, *command], env=environment)]
        else:
            before = through or [()] * ranks
            started = [
                subprocess.Popen([*before[rank], *command], env={**environment, "RANK": str(rank)})
                for rank in range(ranks)
            ]
        until = time.monotonic() + limit
        try:
            codes = [process.wait(max(0.0, until - time.monotonic())) for process in started]
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"the ranks were still running after {limit:.0f} s") from None
        finally:
            for process in started:
                if process.poll() is None:
                    # mpirun takes its ranks with it when it is asked to end.
                    process.terminate()
                    process.wait()
        if any(codes):
            raise RuntimeError(f"ranks ended with {codes}; what they printed is above")
        rows = Path(folder, "rows")
        return [json.loads(line) for line in rows.read_text().splitlines()] if rows.exists() else []


def this_rank() -> int:
    """The number of this rank, as whoever started it says."""
    return int(os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("RANK", "0")))


def write_row(options: dict[str, Any], row: dict[str, Any]) -> None:
    """Hands a row to the process that started the ranks. For rank 0."""
    with open(Path(options["folder"], "rows"), "a", encoding="utf-8") as rows:
        rows.write(json.dumps(row) + "\n")


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which `share` (0 to 1) of the values lie."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def machine() -> str:
    """The processor and the number of its cores that may be used here."""
    model = next(
        (
            line.partition(":")[2].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if "model name" in line
        ),
        platform.machine(),
    )
    return f"{model}, {len(os.sched_getaffinity(0))} cores"


def commit() -> str:
    """The commit of the sources, with a mark when they were changed since."""
    shown = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--exclude=*"], cwd=HERE, capture_output=True, text=True, check=False
    )
    return shown.stdout.strip() or "unknown"


def keep(name: str, rows: Sequence[dict[str, Any]], folder: Path) -> Path:
    """Writes rows as CSV, each with machine, date and commit. Returns the file, which did not exist before."""
    folder.mkdir(parents=True, exist_ok=True)
    where = {"machine": machine(), "date": time.strftime("%Y-%m-%d"), "commit": commit()}
    stem = f"{name}-{where['date']}-{where['commit']}"
    names = itertools.chain([stem], (f"{stem}-{number}" for number in itertools.count(2)))
    path = next(path for path in (folder / f"{name}.csv" for name in names) if not path.exists())
    columns = list(dict.fromkeys(key for row in rows for key in row))
    with open(path, "w", newline="", encoding="utf-8") as file:
        table = csv.DictWriter(file, [*where, *columns])
        table.writeheader()
        table.writerows({**where, **row} for row in rows)
    return path


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options that every benchmark of ranks has."""
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--no-mpi", action="store_true", help="leave OpenMPI out although it is installed")
    parser.add_argument("--limit", type=float, default=1800.0, help="seconds after which ranks are ended")
    add_record_options(parser)


def add_record_options(parser: argparse.ArgumentParser) -> None:
    """The options that every benchmark has."""
    parser.add_argument("--quick", action="store_true", help="a few seconds, to see that it works; no figures to quote")
    parser.add_argument("--record", action="store_true", help="keep the figures in benchmarks/record/")
    parser.add_argument("--csv", type=Path, help="a folder for the figures as CSV, and for plots")


def keep_if_asked(args: argparse.Namespace, name: str, rows: Sequence[dict[str, Any]]) -> list[Path]:
    """Writes the rows where the options say, and names the files."""
    folders = [HERE / "record"] * args.record + [args.csv] * (args.csv is not None)
    paths = [keep(name, rows, folder) for folder in folders]
    for path in paths:
        print(f"written: {path}")
    return paths
