"""Trees of processes: the list of all processes, as Linux shows it and as POSIX does."""

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from bagua.distributed import processes
from tests import forks
from tests.world import ROOT, World, _running

NO_PS = "needs the command ps, which this system does not have"
NO_PROC = "needs /proc, which this system does not have"


@pytest.mark.parametrize(
    "listed",
    [
        pytest.param(processes._from_ps, marks=pytest.mark.skipif(shutil.which("ps") is None, reason=NO_PS)),
        pytest.param(
            processes._from_proc, marks=pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason=NO_PROC)
        ),
    ],
)
def test_a_child_is_listed_with_its_parent(listed: Callable[[], Iterator[tuple[int, int]]]) -> None:
    with subprocess.Popen(("sleep", "60")) as child:
        try:
            assert (child.pid, os.getpid()) in set(listed())
        finally:
            child.kill()


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason=NO_PROC)
def test_a_process_on_this_machine_may_have_a_name_that_is_no_text() -> None:
    # As of a thread or process whose name was cut within a character: 15 is PR_SET_NAME.
    code = "import ctypes; ctypes.CDLL(None).prctl(15, b'\\xff', 0, 0, 0); print(flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
    ) as child:
        try:
            assert child.stdout is not None
            child.stdout.readline()
            assert child.pid in processes.descendants(os.getpid())
            assert _running(child.pid) == [f"{child.pid} \ufffd"]
        finally:
            child.kill()


def parent(rank: int) -> int:
    return os.getppid()


def test_the_processes_of_a_run_fork_their_ranks_from_the_same_two() -> None:
    ours = World(2).run(parent)
    code = (
        "from tests import forks\nfrom tests.unit.test_processes import parent\nfrom tests.world import World\n"
        f"forks.run_name = {forks.run_name!r}\nprint(World(2).run(parent))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.stdout == f"{ours}\n", done.stderr
    assert ours[0] != ours[1]
    # They are there for the others when one of the run has ended.
    assert World(2).run(parent) == ours


def test_a_process_that_ends_before_it_has_read_that_it_may_start_ranks_ends_those_of_no_other() -> None:
    ours = World(2).run(parent)
    for number in range(2):
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as ending:
            ending.connect(forks._address(number, torch=False))
            assert ending.recv(1, socket.MSG_PEEK)
    assert World(2).run(parent) == ours


@pytest.mark.slow
def test_threads_that_start_ranks_at_once_have_them_forked_by_the_same_two_and_the_process_ends() -> None:
    code = (
        "from concurrent.futures import ThreadPoolExecutor\n"
        "from tests.unit.test_processes import parent\nfrom tests.world import World\n"
        "with ThreadPoolExecutor(4) as pool:\n"
        "    print(len({tuple(each) for each in pool.map(lambda _: World(2).run(parent), range(4))}))"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error::ResourceWarning", "-c", code],
        cwd=ROOT, capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert done.stdout == "1\n", done.stderr
    assert "unclosed" not in done.stderr


def test_a_signal_to_a_rank_whose_exit_code_has_not_come_has_no_effect() -> None:
    ended = subprocess.run(("sh", "-c", "echo $$"), capture_output=True, check=True)
    reading, writing = os.pipe()
    with open(writing, "wb", buffering=0) as pipe:
        pipe.write(forks._NUMBER.pack(int(ended.stdout)))
        rank = forks.Fork(reading)
        # It asks only whether the process is there: another one may have its number by now.
        rank.send_signal(0)
        pipe.write(forks._NUMBER.pack(0))
    assert rank.wait() == 0


def exists(rank: int, path: str) -> bool:
    return Path(path).exists()


@pytest.mark.slow
def test_no_rank_runs_before_every_one_can_be_forked(tmp_path: Path) -> None:
    started = tmp_path / "started"
    # The second of the two processes that fork ranks takes longer to start than the first rank would.
    (tmp_path / "sitecustomize.py").write_text(
        "import os, pathlib, time\n"
        "if os.environ.get('PYTHONHASHSEED') == '1':\n"
        f"    time.sleep(0.5)\n    pathlib.Path({str(started)!r}).touch()\n"
    )
    code = (
        "from tests.unit.test_processes import exists\nfrom tests.world import World\n"
        f"print(World(2).run(exists, {str(started)!r}))"
    )
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    env = {key: value for key, value in os.environ.items() if key != "PYTHONHASHSEED"} | {"PYTHONPATH": path}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.stdout == "[True, True]\n", done.stderr
