"""The commands, as programs: what all have in common, `bagua bench` and `top`. `bagua doctor` is in test_doctor.py."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

import bagua
from bagua import extension
from bagua.cli import main
from bagua.commands import bench, top
from tests.cases import slow_but
from tests.world import free_port

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 120.0


needs_client = pytest.mark.skipif(
    importlib.util.find_spec("prometheus_client") is None, reason="prometheus_client is not installed: make setup"
)


def environment(**variables: str) -> dict[str, str]:
    """The test's own without what a launcher or a user would set."""
    ours = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "BAGUA_", "SLURM_", "OMPI_", "PMI_", "TORCHELASTIC_", "COLUMNS")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    return kept | variables


def command(
    *arguments: str, limit: Callable[[], None] | None = None, inside: Sequence[str] = (), **variables: str
) -> subprocess.CompletedProcess[str]:
    """Runs a command of Bagua. ``inside``: the command that starts it, as :func:`ipv6_alone` returns it."""
    return subprocess.run(
        [*inside, sys.executable, "-m", "bagua", *arguments],
        env=environment(**variables),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        preexec_fn=limit,
        check=False,
    )


def ipv6_alone() -> list[str]:
    """The command that runs another one where the only address is ::1. Skips the test if this user may not do so."""
    loopback = (
        'ip link set lo up && ip address del 127.0.0.1/8 dev lo && ip address show dev lo | grep -q ::1 && exec "$@"'
    )
    run = ["unshare", "--user", "--map-root-user", "--net", "sh", "-c", loopback, "sh"]
    if shutil.which("ip") is None or subprocess.run([*run, "true"], capture_output=True, check=False).returncode != 0:
        pytest.skip("this user may not make network namespaces with IPv6 here")
    return run


@pytest.mark.parametrize("option", ["--version", pytest.param("-V", marks=pytest.mark.slow)])
def test_the_version_is_shown(option: str) -> None:
    ended = command(option)
    assert (ended.returncode, ended.stdout) == (0, f"bagua {bagua.__version__}\n")


@pytest.mark.parametrize(
    "arguments",
    slow_but([(), ("doctor", "--jsn")], [(), ("trace",), ("doctor", "--jsn"), ("bench", "--ranks", "two")]),
    ids=str,
)
def test_a_command_line_that_cannot_be_used_is_answered_by_help_or_by_one_line(arguments: tuple[str, ...]) -> None:
    ended = command(*arguments)
    assert (ended.returncode, ended.stdout) == (2, "")
    if arguments:
        assert re.fullmatch(r"bagua[a-z ]*: .*; see bagua[a-z ]* --help\n", ended.stderr)
    else:
        assert "doctor" in ended.stderr
        assert "example: bagua doctor" in ended.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["docter"], "bagua: argument COMMAND: invalid choice: 'docter'; did you mean 'doctor'?; see bagua --help\n"),
        (["trace", "merg"], "did you mean 'merge'?"),
        (["zzz"], "invalid choice: 'zzz' (choose from "),
    ],
)
def test_a_misspelt_command_is_answered_by_the_nearest(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("modules", [("rich", "prometheus_client", "torch")], ids=str)
def test_commands_need_no_optional_package(modules: tuple[str, ...], tmp_path: Path) -> None:
    for module in modules:
        (tmp_path / f"{module}.py").write_text(f"raise ImportError('no {module} here')")
    path = os.pathsep.join([str(tmp_path), str(Path(bagua.__file__).parents[1])])
    ended = command("doctor", "--no-trial", PYTHONPATH=path)
    assert (ended.returncode, ended.stderr) == (0, "")
    ended = command("top", "--once", "127.0.0.1:1", PYTHONPATH=path)
    assert (ended.returncode, ended.stderr) == (1, "")
    assert re.search(r"127.0.0.1:1 +does not answer: ", ended.stdout)


# --- bench ------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_bench_prints_checked_figures_of_ranks_that_it_starts() -> None:
    pytest.importorskip("torch", reason="torch is not installed: make setup")
    ended = command("bench", "--ranks", "2", "--sizes", "4K,1MiB", "--json")
    assert ended.returncode == 0, ended.stderr
    figures = json.loads(ended.stdout)
    assert (figures["ranks"], figures["collective"]) == (2, "shm")
    assert figures["optimized"] is extension.IS_OPTIMIZED
    assert [row["bytes"] for row in figures["all_reduce"]] == [4096, 1 << 20]
    for row in figures["all_reduce"]:
        assert set(row) == {"bytes", "seconds", "gb_per_s", "gloo_seconds", "ratio"}
        assert row["ratio"] == pytest.approx(row["gloo_seconds"] / row["seconds"])
        assert row["gb_per_s"] == pytest.approx(row["bytes"] / row["seconds"] / 1e9)


@pytest.mark.slow
def test_bench_ends_with_1_when_a_rank_fails() -> None:
    pytest.importorskip("torch", reason="torch is not installed: make setup")
    ended = command("bench", "--json", BAGUA_TIMEOUT="20", BAGUA_ALGORITHM="bruck")
    assert (ended.returncode, ended.stdout) == (1, "")
    assert "BAGUA_ALGORITHM must be one of" in ended.stderr


@pytest.mark.parametrize(
    ("text", "sizes"), [("4096", [4096]), ("4K,1M", [4096, 1 << 20]), ("8kB, 1GiB", [8192, 1 << 30])]
)
def test_sizes_are_read_with_binary_units(text: str, sizes: list[int]) -> None:
    assert bench.sizes_of(text) == sizes


@pytest.mark.parametrize("text", ["", "4K,", "0", "-4", "3", "4X", "1.5M"])
def test_a_size_that_cannot_be_one_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="--sizes"):
        bench.sizes_of(text)
    ended = command("bench", "--sizes", text) if text == "3" else None
    assert ended is None or (ended.returncode == 2 and "multiple of 4" in ended.stderr)


def test_a_file_that_cannot_be_written_is_refused_before_the_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ("trace", "merge", "--out")
    missing = tmp_path / "missing" / "trace.json"
    for path, reason in ((tmp_path, "is a directory: name a file in it"), (missing, "there is no directory")):
        with pytest.raises(SystemExit) as ended:
            main([*arguments, str(path)])
        assert ended.value.code == 2
        assert re.search(rf"argument {arguments[-1]}: .*{reason}", capsys.readouterr().err)


# --- top --------------------------------------------------------------------------------------------------------------

WORKS = """
import sys
import numpy as np
import bagua, bagua.metrics
bagua.init()
x = np.ones(250, dtype=np.float32)
bagua.all_reduce(x)
bagua.broadcast(x, 0)
print(bagua.metrics.serve(), flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def served() -> Iterator[int]:
    """The port of a rank that has done one all_reduce of 1000 bytes and one broadcast."""
    with subprocess.Popen(
        [sys.executable, "-c", WORKS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment()
    ) as rank:
        assert rank.stdout is not None
        try:
            yield int(rank.stdout.readline())
        finally:
            rank.kill()


@needs_client
def test_top_has_a_row_per_rank_and_op_and_one_for_a_rank_that_does_not_answer() -> None:
    with served() as port, free_port() as unused:
        ended = command("top", "--once", f"127.0.0.1:{port}", f"127.0.0.1:{unused}")
    assert (ended.returncode, ended.stderr) == (0, "")
    rows = [line.split() for line in ended.stdout.splitlines()]
    (reduce,) = [row for row in rows if "all_reduce" in row]
    # Endpoint, rank, group, op, calls, payload.
    assert reduce[:7] == [f"127.0.0.1:{port}", "0", "world", "all_reduce", "1", "1.0", "kB"]
    assert [row[1:4] for row in rows if "broadcast" in row] == [["0", "world", "broadcast"]]
    (silent,) = [line for line in ended.stdout.splitlines() if f":{unused}" in line]
    assert "does not answer: " in silent


@pytest.mark.slow
@needs_client
def test_top_runs_until_ctrl_c() -> None:
    with served() as port:
        process = subprocess.Popen(
            [sys.executable, "-u", "-m", "bagua", "top", f"127.0.0.1:{port}"],
            env=environment(TERM="xterm", FORCE_COLOR="1", COLUMNS="200"),
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            # A shell starts what runs in its background with SIGINT ignored.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        try:
            assert process.stdout is not None
            shown = b""
            until = time.monotonic() + DEADLINE_S
            while b"all_reduce" not in shown:
                assert time.monotonic() < until
                shown += os.read(process.stdout.fileno(), 4096)
            process.send_signal(signal.SIGINT)
            _, errors = process.communicate(timeout=DEADLINE_S)
        finally:
            process.kill()
            process.wait()
    assert (process.returncode, errors) == (0, b"")


def test_rates_are_differences_over_time() -> None:
    before = top.Reading(10.0, "0", {("world", "all_reduce"): [5, 1000, 0, 0, 0.5, 0]}, "")
    now = top.Reading(12.0, "0", {("world", "all_reduce"): [9, 5000, 4000, 0, 1.5, 0]}, "")
    assert top.rows("h:1", before, now)[0][-4:] == ("2.0", "2.0 kB", "2.0 kB", "50.0")
    # Another group with the same name: its counters begin anew, and there is no rate yet.
    assert top.rows("h:1", now, before._replace(at=14.0))[0][-4:] == ("", "", "", "")
    silent = top.Reading(13.0, "", {}, "does not answer: timed out")
    assert top.rows("h:1", now, silent)[0][:4] == ("h:1", "", "", "does not answer: timed out")


@pytest.mark.parametrize("endpoint", ["host", ":9400", "host:", "host:http", "host:0", "host:65536"])
def test_what_is_no_endpoint_is_refused(endpoint: str) -> None:
    assert main(["top", endpoint]) == 2
