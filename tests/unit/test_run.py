"""The runner of elastic jobs and the server of their address book, as programs."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from bagua import extension
from bagua.distributed import run, store
from bagua.errors import BaguaError
from tests.processes import is_running, pid_of
from tests.waits import until

pytestmark = pytest.mark.slow

DEADLINE_S = 60.0

# On node 1 the runner serves no address book.
NODE_1 = ["--nnodes", "2", "--node-rank", "1", "--master-addr", "127.0.0.1", "--master-port", "9"]

# Writes its process id for the test, and runs until something ends it.
RUNS_ON = """
import os, pathlib, signal, sys
here = pathlib.Path(sys.argv[1])
def say(name):
    (here / f"{name}.new").write_text(str(os.getpid()))
    (here / f"{name}.new").rename(here / name)
rank, start = int(os.environ["RANK"]), int(os.environ["BAGUA_RESTART_COUNT"])
def run_on():
    say(f"{rank}.{start}")
    while True:
        signal.pause()
"""


def environment() -> dict[str, str]:
    """The test's own environment without what a launcher would set."""
    ours = ("RANK", "WORLD_SIZE", "LOCAL_", "BAGUA_", "OMP_NUM_THREADS", "PET_")
    return {name: value for name, value in os.environ.items() if not name.startswith(ours)}


@contextlib.contextmanager
def program(*command: str, env: dict[str, str] | None = None) -> Iterator[subprocess.Popen[str]]:
    """`python -m bagua.distributed...` while the block runs."""
    process = subprocess.Popen(
        [sys.executable, "-m", *command],
        env=environment() | (env or {}),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A shell that starts the tests by nohup has SIGHUP ignored, and the runner would keep that.
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),
    )
    with process:
        try:
            yield process
        finally:
            # A block that fails must not wait for it.
            process.kill()


def runner(
    *arguments: str, env: dict[str, str] | None = None
) -> contextlib.AbstractContextManager[subprocess.Popen[str]]:
    return program("bagua.distributed.run", "--keep-going", *arguments, env=env)


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    """Exit code, output and error output."""
    output, errors = process.communicate(timeout=DEADLINE_S)
    return process.returncode, output, errors


def write(folder: Path, code: str) -> str:
    path = folder / "script.py"
    path.write_text(code)
    return str(path)


REPORTS = """
import json, os, sys
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
names += ("BAGUA_ELASTIC", "BAGUA_RESTART_COUNT", "OMP_NUM_THREADS")
with open(f"{sys.argv[1]}/{os.environ['RANK']}.json", "w") as file:
    json.dump([[os.environ[name] for name in names], sys.argv[2:]], file)
"""


@pytest.mark.parametrize(("env", "threads"), [({}, "1"), ({"OMP_NUM_THREADS": "3"}, "3")], ids=["", "threads"])
def test_each_rank_gets_its_rank_and_the_address_of_the_book(tmp_path: Path, env: dict[str, str], threads: str) -> None:
    script = write(tmp_path, REPORTS)
    arguments = ["--nproc-per-node", "2", *NODE_1, script, str(tmp_path), "--nnodes", "-m", "x y"]
    with runner(*arguments, env=env) as process:
        assert finish(process) == (0, "", "")
    for local, rank in enumerate((2, 3)):
        expected = [str(rank), "4", str(local), "2", "tcp://127.0.0.1:9", "0", threads]
        assert json.loads((tmp_path / f"{rank}.json").read_text()) == [expected, ["--nnodes", "-m", "x y"]]
    assert not (tmp_path / "0.json").exists()


def test_a_module_is_found_where_python_would_find_it(tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "main.py").write_text("import sys; print(__name__, sys.argv[1:])")
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    arguments = ["--nproc-per-node", "1", *NODE_1, "-m", "package.main", "--lr", "1"]
    with runner(*arguments, env={"PYTHONPATH": path}) as process:
        assert finish(process) == (0, "__main__ ['--lr', '1']\n", "")


def test_a_killed_rank_is_started_again_while_the_others_run_on(tmp_path: Path) -> None:
    code = "import time\nif (rank, start) == (2, 0): run_on()\n"
    # Rank 3 ends when it has seen the second start of rank 2.
    code += "if rank == 3:\n    say('3.0')\n    while not (here / '2.1').exists(): time.sleep(0.02)\n"
    script = write(tmp_path, RUNS_ON + code + "say(f'{rank}.{start}')")
    with runner("--nproc-per-node", "2", *NODE_1, "--restart-delay", "0.1", script, str(tmp_path)) as process:
        first = pid_of(tmp_path / "2.0")
        pid_of(tmp_path / "3.0")
        os.kill(first, signal.SIGKILL)
        assert finish(process) == (
            0,
            "",
            f"rank 2 (pid {first}) was killed by SIGKILL: restart 1 of 3 in 0.1 s\n",
        )
    assert not (tmp_path / "3.1").exists()


def test_one_restart_too_many_ends_the_other_ranks(tmp_path: Path) -> None:
    # Rank 3 fails as soon as rank 2 is there, every time; rank 2 has a process of its own.
    program = """
import subprocess, time
if rank == 2:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
    (here / "child").write_text(str(child.pid))
    run_on()
while not (here / "2.0").exists(): time.sleep(0.02)
sys.exit(3)
"""
    script = write(tmp_path, RUNS_ON + program)
    arguments = ["--nproc-per-node", "2", *NODE_1, "--max-restarts", "1", "--restart-delay", "0", script]
    with runner(*arguments, str(tmp_path)) as process:
        code, _, errors = finish(process)
    assert code == 1
    assert "ended with exit code 3: restart 1 of 1 in 0.0 s\n" in errors
    assert "ended with exit code 3: no restart of 1 is left, so the runner ends all its ranks\n" in errors
    for name in ("2.0", "child"):
        until(lambda name=name: not is_running(pid_of(tmp_path / name)), f"{name} ends")  # type: ignore[misc]


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)],
    ids=lambda value: str(value),
)
def test_a_signal_to_the_runner_ends_its_ranks(number: signal.Signals, code: int, tmp_path: Path) -> None:
    with runner("--nproc-per-node", "2", *NODE_1, write(tmp_path, RUNS_ON + "run_on()"), str(tmp_path)) as process:
        pids = [pid_of(tmp_path / f"{rank}.0") for rank in (2, 3)]
        process.send_signal(number)
        assert finish(process) == (code, "", "")
    assert not any(is_running(pid) for pid in pids)


def test_ranks_end_with_a_killed_runner(tmp_path: Path) -> None:
    with runner("--nproc-per-node", "2", write(tmp_path, RUNS_ON + "run_on()"), str(tmp_path)) as process:
        pids = [pid_of(tmp_path / f"{rank}.0") for rank in (0, 1)]
        process.kill()
        until(lambda: not any(is_running(pid) for pid in pids), "the ranks end with the runner")


BOOK = """
from bagua import extension
host, _, port = os.environ["BAGUA_ELASTIC"].removeprefix("tcp://").rpartition(":")
secret = os.environ["BAGUA_JOB_SECRET"]
book = extension.Store.tcp(host, int(port), secret.encode(), 60.0)
book.set(f"entry {rank}", b"")
if (rank, start) == (1, 0):
    sys.exit(1)
import time
while book.get(f"entry {1 - rank}") is None:
    time.sleep(0.01)
(here / f"secret.{rank}").write_text(f"{port} {secret}")
run_on()
"""


def test_the_ranks_of_one_node_share_a_book_by_a_secret_that_the_runner_drew(tmp_path: Path) -> None:
    secrets = set()
    for job in ("first", "second"):
        (here := tmp_path / job).mkdir()
        arguments = ["--nproc-per-node", "2", "--restart-delay", "0", write(here, RUNS_ON + BOOK), str(here)]
        with runner(*arguments) as process:
            for rank in ("0.0", "1.1"):
                pid_of(here / rank)
            (found,) = {(here / f"secret.{rank}").read_text() for rank in (0, 1)}
            port, secret = found.split()
            assert len(secret) >= 32
            for line in Path("/proc").glob("[0-9]*/cmdline"):
                with contextlib.suppress(OSError):
                    assert secret.encode() not in line.read_bytes()
            for wrong in (b"", b"guessed"):
                with pytest.raises(BaguaError, match="secret"):
                    extension.Store.tcp("127.0.0.1", int(port), wrong, DEADLINE_S)
            process.terminate()
            assert finish(process)[0] == 128 + signal.SIGTERM
        secrets.add(secret)
    assert len(secrets) == 2


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--nproc-per-node", "0"], "--nproc-per-node is 0; it must be at least 1"),
        (["--nnodes", "0"], "--nnodes is 0; it must be at least 1"),
        (["--max-restarts", "-1"], "--max-restarts is -1; it must be at least 0"),
        (["--restart-delay", "-1"], "--restart-delay is -1.0; it must be at least 0"),
        (["--restart-delay", "nan"], "--restart-delay is nan; it"),
        (["--node-rank", "1"], "--node-rank is 1; with --nnodes 1 it must be below that"),
        (["--nnodes", "2", "--node-rank", "0"], "--nnodes 2 needs --node-rank, --master-addr and --master-port"),
        ([*NODE_1, "--node-rank", "2"], "--node-rank is 2; with --nnodes 2 it must be below that"),
        ([*NODE_1, "--master-port", "0"], "--master-port is 0; it must be from 1 to 65535"),
        (["--master-port", "65536"], "--master-port is 65536"),
    ],
)
def test_arguments_that_cannot_be_used_are_refused(
    arguments: list[str], complaint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = write(tmp_path, "")
    with pytest.raises(SystemExit) as ended:
        run.main(["--keep-going", "--nproc-per-node", "1", *arguments, script])
    assert ended.value.code == 2
    assert complaint in capsys.readouterr().err


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)], ids=["SIGTERM", "SIGINT"])
@pytest.mark.parametrize(("listen", "host"), [("127.0.0.1:0", "127.0.0.1"), (":0", socket.gethostname())])
def test_the_store_prints_where_it_serves_until_a_signal(
    listen: str, host: str, number: signal.Signals, code: int
) -> None:
    with program("bagua.distributed.store", "--listen", listen) as process:
        assert process.stdout is not None
        line = process.stdout.readline().strip()
        prefix, _, port = line.rpartition(":")
        assert prefix == f"tcp://{host}"
        one, other = (extension.Store.tcp("127.0.0.1", int(port), b"", DEADLINE_S) for _ in range(2))
        one.set("key", b"value")
        assert other.get("key") == b"value"
        process.send_signal(number)
        assert finish(process)[:2] == (code, "")


def test_a_store_with_a_secret_refuses_who_has_another() -> None:
    env = {"BAGUA_JOB_SECRET": "one", "BAGUA_TLS": "1"}
    with program("bagua.distributed.store", "--listen", "127.0.0.1:0", env=env) as process:
        assert process.stdout is not None
        port = int(process.stdout.readline().rpartition(":")[2])
        with pytest.raises(BaguaError, match="secret"):
            extension.Store.tcp("127.0.0.1", port, b"another", DEADLINE_S, extension.Tls())
        with pytest.raises(BaguaError, match="TLS"):
            extension.Store.tcp("127.0.0.1", port, b"one", DEADLINE_S)
        assert extension.Store.tcp("127.0.0.1", port, b"one", DEADLINE_S, extension.Tls()).get("key") is None


WRITES_SECRET = """
import os, pathlib, sys
pathlib.Path(sys.argv[1], "secret").write_text(os.environ.get("BAGUA_JOB_SECRET", ""))
"""


@pytest.mark.parametrize(
    ("nodes", "env", "secret"), [([], {"BAGUA_JOB_SECRET": "mine"}, "mine"), (NODE_1, {}, "")], ids=["set", "two nodes"]
)
def test_a_secret_that_is_set_is_kept_and_for_several_nodes_none_is_drawn(
    tmp_path: Path, nodes: list[str], env: dict[str, str], secret: str
) -> None:
    script = write(tmp_path, WRITES_SECRET)
    with runner("--nproc-per-node", "1", *nodes, script, str(tmp_path), env=env) as process:
        assert finish(process)[0] == 0
    assert (tmp_path / "secret").read_text() == secret


@pytest.mark.parametrize("address", ["", "host", "host:", "host:x", "host:65536", "host:-1", "::1:5"])
def test_an_address_that_is_none_is_refused(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        store.main(["--listen", address])
    assert ended.value.code == 2
    assert repr(address) in capsys.readouterr().err


def test_an_ipv6_address_is_written_in_brackets() -> None:
    assert store.parse("[::1]:7") == ("::1", 7)
    assert store.url("::1", 7) == "tcp://[::1]:7"
    assert store.parse(":0") == ("", 0)
