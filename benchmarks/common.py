"""Parts shared by the benchmarks: starting ranks, a barrier, names of sizes, saving results.

A rank is the benchmark's own script, started again with `--child`. `rank_set.py` starts ranks that answer requests.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import json
import mmap
import os
import platform
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent
UNITS = {"GiB": 1 << 30, "MiB": 1 << 20, "KiB": 1 << 10, "B": 1}
#: One thread per rank: the threads of a numerical library would compete for the cores that the other ranks need. NumPy
#: asks for huge pages by default, torch's allocator does not; benchmarks measure memory as torch allocates it.
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "NUMPY_MADVISE_HUGEPAGE": "0"}
#: Variables that hold the number of a rank: set by OpenMPI, by MPICH and Intel MPI, and by us.
RANK_VARIABLES = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "RANK")


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


class Timed(NamedTuple):
    """One batch of one rank: when it began and ended, in seconds of the clock that all processes of a machine share,
    and the processor before and after it.
    """

    begun: float
    ended: float
    first: int
    last: int


class Barrier:
    """A barrier of the ranks that belongs to none of the contenders, so that it warms the caches of none.

    Every rank writes its count and the time of its arrival into a line of a mapped file, each on cache lines of its
    own, and looks at those of the others. The order of memory accesses relies on x86, or on the system calls between
    looks, which are memory barriers elsewhere.
    """

    LINE = 128
    #: Seconds between two looks, and from the last arrival until the ranks go on, by when all have looked.
    LOOK, START = 0.001, 0.004

    def __init__(self, folder: str, rank: int, ranks: int, limit: float = 300.0) -> None:
        self._rank, self._ranks, self._limit = rank, ranks, limit
        self._count = 0
        path = Path(folder, "barrier")
        with open(os.open(path, os.O_RDWR | os.O_CREAT, 0o600), "r+b") as file:
            # Every rank asks for the same length, so the order of the ranks does not matter.
            os.ftruncate(file.fileno(), self.LINE * (ranks + 1))
            self._words = mmap.mmap(file.fileno(), self.LINE * (ranks + 1))

    def wait(self) -> None:
        """Returns when all ranks have called this or :meth:`spin` as often as this one: all ranks at one time, and each
        from a sleep. A user's ranks sleep too; a kernel parts ranks that spin on one processor. TimeoutError names a
        missing rank.
        """
        last = self._arrive(lambda: time.sleep(self.LOOK))
        time.sleep(max(0.0, last + self.START - time.monotonic()))

    def spin(self) -> None:
        """Like :meth:`wait`, without a sleep. Yields the processor between checks, so that it also ends with more ranks
        than cores.
        """
        self._arrive(os.sched_yield)

    def _arrive(self, rest: Callable[[], object]) -> float:
        """The time of the last arrival, by the clock that all processes of a machine share."""
        self._count += 1
        words, count, begun = self._words, self._count, time.monotonic()
        # The time first: it is read when the count has come.
        struct.pack_into("d", words, self._rank * self.LINE + 8 + 8 * (count % 2), begun)
        struct.pack_into("q", words, self._rank * self.LINE, count)
        last = begun
        for peer in range(self._ranks):
            while struct.unpack_from("q", words, peer * self.LINE)[0] < count:
                rest()
                if time.monotonic() - begun > self._limit:
                    raise TimeoutError(f"rank {peer} did not reach barrier {count} within {self._limit} s")
            # Of this barrier: a peer can be one ahead, and writes the other word there.
            last = max(last, struct.unpack_from("d", words, peer * self.LINE + 8 + 8 * (count % 2))[0])
        return last

    def broadcast(self, value: float) -> float:
        """Rank 0's value, on every rank."""
        self.wait()
        if self._rank == 0:
            struct.pack_into("d", self._words, self._ranks * self.LINE, value)
        self.wait()
        return float(struct.unpack_from("d", self._words, self._ranks * self.LINE)[0])


def run_ranks(
    script: str,
    ranks: int,
    options: dict[str, Any],
    *,
    limit: float,
    env: dict[str, str] | None = None,
    through: Sequence[Sequence[str]] | None = None,
) -> list[dict[str, Any]]:
    """Starts `ranks` processes of `script`, waits for them, and returns the rows of :func:`write_row`.

    `through` is, for each rank, a command to start it with. RuntimeError when a rank failed or took longer than `limit`
    seconds; none is left running.
    """
    with tempfile.TemporaryDirectory(prefix="bagua-bench-") as folder:
        given = json.dumps({**options, "ranks": ranks, "folder": folder})
        command = [sys.executable, str(Path(script).resolve()), "--child", given]
        environment = {**os.environ, **ENVIRONMENT, **(env or {})}
        before = through or [()] * ranks
        started = [
            subprocess.Popen([*before[rank], *command], env={**environment, "RANK": str(rank)}) for rank in range(ranks)
        ]
        until = time.monotonic() + limit
        try:
            codes = [process.wait(max(0.0, until - time.monotonic())) for process in started]
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"the ranks were still running after {limit:.0f} s") from None
        finally:
            for process in started:
                if process.poll() is None:
                    process.terminate()
                    process.wait()
        if any(codes):
            raise RuntimeError(f"ranks ended with {codes}; their output is above")
        rows = Path(folder, "rows")
        return [json.loads(line) for line in rows.read_text().splitlines()] if rows.exists() else []


def this_rank() -> int:
    """The number of this rank, from the environment of its launcher."""
    return int(next((os.environ[name] for name in RANK_VARIABLES if name in os.environ), "0"))


def write_row(options: dict[str, Any], row: dict[str, Any]) -> None:
    """Passes a row to the process that started the ranks. For rank 0."""
    with open(Path(options["folder"], "rows"), "a", encoding="utf-8") as rows:
        rows.write(json.dumps(row) + "\n")


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which `share` (0 to 1) of the values lie."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def machine() -> str:
    """The processor and the number of its cores that this process may use."""
    model = next(
        (
            line.partition(":")[2].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if "model name" in line
        ),
        platform.machine(),
    )
    return f"{model}, {len(os.sched_getaffinity(0))} cores"


def commit(folder: Path = HERE) -> str:
    """The commit of the sources in a folder, with a mark when they were changed since."""
    command = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    shown = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    return shown.stdout.strip() or "unknown"


def refuse_extension_of_tests(sources: Path | None = None) -> None:
    """Ends the program where the extension is not optimized, because `make test` built it. `sources` is the directory
    that `bagua` is in; without it, the one that this program would import. `--quick` takes any extension. A child is
    not checked: the program that started it was.
    """
    if "--quick" in sys.argv or "--child" in sys.argv:
        return
    # Builds from before the constant are optimized. Other programs than ours may lack bagua.
    program = "import bagua.extension as it; print(it.__file__ if not getattr(it, 'IS_OPTIMIZED', True) else '')"
    env = os.environ | ({} if sources is None else {"PYTHONPATH": str(sources)})
    shown = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, check=False)
    if shown.stdout.strip():
        folder = Path(shown.stdout.strip()).parent
        sys.exit(f"{folder} has the extension for the tests, which is not optimized: make setup")


def save(name: str, rows: Sequence[dict[str, Any]], folder: Path) -> Path:
    """Writes rows as CSV, each with machine, date and commit. Returns the file, which did not exist before."""
    folder.mkdir(parents=True, exist_ok=True)
    origin = {"machine": machine(), "date": time.strftime("%Y-%m-%d"), "commit": commit()}
    stem = f"{name}-{origin['date']}-{origin['commit']}"
    names = itertools.chain([stem], (f"{stem}-{number}" for number in itertools.count(2)))
    path = next(path for path in (folder / f"{name}.csv" for name in names) if not path.exists())
    columns = list(dict.fromkeys(key for row in rows for key in row))
    with open(path, "w", newline="", encoding="utf-8") as file:
        table = csv.DictWriter(file, [*origin, *columns])
        table.writeheader()
        table.writerows({**origin, **row} for row in rows)
    return path


def pyplot(backend: str = "Agg") -> Any:
    """matplotlib's pyplot without a display; None, after a word about it, where matplotlib is not installed."""
    try:
        import matplotlib
    except ImportError:
        print("matplotlib is not installed (requirements/bench.in): no plot")
        return None
    matplotlib.use(backend)
    from matplotlib import pyplot as plt

    return plt


def add_rank_options(parser: argparse.ArgumentParser) -> None:
    """The options of every benchmark that starts ranks."""
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--limit", type=float, default=1800.0, help="seconds after which ranks are ended")
    add_output_options(parser)


def add_output_options(parser: argparse.ArgumentParser) -> None:
    """The options of every benchmark, which ends here where its extension is that for the tests."""
    refuse_extension_of_tests()
    parser.add_argument("--quick", action="store_true", help="run for a few seconds to test the benchmark itself")
    parser.add_argument("--record", action="store_true", help="save the figures in benchmarks/record/")
    parser.add_argument("--csv", type=Path, help="a folder for the figures as CSV, and for plots")


def save_if_asked(args: argparse.Namespace, name: str, rows: Sequence[dict[str, Any]]) -> list[Path]:
    """Writes the rows to the folders that the options name, and prints the names of the files."""
    folders = [HERE / "record"] * args.record + [args.csv] * (args.csv is not None)
    paths = [save(name, rows, folder) for folder in folders]
    for path in paths:
        print(f"written: {path}")
    return paths
