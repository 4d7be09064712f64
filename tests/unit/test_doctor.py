"""`bagua doctor`: what it finds in an environment."""

from __future__ import annotations

import json
import os
import re
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import bagua
from bagua.config import VARIABLES
from tests.unit.test_commands import DEADLINE_S, ROOT, command, environment


def examined(*arguments: str, **options: Any) -> tuple[int, dict[str, Any]]:
    """Exit code and object of `bagua doctor --json`; ``options`` as those of :func:`command`."""
    ended = command("doctor", "--json", *arguments, **options)
    assert ended.stderr == ""
    return ended.returncode, json.loads(ended.stdout)


def problems(found: dict[str, Any]) -> dict[str, str]:
    for problem in found["problems"]:
        assert list(problem) == ["what", "why", "fix"]
        assert all(problem.values())
    return {problem["what"]: problem["why"] for problem in found["problems"]}


def test_a_healthy_environment_has_no_problems_and_the_trial_works() -> None:
    code, found = examined()
    assert (code, found["problems"]) == (0, [])
    assert found["versions"]["bagua"] == bagua.__version__
    assert set(found["versions"]) == {"bagua", "python", "numpy", "torch", "lightning", "ray"}
    assert found["machine"]["cores"] == len(os.sched_getaffinity(0))
    assert found["machine"]["memory_bytes"] > 0
    assert found["machine"]["kernel"] == os.uname().release
    for transport in ("shm", "tcp"):
        assert found["transports"][transport]["available"] is True
        assert found["transports"][transport]["why"]
    assert found["limits"]["open_files"] == resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    assert set(found["limits"]) == {"open_files", "locked_memory_bytes", "cpu_quota"}
    assert set(found["network"]) == {"interface", "address", "mtu"}
    assert found["launcher"] == {"name": "none", "rank": 0, "world_size": 1}
    assert found["settings"]["BAGUA_TIMEOUT"] == {"value": "300", "source": "default"}
    assert set(found["cuda"]) == {"available", "why"}
    assert found["trial"]["ranks"] == 2
    assert found["trial"]["ok"] is True
    assert found["trial"]["seconds"] > 0


def test_a_spoiled_environment_is_named_piece_by_piece() -> None:
    code, found = examined(
        "--no-trial",
        RANK="1",
        BAGUA_TIMEOUT="soon",
        BAGUA_TRANSPORT="infiniband",
        BAGUA_STREAMS_PER_PEER="0",
        BAGUA_METRICS_PORT="70000",
        MASTER_ADDR="no-such-host.invalid",
        BAGUA_ELASTIC="tcp://neither-this.invalid:29400",
    )
    assert code == 1
    named = problems(found)
    assert named["BAGUA_TIMEOUT"] == "BAGUA_TIMEOUT='soon' is not a number"
    assert "infiniband" in named["BAGUA_TRANSPORT"]
    assert "from 1 to 64" in named["BAGUA_STREAMS_PER_PEER"]
    assert "from 1 to 65535" in named["BAGUA_METRICS_PORT"]
    assert "WORLD_SIZE" in named["launcher"]
    assert named["MASTER_ADDR"].startswith("cannot resolve host name 'no-such-host.invalid': ")
    assert named["BAGUA_ELASTIC"].startswith("cannot resolve host name 'neither-this.invalid': ")
    assert found["settings"]["BAGUA_TIMEOUT"] == {"value": "soon", "source": "environment"}
    assert found["trial"] is None


@pytest.mark.parametrize(
    ("folder", "no_records", "address", "no_metrics"),
    [
        ("{}/file/records", "Not a directory", "192.0.2.1", "Cannot assign requested address"),
        # Nobody can make a folder there, not even root.
        ("/proc/records", "", "no-such-host.invalid", ""),
        ("{}/new/records", None, "0.0.0.0", None),
    ],
)
def test_a_folder_of_records_and_an_address_of_metrics_that_cannot_be_used_are_problems(
    tmp_path: Path, folder: str, no_records: str | None, address: str, no_metrics: str | None
) -> None:
    (tmp_path / "file").touch()
    folder = folder.format(tmp_path)
    code, found = examined("--no-trial", BAGUA_TRACE_DIR=folder, BAGUA_METRICS_ADDR=address, BAGUA_METRICS_PORT="9400")
    named = problems(found)
    assert code == bool(named)
    expected = {"BAGUA_TRACE_DIR": (folder, no_records), "BAGUA_METRICS_ADDR": (address, no_metrics)}
    assert set(named) == {name for name, (_, why) in expected.items() if why is not None}
    for name, text in named.items():
        assert all(str(part) in text for part in expected[name])
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("variables", "why"),
    [
        ({"WORLD_SIZE": "2"}, "RANK"),
        pytest.param({"RANK": "2", "WORLD_SIZE": "2"}, "rank 2 is not in a world of 2", marks=pytest.mark.slow),
        pytest.param({"RANK": "one", "WORLD_SIZE": "2"}, "RANK='one' is not an integer", marks=pytest.mark.slow),
        pytest.param({"RANK": "0", "WORLD_SIZE": "2"}, "MASTER_PORT is not set", marks=pytest.mark.slow),
        ({"PMI_RANK": "0", "PMI_SIZE": "2"}, "mpiexec -genv MASTER_ADDR"),
    ],
    ids=["half", "outside", "no number", "no port", "mpich"],
)
def test_a_launcher_that_says_too_little_is_a_problem(variables: dict[str, Any], why: str) -> None:
    code, found = examined("--no-trial", **variables)
    assert code == 1
    assert why in problems(found)["launcher"]


def test_a_hard_limit_of_files_that_is_too_low_is_a_problem() -> None:
    code, found = examined("--no-trial", limit=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (128, 128)))
    assert code == 1
    assert "the hard limit is 128" in problems(found)["open files"]
    assert found["limits"]["open_files"] == 128


def test_a_torch_that_is_too_old_is_a_problem(tmp_path: Path) -> None:
    (tmp_path / "torch-2.4.1.dist-info").mkdir()
    (tmp_path / "torch-2.4.1.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.4.1\n")
    path = os.pathsep.join([str(tmp_path), *sys.path])
    code, found = examined("--no-trial", PYTHONPATH=path)
    assert (code, found["versions"]["torch"]) == (1, "2.4.1")
    assert problems(found) == {"torch": "bagua.torch_api needs torch 2.5 or newer, this is 2.4.1"}


@pytest.mark.parametrize(
    ("record", "name"),
    [
        ("bagua-0.9.2.dist-info", "bagua"),
        ("bagua_cuda111-0.9.2-py3.8.egg-info", "bagua-cuda111"),
        ("bagua_rs-0.1.0.dist-info", None),
        ("bagua_core-0.4.1.dist-info", None),
    ],
)
def test_the_original_in_the_same_folder_is_named_by_the_import_and_by_doctor(
    tmp_path: Path, record: str, name: str | None
) -> None:
    package = tmp_path / "bagua"
    package.symlink_to(Path(bagua.__file__).parent)
    (tmp_path / record).mkdir()
    why = f"{name} 0.9.2 (the original Bagua) and bagua-rs both own {package} and replace each other's files"
    fix = f"pip uninstall {name} bagua-rs, then install bagua-rs again"
    path = os.pathsep.join([str(tmp_path), *sys.path])
    code = "import warnings\nwarnings.simplefilter('always')\n\nimport bagua.errors\nimport bagua"
    imported = subprocess.run(
        [sys.executable, "-c", code],
        env=environment(PYTHONPATH=path),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=True,
    )
    assert imported.stderr == (f"<string>:4: UserWarning: {why}: {fix}\n" if name else "")
    if name is None:
        return
    ended = command("doctor", "--json", "--no-trial", PYTHONPATH=path, PYTHONWARNINGS="ignore")
    assert json.loads(ended.stdout)["problems"] == [{"what": "installation", "why": why, "fix": fix}]


def test_a_trial_that_fails_is_a_problem() -> None:
    code, found = examined(BAGUA_ALGORITHM="bruck")
    assert code == 1
    assert found["trial"]["ok"] is False
    assert "BAGUA_ALGORITHM must be one of" in problems(found)["trial of two processes"]


def test_the_secret_is_not_shown() -> None:
    ended = command("doctor", "--json", "--no-trial", BAGUA_JOB_SECRET="open sesame")
    assert "sesame" not in ended.stdout
    assert json.loads(ended.stdout)["settings"]["BAGUA_JOB_SECRET"]["source"] == "environment"


def test_every_documented_variable_is_examined_with_its_documented_default() -> None:
    text = (ROOT / "docs" / "reference" / "configuration.md").read_text()
    assert set(VARIABLES) == set(re.findall(r"`(BAGUA_[A-Z_]+)`", text))
    for name, default in re.findall(r"^\| `(BAGUA_[A-Z_]+)` \| ([^|]*) \|", text, re.MULTILINE):
        if name != "BAGUA_TRACE_DIR":
            assert VARIABLES[name].default == (default.strip() or None)


def test_the_text_has_the_problems_first_and_only_the_settings_that_are_set() -> None:
    ended = command("doctor", "--no-trial", BAGUA_TIMEOUT="soon")
    assert ended.returncode == 1
    assert ended.stdout.splitlines()[:3] == [
        "problems: 1",
        "  BAGUA_TIMEOUT='soon' is not a number",
        "    correct it, or unset it; its default is 300",
    ]
    named = command("doctor", "--no-trial", MASTER_ADDR="no-such-host.invalid").stdout
    assert "  MASTER_ADDR: cannot resolve host name 'no-such-host.invalid': " in named
    assert re.search(r"BAGUA_TIMEOUT +soon +environment", ended.stdout)
    assert "BAGUA_HEARTBEAT_TIMEOUT" not in ended.stdout
    assert re.search(r"memory +[0-9.]+ [GT]B", ended.stdout)
    assert "docs/" not in ended.stdout
    every = command("doctor", "--no-trial", "--all")
    assert every.stdout.startswith("no problems\n")
    assert re.search(r"BAGUA_HEARTBEAT_TIMEOUT +5 +default", every.stdout)


def test_misspelt_settings_are_problems_that_name_the_nearest_setting() -> None:
    code, found = examined("--no-trial", BAGUA_ALGORITM="ring", BAGUA_HEARTBEAT_TIMOUT="3", BAGUA_X="1")
    assert code == 1
    fixes = {problem["why"]: problem["fix"] for problem in found["problems"]}
    assert fixes == {
        "BAGUA_ALGORITM is not a setting of Bagua; did you mean BAGUA_ALGORITHM?": "rename it to BAGUA_ALGORITHM",
        "BAGUA_HEARTBEAT_TIMOUT is not a setting of Bagua; did you mean BAGUA_HEARTBEAT_TIMEOUT?": (
            "rename it to BAGUA_HEARTBEAT_TIMEOUT"
        ),
        "BAGUA_X is not a setting of Bagua": "unset it: bagua doctor --all lists all settings",
    }


@pytest.mark.parametrize(("rank", "warnings"), [("0", 1), ("1", 0)])
def test_init_warns_once_of_a_misspelt_setting_on_one_rank_of_a_host(rank: str, warnings: int) -> None:
    code = "import bagua; [(bagua.init(0, 1, RANK), bagua.shutdown()) for _ in range(2)]".replace(
        "RANK", f"local_rank={rank}"
    )
    names = environment(BAGUA_HEARTBEAT_TIMOUT="3", BAGUA_SIM_X="1")
    ended = subprocess.run(
        [sys.executable, "-W", "always", "-c", code], env=names, capture_output=True, text=True, timeout=60, check=True
    )
    said = "unknown setting BAGUA_HEARTBEAT_TIMOUT is ignored; did you mean BAGUA_HEARTBEAT_TIMEOUT?"
    said = f"<string>:1: UserWarning: {said}"
    assert ended.stderr.count(said) == ended.stderr.count("Warning") == warnings
