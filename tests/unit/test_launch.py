"""`python -m bagua.distributed.launch` and `.run`, as programs: torchrun does the work."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from bagua.distributed import launch
from tests.processes import is_running, pid_of, stat_of
from tests.unit.test_run import RUNS_ON, finish, program, write
from tests.waits import until
from tests.world import free_port

pytestmark = pytest.mark.slow

pytest.importorskip("torch", reason="torch is not installed: make setup")

# As RUNS_ON, without the runner's variables.
STAYS = RUNS_ON.replace('int(os.environ["BAGUA_RESTART_COUNT"])', "0")


@pytest.fixture
def port() -> Iterator[str]:
    with free_port() as free:
        yield str(free)


SUMS = """
import sys
import numpy as np
import bagua
group = bagua.init()
x = np.full(3, group.rank + 1, dtype=np.float32)
bagua.all_reduce(x)
print(x.tolist(), sys.argv[1:], flush=True)
bagua.shutdown()
"""


@pytest.mark.parametrize(
    ("which", "options", "env"),
    [("launch", ["--nproc_per_node", "2"], {}), ("run", [], {"PET_NPROC_PER_NODE": "2"})],
    ids=["launch by options", "run by variables"],
)
def test_a_job_of_two_ranks_works(which: str, options: list[str], env: dict[str, str], tmp_path: Path) -> None:
    script = write(tmp_path, SUMS)
    with program(f"bagua.distributed.{which}", *options, script, "--lr", "--nnodes", env=env) as process:
        code, output, errors = finish(process)
    assert code == 0, errors
    # Two processes write, so what they write may be mixed.
    assert output.count("[3.0, 3.0, 3.0] ['--lr', '--nnodes']") == 2


@pytest.mark.parametrize(
    ("which", "number", "code"),
    [("run", signal.SIGINT, 130), ("launch", signal.SIGTERM, 143), ("run", signal.SIGHUP, 129)],
    ids=["INT", "TERM", "HUP"],
)
def test_a_signal_ends_every_rank(which: str, number: signal.Signals, code: int, tmp_path: Path) -> None:
    arguments = ["--nproc_per_node", "2", write(tmp_path, STAYS + "run_on()"), str(tmp_path)]
    with program(f"bagua.distributed.{which}", *arguments) as process:
        pids = [pid_of(tmp_path / name) for name in ("0.0", "1.0")]
        process.send_signal(number)
        assert finish(process)[0] == code
        until(lambda: not any(is_running(pid) for pid in pids), "every rank ends")


def test_without_torch_the_error_names_it(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "torch.distributed", None)
    assert launch.main(["script.py"]) == 1
    assert 'starting ranks needs torch: pip install "torch>=2.5"' in capsys.readouterr().err


# Rank 1 fails when the test has stopped the launcher.
FAILS = (
    STAYS
    + """
import time
import bagua
bagua.init()
bagua.barrier()
say(f"{rank}.0")
if rank == 1:
    while not (here / "stopped").exists(): time.sleep(0.02)
    FAILURE
bagua.barrier()
"""
)
RAISES = FAILS.replace("FAILURE", 'raise ValueError("bad data in my loader")')
DECORATED = "".join(
    [
        "from torch.distributed.elastic.multiprocessing.errors import record\n@record\ndef main():\n",
        *(f"    {line}\n" for line in RAISES.splitlines()),
        "main()\n",
    ]
)


@pytest.mark.parametrize(
    ("script", "cause", "follows"),
    [
        (RAISES, "ValueError: bad data in my loader", "PeerRaisedError"),
        (DECORATED, "ValueError: bad data in my loader", "PeerRaisedError"),
        (FAILS.replace("FAILURE", "os.kill(os.getpid(), signal.SIGKILL)"), "Signal 9 (SIGKILL)", "PeerLostError"),
    ],
    ids=["raises", "raises under torch's record", "killed"],
)
def test_the_summary_of_a_failed_job_names_the_rank_that_failed_first(
    tmp_path: Path, port: str, script: str, cause: str, follows: str
) -> None:
    arguments = ["--nproc_per_node", "3", "--master_port", port, write(tmp_path, script), str(tmp_path)]
    with program("bagua.distributed.launch", *arguments) as process:
        ranks = [pid_of(tmp_path / f"{rank}.0") for rank in range(3)]
        rank_0 = stat_of(ranks[0])
        assert rank_0 is not None
        agent = int(rank_0[1])
        # All ranks have failed when the launcher looks: it would end those that have not.
        os.kill(agent, signal.SIGSTOP)
        try:
            until(lambda: (stat_of(agent) or " ")[0] == "T", "the launcher stops")
            (tmp_path / "stopped").touch()
            until(lambda: not any(is_running(pid) for pid in ranks), "all ranks fail")
        finally:
            os.kill(agent, signal.SIGCONT)
        ended, _, errors = finish(process)
    assert ended == 1
    others, root = errors.split("Root Cause (first observed failure):")
    assert "rank      : 1 " in root
    assert cause in root
    assert "rank      : 0 " in others
    assert follows in others
