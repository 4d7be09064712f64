"""What engines give the launchers: torchrun's PET_ variables, and SIGTERM before a job is taken away."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path

import pytest

from bagua.distributed import flags, pet, run
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


WRONG = [
    ("PET_NNODES", "two", "PET_NNODES='two' is neither a number of nodes from 1 nor MIN:MAX"),
    ("PET_NPROC_PER_NODE", "0", "PET_NPROC_PER_NODE='0' is neither a number of ranks from 1 nor a word"),
    ("PET_NPROC_PER_NODE", "2.5", "PET_NPROC_PER_NODE='2.5' is neither a number of ranks from 1 nor a word"),
    ("PET_NODE_RANK", "first", "PET_NODE_RANK='first' is not an integer"),
    ("PET_NODE_RANK", "", "PET_NODE_RANK='' is not an integer"),
    ("PET_MASTER_PORT", "http", "PET_MASTER_PORT='http' is not an integer"),
    ("PET_MASTER_ADDR", "", "PET_MASTER_ADDR='' is empty"),
    ("PET_STANDALONE", "yes", "PET_STANDALONE='yes' is neither 0 nor 1"),
    ("PET_MONITOR_INTERVAL", "soon", "PET_MONITOR_INTERVAL='soon' is not a number of seconds"),
]


@pytest.mark.parametrize(("name", "value", "complaint"), WRONG)
def test_a_variable_that_cannot_be_used_is_named(
    name: str, value: str, complaint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    found = pet.problem([])
    assert found is not None
    assert found.startswith(complaint)
    option = f"--{name.removeprefix('PET_').lower()}"
    if name == "PET_STANDALONE":
        # torchrun reads the variable all the same.
        assert pet.problem([option]) == found
        return
    assert pet.problem([f"{option}=1"]) is None
    assert pet.problem([option.replace("_", "-"), "1"]) is None
    # After the script it is an argument of the script.
    assert pet.problem(["script.py", f"{option}=1"]) == found


def test_the_launcher_ends_with_the_name_of_the_variable() -> None:
    pytest.importorskip("torch", reason="torch is not installed: make setup")
    for env, complaint in (
        ({"PET_STANDALONE": "yes"}, "python -m bagua.distributed.run: PET_STANDALONE='yes' is neither 0 nor 1"),
        (
            {"PET_NPROC_PER_NODE": "many"},
            "--nproc_per_node or PET_NPROC_PER_NODE: Unsupported nproc_per_node value: many",
        ),
    ):
        with program("bagua.distributed.run", "script.py", env=env) as process:
            code, _, errors = finish(process)
        assert code == 2
        assert complaint in errors
        assert "Traceback" not in errors


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "env", "complaint"),
    [
        (("--nnodes", "2:1"), {}, "--nnodes or PET_NNODES: from 2 to 1 nodes: it must be a number from 1, or MIN:MAX"),
        ((), {"PET_NNODES": "3:2"}, "--nnodes or PET_NNODES: from 3 to 2 nodes"),
        (("--nnodes", "0"), {}, "--nnodes or PET_NNODES: from 0 to 0 nodes"),
        (("--nproc_per_node", "0"), {}, "--nproc_per_node or PET_NPROC_PER_NODE: 0: it must be at least 1"),
        (("--max_restarts", "-1"), {}, "--max_restarts or PET_MAX_RESTARTS: -1: it must be at least 0"),
    ],
)
def test_numbers_that_no_job_can_have_are_refused_by_name(
    arguments: tuple[str, ...], env: dict[str, str], complaint: str
) -> None:
    pytest.importorskip("torch", reason="torch is not installed: make setup")
    with program("bagua.distributed.run", *arguments, "script.py", env=env) as process:
        code, _, errors = finish(process)
    assert code == 2
    assert complaint in errors
    assert "Traceback" not in errors


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
    assert f"{name}={value!r} is not an integer" in capsys.readouterr().err


def test_without_the_variable_the_number_of_ranks_is_needed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PET_NPROC_PER_NODE", raising=False)
    with pytest.raises(SystemExit):
        run.main(["--keep-going", write(tmp_path, "")])
    assert "--nproc-per-node" in capsys.readouterr().err


def test_the_last_value_of_an_option_before_the_script_counts() -> None:
    arguments = ["--shutdown-timeout", "3", "-m", "--shutdown_timeout=4", "script", "--shutdown-timeout", "5"]
    assert flags.value(arguments, "shutdown_timeout") == "4"
    assert flags.value(arguments, "nnodes") is None


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
