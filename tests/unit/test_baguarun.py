"""`baguarun`, with a pretended ssh that runs the command on this host."""

from __future__ import annotations

import json
import os
import signal
import stat
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from bagua.script import baguarun
from bagua.script.baguarun import hosts_of
from tests.processes import is_running, pid_of
from tests.unit.test_launch import STAYS
from tests.unit.test_run import finish, program, write
from tests.waits import until
from tests.world import free_port

pytestmark = pytest.mark.slow

#: Notes its arguments, and runs the command in a session of its own, as a remote one would be: killing ssh leaves it.
#: None of the two begins before both have noted theirs: the failure of one ends the other.
SSH = """#!{python} -I
import glob, json, os, subprocess, sys, time
option, port, host, command = sys.argv[1:]
with open(f"{folder}/.ssh-{{port}}", "w") as file:
    json.dump([option, port, host, command], file)
os.rename(f"{folder}/.ssh-{{port}}", f"{folder}/ssh-{{port}}")
while len(glob.glob("{folder}/ssh-*")) < 2:
    time.sleep(0.01)
sys.exit(subprocess.call(["sh", "-c", command], start_new_session=True))
"""


@pytest.fixture
def ssh(tmp_path: Path) -> dict[str, str]:
    """The variables that put the pretended ssh first in PATH."""
    path = tmp_path / "bin" / "ssh"
    path.parent.mkdir()
    path.write_text(SSH.format(python=sys.executable, folder=tmp_path))
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return {"PATH": f"{path.parent}{os.pathsep}{os.environ['PATH']}"}


@pytest.fixture
def port() -> Iterator[str]:
    with free_port() as free:
        yield str(free)


def arguments(port: str, *more: str) -> list[str]:
    given = ["--host_list", "127.0.0.1:7001,localhost", "--ssh-port", "7002", "--nproc_per_node", "1"]
    return [*given, "--master_port", port, *more]


JOB = """
import json, os, sys
import numpy as np
import bagua
group = bagua.init()
x = np.full(3, group.rank + 1, dtype=np.float32)
bagua.all_reduce(x)
bagua.shutdown()
with open(f"{sys.argv[1]}/{os.environ['RANK']}.json", "w") as file:
    json.dump([x.tolist(), os.environ["GROUP_RANK"], os.environ["GIVEN"], os.environ["CARRIED"], sys.argv[2:]], file)
"""


def test_a_job_of_two_hosts_works_and_carries_variables_and_arguments_whole(
    tmp_path: Path, ssh: dict[str, str], port: str
) -> None:
    pytest.importorskip("torch", reason="torch is not installed: make setup")
    awkward = """it's "$HOME" && `exit 7`; *\n\\end"""
    given = arguments(port, "-x", f"GIVEN={awkward}", "-x", "CARRIED")
    given += [write(tmp_path, JOB), str(tmp_path), awkward, "-x", ""]
    with program("bagua.script.baguarun", *given, env=ssh | {"CARRIED": "a = b"}) as process:
        code, _, errors = finish(process)
    assert code == 0, errors
    for rank in range(2):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        assert found == [[3.0] * 3, str(rank), awkward, "a = b", [awkward, "-x", ""]]
    assert json.loads((tmp_path / "ssh-7001").read_text())[:3] == ["-p", "7001", "127.0.0.1"]
    assert json.loads((tmp_path / "ssh-7002").read_text())[:3] == ["-p", "7002", "localhost"]


def test_a_signal_ends_the_ranks_of_every_host(tmp_path: Path, ssh: dict[str, str], port: str) -> None:
    pytest.importorskip("torch", reason="torch is not installed: make setup")
    script = write(tmp_path, STAYS + "run_on()")
    with program("bagua.script.baguarun", *arguments(port, script, str(tmp_path)), env=ssh) as process:
        pids = [pid_of(tmp_path / name) for name in ("0.0", "1.0")]
        process.terminate()
        assert finish(process)[0] == 128 + signal.SIGTERM
        until(lambda: not any(is_running(pid) for pid in pids), "the ranks of every host end")


def test_without_ssh_the_job_ends_with_an_error(tmp_path: Path, port: str) -> None:
    with program("bagua.script.baguarun", *arguments(port, "script.py"), env={"PATH": str(tmp_path)}) as process:
        code, _, errors = finish(process)
    assert code == 1
    assert "baguarun: cannot start ssh: " in errors


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("a", [("a", 22)]),
        ("a,b:2222, c", [("a", 22), ("b", 2222), ("c", 22)]),
        ("me@a:23,10.0.0.1", [("me@a", 23), ("10.0.0.1", 22)]),
    ],
)
def test_a_list_of_hosts_is_read(text: str, hosts: list[tuple[str, int]]) -> None:
    assert hosts_of(text, 22) == hosts


@pytest.mark.parametrize("text", ["", "a,", ",a", "a b", "a:x", "-oProxyCommand=x", "::1", "a:1:2"])
def test_a_list_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="host_list"):
        hosts_of(text, 22)


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        (["--nproc_per_node", "1", "s.py"], "--host_list is missing"),
        (["--host_list", "a", "s.py"], "--nproc"),
        (["--host_list", "a", "--nproc_per_node", "1"], "the following arguments are required: script;"),
        (["--host_list", "a", "--nproc_per_node", "1", "-x", "1A=2", "s.py"], "'1A=2' is neither NAME nor NAME=VALUE"),
        (["--host_list", "a", "--nproc_per_node", "1", "-x", "A;b=2", "s.py"], "neither NAME"),
        (["--host_list", "a", "--nproc_per_node", "1", "-x", "NOT_SET_HERE", "s.py"], "write NOT_SET_HERE=VALUE"),
    ],
)
def test_bad_arguments_start_nothing(
    given: list[str], complaint: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("NOT_SET_HERE", "BAGUA_NODE_DOMAIN_NAMES"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(SystemExit) as ended:
        baguarun.main(given)
    assert ended.value.code == 2
    assert complaint in capsys.readouterr().err


def test_hosts_and_port_come_from_the_originals_variables(tmp_path: Path, ssh: dict[str, str]) -> None:
    names = {"BAGUA_NODE_DOMAIN_NAMES": "one,two:7004", "BAGUA_SSH_PORT": "7003"}
    # The launcher's own error ends each host's command.
    given = ["--nproc_per_node", "none", "s.py"]
    with program("bagua.script.baguarun", *given, env=ssh | names) as process:
        assert finish(process)[0] != 0
    assert json.loads((tmp_path / "ssh-7003").read_text())[2] == "one"
    assert json.loads((tmp_path / "ssh-7004").read_text())[2] == "two"
