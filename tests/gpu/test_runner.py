"""`make gpu-test` itself: suites that hang, fail or cannot be imported, and a machine without a GPU."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.cuda.simulated import built
from tests.gpu import __main__ as runner
from tests.gpu.place import why_not
from tests.processes import is_running, pid_of
from tests.waits import until

pytestmark = pytest.mark.slow

HANGS = """
import subprocess, sys, time, pytest
def test_good(): pass
def test_bad(): assert 1 == 2
def test_skipped(): pytest.skip("no reason")
@pytest.mark.timeout(0)
def test_hangs():
    # As a rank: in a session of its own.
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    print(child.pid, file=open("PID", "w"), flush=True)
    while True:
        try: time.sleep(600)
        except KeyboardInterrupt: pass
"""


def test_a_suite_that_hangs_is_ended_with_its_processes_and_keeps_what_was_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pid = tmp_path / "pid"
    tests = tmp_path / "test_some.py"
    tests.write_text(HANGS.replace('"PID"', repr(str(pid))))
    # Long enough for pytest to come to the test that hangs.
    suite = runner.Suite("some", [str(tests)], 20.0)
    runner.run(suite, tmp_path, time.monotonic() + 60)
    assert suite.note == "NOT ENDED within 20 s"
    assert [suite.count(outcome) for outcome in ("passed", "failed", "skipped")] == [1, 1, 1]
    # SIGKILL was sent; on a busy machine a process that is not a child of ours ends a moment later.
    until(lambda: not is_running(pid_of(pid)), "the process of the suite still runs")
    assert runner.show([suite], tmp_path) == 1
    shown = capsys.readouterr().out
    assert "assert 1 == 2" in shown
    assert shown.splitlines()[-1].split()[:4] == ["some", "1", "1", "1"]


def test_what_pytest_cannot_run_is_no_success(tmp_path: Path) -> None:
    broken = tmp_path / "test_broken.py"
    broken.write_text("import nowhere_at_all\n")
    for arguments, keywords in (([str(broken)], ""), (["tests/gpu/test_runner.py"], "no_such_test")):
        suite = runner.Suite("broken", arguments, 60.0, keywords)
        runner.run(suite, tmp_path, time.monotonic() + 60)
        assert runner.show([suite], tmp_path) == 1


def test_a_command_that_is_absent_or_refuses_the_device_is_skipped(tmp_path: Path) -> None:
    absent = runner.Suite("sanitizer", ["no-such-sanitizer"], 60.0, command=True)
    runner.run(absent, tmp_path, time.monotonic() + 60)
    assert absent.note == "skipped: there is no no-such-sanitizer"
    for said, code, expected in (
        ("========= Device not supported\n", 1, ("skipped", 0)),
        ("366 cases\n========= ERROR SUMMARY: 0 errors\n", 0, ("", 0)),
        ("========= Invalid __global__ write of size 1\n========= ERROR SUMMARY: 3 errors\n", 9, ("", 1)),
    ):
        suite = runner.Suite("sanitizer", ["it"], 60.0, command=True)
        runner.command_ended(suite, code, said)
        assert (suite.note[:7], runner.show([suite], tmp_path)) == expected


@pytest.mark.parametrize("name", ["codec 10^8 f32", "time"])
def test_a_suite_of_chosen_tests_has_some(name: str) -> None:
    (suite,) = (each for each in (*runner.suites(), *runner.alone()) if each.name == name)
    command = [sys.executable, "-m", "pytest", "-q", "--collect-only", *suite.arguments]
    command += ["-k", f"not simulated and ({suite.keywords})"]
    done = subprocess.run(command, cwd=runner.ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.skipif(why_not() is None, reason="there is a GPU")
@pytest.mark.parametrize("command", [["-m", "tests.gpu"], ["benchmarks/gpu.py"]], ids=["test", "bench"])
def test_without_a_gpu_both_commands_say_why_and_succeed(command: list[str]) -> None:
    env = {name: value for name, value in os.environ.items() if not name.startswith("BAGUA_LIB")}
    done = subprocess.run(
        [sys.executable, *command], cwd=runner.ROOT, env=env, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"skipped: {why_not()}\n"


def test_the_benchmark_runs_on_the_simulated_driver_and_prints_no_figures(tmp_path: Path) -> None:
    built("cuda-kernels-host")
    command = ["benchmarks/gpu.py", "--simulated", "--parts", "codec", "all_reduce", "late", "--csv", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, *command], cwd=runner.ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    (path,) = tmp_path.glob("gpu-*.csv")
    with open(path, newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert not {"seconds", "bytes_per_s", "of_copy", "ratio"} & rows[0].keys()
    assert [row for row in rows if row.get("note")] == [], done.stdout
    measured = [row["what"] for row in rows]
    assert measured.count("encode float32") == measured.count("decode bfloat16") == 4
    assert "all_reduce by staged, 2 ranks" in measured
    assert "return of a verb behind 0.5 s of work, nccl" in measured
