"""`python -m bagua.distributed.launch` and `.run`, as programs."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.processes import is_running, pid_of, stat_of
from tests.unit.test_run import RUNS_ON, finish, program, write
from tests.waits import until
from tests.world import free_port

pytestmark = pytest.mark.slow

pytest.importorskip("torch", reason="torch is not installed: make setup")

REPORTS = """
import json, os, sys
names = [name for name in os.environ if name.startswith(("BAGUA_", "AUTO_TUNE"))]
names += ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "NODE_RANK"]
with open(f"{sys.argv[-1]}/{os.environ['RANK']}.json", "w") as file:
    json.dump([{name: os.environ.get(name) for name in names}, sys.argv[1:-1]], file)
"""

# As RUNS_ON, without the runner's variables.
STAYS = RUNS_ON.replace('int(os.environ["BAGUA_RESTART_COUNT"])', "0")


@pytest.fixture
def port() -> Iterator[str]:
    with free_port() as free:
        yield str(free)


def reported(path: Path) -> tuple[dict[str, str], list[str]]:
    variables, arguments = json.loads(path.read_text())
    return variables, arguments


def test_launch_takes_the_originals_flags_and_sets_their_variables(tmp_path: Path, port: str) -> None:
    arguments = [
        "--nproc_per_node",
        "2",
        "--master-port",
        port,
        "--bagua_service_port",
        "4711",
        "--autotune-level",
        "1",
    ]
    arguments += ["--autotune_max_samples", "7", "--autotune_sampling_confidence_time", "2.5", "--report_metrics"]
    arguments += ["--autotune-warmup-time", "1.5", "--default_bucket_size", "4096", "--is_output_autotune_log"]
    arguments += ["--enable_bagua_net", "--set_additional_flag", "--host_list", "a,b", "--ssh_port", "22"]
    with program(
        "bagua.distributed.launch", *arguments, write(tmp_path, REPORTS), "--lr", "1", str(tmp_path)
    ) as process:
        code, _, errors = finish(process)
    assert code == 0, errors
    for rank in range(2):
        variables, given = reported(tmp_path / f"{rank}.json")
        assert given == [f"--local_rank={rank}", "--lr", "1"]
        assert variables == {
            "AUTO_TUNE_SERVER_ADDR": "127.0.0.1:4711",
            "BAGUA_AUTOTUNE": "1",
            "BAGUA_AUTOTUNE_MAX_SAMPLES": "7",
            "BAGUA_AUTOTUNE_SAMPLING_CONFIDENCE_TIME_S": "2.5",
            "BAGUA_AUTOTUNE_WARMUP_TIME_S": "1.5",
            "BAGUA_DEFAULT_BUCKET_SIZE": "4096",
            "BAGUA_IS_OUTPUT_AUTOTUNE_LOG": "1",
            "BAGUA_NET_IMPLEMENT": "BASIC",
            "BAGUA_REPORT_METRICS": "1",
            "BAGUA_SERVICE_PORT": "4711",
            "RANK": str(rank),
            "WORLD_SIZE": "2",
            "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
            "NODE_RANK": "0",
        }
    (warning,) = [line for line in errors.splitlines() if "without effect" in line]
    assert "--autotune_level (BAGUA_AUTOTUNE)" in warning
    assert "--enable_bagua_net (BAGUA_NET_IMPLEMENT)" in warning
    assert "default_bucket_size" not in warning


def test_launch_without_the_flags_sets_and_says_nothing(tmp_path: Path, port: str) -> None:
    arguments = ["--master_port", port, "-m", "script", str(tmp_path)]
    write(tmp_path, REPORTS)
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    with program("bagua.distributed.launch", *arguments, env={"PYTHONPATH": path}) as process:
        assert finish(process) == (0, "", "")
    variables, given = reported(tmp_path / "0.json")
    assert given == []
    assert [name for name in variables if name.startswith(("BAGUA_", "AUTO_TUNE"))] == []


def test_run_hands_the_scripts_arguments_on_as_they_are(tmp_path: Path) -> None:
    arguments = ["--nproc-per-node", "2", "--max_restarts", "0", "--use_env", "--autotune-level", "2"]
    with program("bagua.distributed.run", *arguments, write(tmp_path, REPORTS), "--lr", "1", str(tmp_path)) as process:
        code, _, errors = finish(process)
    assert code == 0, errors
    for rank in range(2):
        variables, given = reported(tmp_path / f"{rank}.json")
        assert given == ["--lr", "1"]
        assert [variables[name] for name in ("RANK", "WORLD_SIZE", "BAGUA_AUTOTUNE")] == [str(rank), "2", "2"]


def test_launch_writes_the_output_of_each_rank_to_the_originals_files(tmp_path: Path, port: str) -> None:
    script = write(tmp_path, "import os, sys; print('out', os.environ['RANK']); print('err', file=sys.stderr)")
    logs = tmp_path / "logs"
    arguments = ["--nproc_per_node", "2", "--master_port", port, "--logdir", str(logs), script]
    with program("bagua.distributed.launch", *arguments) as process:
        code, output, errors = finish(process)
    assert (code, output) == (0, ""), errors
    for rank in range(2):
        assert (logs / f"node_0_local_rank_{rank}_stdout").read_text() == f"out {rank}\n"
        assert (logs / f"node_0_local_rank_{rank}_stderr").read_text() == "err\n"


SUMS = """
import numpy as np
import bagua
group = bagua.init()
x = np.full(3, group.rank + 1, dtype=np.float32)
bagua.all_reduce(x)
print(x.tolist(), flush=True)
bagua.shutdown()
"""


@pytest.mark.parametrize("which", ["launch", "run"])
def test_a_job_of_two_ranks_works(which: str, tmp_path: Path, port: str) -> None:
    where = ["--master_port", port] if which == "launch" else ["--standalone"]
    with program(f"bagua.distributed.{which}", "--nproc-per-node", "2", *where, write(tmp_path, SUMS)) as process:
        code, output, errors = finish(process)
    assert code == 0, errors
    # Two processes write, so what they write may be mixed.
    assert output.count("[3.0, 3.0, 3.0]") == 2


@pytest.mark.parametrize("which", ["launch", "run"])
def test_a_failing_rank_ends_the_other(which: str, tmp_path: Path, port: str) -> None:
    # Rank 1 fails when rank 0 is there.
    code = "import time\nif rank == 0: run_on()\nwhile not (here / '0.0').exists(): time.sleep(0.02)\nsys.exit(3)"
    where = ["--master_port", port] if which == "launch" else []
    arguments = ["--nproc_per_node", "2", *where, write(tmp_path, STAYS + code), str(tmp_path)]
    with program(f"bagua.distributed.{which}", *arguments) as process:
        ended, _, errors = finish(process)
    assert ended == 1
    assert "exitcode" in errors
    until(lambda: not is_running(pid_of(tmp_path / "0.0")), "the other rank ends")


@pytest.mark.parametrize("which", ["launch", "run"])
@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)], ids=["INT", "TERM", "HUP"]
)
def test_a_signal_ends_every_rank(which: str, number: signal.Signals, code: int, tmp_path: Path, port: str) -> None:
    where = ["--master_port", port] if which == "launch" else []
    arguments = ["--nproc_per_node", "2", *where, write(tmp_path, STAYS + "run_on()"), str(tmp_path)]
    with program(f"bagua.distributed.{which}", *arguments) as process:
        pids = [pid_of(tmp_path / name) for name in ("0.0", "1.0")]
        process.send_signal(number)
        assert finish(process)[0] == code
        until(lambda: not any(is_running(pid) for pid in pids), "every rank ends")


def test_keep_going_after_another_option_is_refused() -> None:
    with program("bagua.distributed.run", "--nproc-per-node", "2", "--keep-going", "script.py") as process:
        code, _, errors = finish(process)
    assert code == 2
    assert "--keep-going must be the first argument" in errors


def test_an_error_about_arguments_names_the_program() -> None:
    with program("bagua.distributed.launch", "--autotune_level", "high", "script.py") as process:
        code, _, errors = finish(process)
    assert code == 2
    assert "python -m bagua.distributed.launch: error: argument --autotune-level" in errors


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
