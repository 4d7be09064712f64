"""What engines give the launchers: torchrun's PET_ variables, and SIGTERM before a job is taken away."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path

import pytest

from bagua.distributed import run
from tests.processes import is_running, pid_of
from tests.unit.test_run import NODE_1, RUNS_ON, finish, program, runner, write
from tests.waits import until
from tests.world import free_port

pytestmark = pytest.mark.slow

# As RUNS_ON, without the variables of --keep-going.
STAYS = RUNS_ON.replace('int(os.environ["BAGUA_RESTART_COUNT"])', "0")

REPORTS = """
import json, os, sys
names = ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "BAGUA_ELASTIC")
with open(f"{sys.argv[1]}/{os.environ['RANK']}.json", "w") as file:
    json.dump([os.environ.get(name) for name in names], file)
"""

# What Kubeflow Trainer sets, for a job of one pod.
ONE_POD = {"PET_NNODES": "1", "PET_NPROC_PER_NODE": "2", "PET_NODE_RANK": "0", "PET_MASTER_ADDR": "127.0.0.1"}


@pytest.mark.parametrize("which", ["run", "launch"])
def test_torchruns_variables_are_options_and_arguments_win(which: str, tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="torch is not installed: make setup")
    script = write(tmp_path, REPORTS)
    with free_port() as port:
        env = {**ONE_POD, "PET_MASTER_PORT": str(port)}
        with program(f"bagua.distributed.{which}", script, str(tmp_path), env=env) as process:
            code, _, errors = finish(process)
        assert code == 0, errors
        expected = ["2", "2", "127.0.0.1", str(port), None]
        assert json.loads((tmp_path / "1.json").read_text()) == ["1", *expected]
        (tmp_path / "1.json").unlink()
        arguments = ["--nproc-per-node", "1", script, str(tmp_path)]
        with program(f"bagua.distributed.{which}", *arguments, env=env | {"PET_NPROC_PER_NODE": "-"}) as process:
            assert finish(process)[0] == 0
    assert json.loads((tmp_path / "0.json").read_text())[1] == "1"
    assert not (tmp_path / "1.json").exists()


def test_torchruns_variables_are_options_of_the_runner_of_elastic_jobs_too(tmp_path: Path) -> None:
    # On node 1 the runner serves no address book.
    env = {
        "PET_NNODES": "2",
        "PET_NPROC_PER_NODE": "2",
        "PET_NODE_RANK": "1",
        "PET_MASTER_ADDR": "host0",
        "PET_MASTER_PORT": "9",
    }
    script = write(tmp_path, REPORTS)
    with runner(script, str(tmp_path), env=env) as process:
        assert finish(process) == (0, "", "")
    expected = ["2", "4", "2", None, None, "tcp://host0:9"]
    assert json.loads((tmp_path / "2.json").read_text()) == expected
    with runner("--nproc-per-node", "1", "--master-port", "10", script, str(tmp_path), env=env) as process:
        assert finish(process) == (0, "", "")
    assert json.loads((tmp_path / "1.json").read_text())[-1] == "tcp://host0:10"


@pytest.mark.parametrize(
    ("name", "value"), [("PET_NNODES", "1:4"), ("PET_NPROC_PER_NODE", "auto"), ("PET_SHUTDOWN_TIMEOUT", "long")]
)
def test_the_runner_of_elastic_jobs_takes_integers_only(
    name: str, value: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PET_NPROC_PER_NODE", "1")
    monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as ended:
        run.main(["--keep-going", write(tmp_path, "")])
    assert ended.value.code == 2
    assert f"invalid int value: {value!r}" in capsys.readouterr().err


# Takes longer than the launchers wait after Ctrl-C: 5 s with --keep-going, 2 s over torchrun.
SAVES = """
import time
def save(*_):
    time.sleep(SECONDS)
    say(f"saved{rank}")
    sys.exit()
signal.signal(signal.SIGTERM, save)
"""


@pytest.mark.parametrize("keeps_going", [True, False], ids=["--keep-going", "torchrun"])
def test_sigterm_gives_every_rank_the_time_to_save(keeps_going: bool, tmp_path: Path) -> None:
    if not keeps_going:
        pytest.importorskip("torch", reason="torch is not installed: make setup")
    saves = SAVES.replace("SECONDS", "6" if keeps_going else "3")
    script = write(tmp_path, (RUNS_ON if keeps_going else STAYS) + saves + "run_on()")
    mode = ["--keep-going", *NODE_1] if keeps_going else []
    with program("bagua.distributed.run", *mode, "--nproc-per-node", "2", script, str(tmp_path)) as process:
        ranks = (2, 3) if keeps_going else (0, 1)
        pids = [pid_of(tmp_path / f"{rank}.0") for rank in ranks]
        process.terminate()
        assert finish(process)[0] == 128 + signal.SIGTERM
        assert all((tmp_path / f"saved{rank}").exists() for rank in ranks)
        until(lambda: not any(is_running(pid) for pid in pids), "the ranks end")


@pytest.mark.parametrize("keeps_going", [True, False], ids=["--keep-going", "torchrun"])
def test_the_time_after_sigterm_can_be_set(keeps_going: bool, tmp_path: Path) -> None:
    if not keeps_going:
        pytest.importorskip("torch", reason="torch is not installed: make setup")
    code = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\nrun_on()"
    script = write(tmp_path, (RUNS_ON if keeps_going else STAYS) + code)
    mode = ["--keep-going", *NODE_1] if keeps_going else []
    env = {"PET_SHUTDOWN_TIMEOUT": "1"}
    with program(
        "bagua.distributed.run", *mode, script, str(tmp_path), env=env | {"PET_NPROC_PER_NODE": "1"}
    ) as process:
        pid = pid_of(tmp_path / ("1.0" if keeps_going else "0.0"))
        began = time.monotonic()
        process.terminate()
        assert finish(process)[0] == 128 + signal.SIGTERM
        # Without the variable it would take 30 s.
        assert time.monotonic() - began < 20
        until(lambda: not is_running(pid), "the rank ends")
