"""Starts ranks as processes, runs one function on all of them, and leaves nothing behind.

    def work(rank: int, greeting: str) -> str:
        bagua.init()
        ...

    def test_ranks_greet(world):
        assert world(3).run(work, "hello") == ["hello from 0", "hello from 1", "hello from 2"]

The function must be at the top of a module, because each rank imports it anew; its arguments and results are
pickled. A rank that raises reports it to its peers as an uncaught exception of a program would. The failure of a run
shows every rank's output.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib.util
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests import forks, gloo
from tests.waits import FOLDER

ROOT = Path(__file__).resolve().parents[1]

Rank = subprocess.Popen[bytes] | forks.Fork

#: Seconds that a run may take in all, on a machine that has other things to do.
DEADLINE = 60.0

# Below the range that the kernel takes the ports of outgoing connections from.
_PORTS = range(20000, 30000)
# All runs on this machine have the ports in common; tests/conftest.py gives this one another temporary directory later.
_LOCKS = Path(os.environ.get("TMPDIR") or "/tmp", f"bagua-test-ports-{os.getuid()}")


class RankFailed(AssertionError):
    """A rank did not end as it was expected to; the text has the output of all."""


class World:
    """`size` ranks on this machine.

    `env` adds variables for every rank, or is a function of the rank that says which. `hosts` splits the ranks among
    pretended hosts, e.g. [[0, 1], [2, 3]]. `expect_exit` says which ranks end with another exit code than 0 (-9:
    killed), and so may have no result. `launcher_env=False` starts the ranks without RANK, WORLD_SIZE and the like.
    Ranks are forks of a process that has imported torch if the function's module has, or `torch` is true
    (`tests.forks`), or new processes where `env` has a variable that libraries read while they are loaded. `namespaces`
    gives each rank, which must be a fork then, the path of its network namespace; `hosts` are not pretended then.
    """

    def __init__(
        self,
        size: int,
        *,
        env: Mapping[str, str] | Callable[[int], Mapping[str, str]] | None = None,
        hosts: Sequence[Sequence[int]] | None = None,
        expect_exit: Mapping[int, int] | None = None,
        timeout: float = DEADLINE,
        launcher_env: bool = True,
        namespaces: Sequence[str] | None = None,
        torch: bool = False,
    ) -> None:
        self.size = size
        self.hosts = [list(range(size))] if hosts is None else [list(host) for host in hosts]
        if sorted(rank for host in self.hosts for rank in host) != list(range(size)):
            raise ValueError(f"hosts={hosts} does not hold each of {size} ranks once")
        self._pretend = hosts is not None and namespaces is None
        self._namespaces = namespaces
        self._env = env
        self._expect_exit = dict(expect_exit or {})
        self._timeout = timeout
        self._launcher_env = launcher_env
        self._torch = torch
        #: What each rank printed in the last run.
        self.output: list[str] = []

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Runs `function(rank, *args)` on every rank, and returns the results by rank; None for a rank that
        left none.
        """
        with self.running(function, *args) as run:
            return run.results()

    @contextlib.contextmanager
    def running(self, function: Callable[..., Any], *args: Any) -> Iterator[Run]:
        """Like `run`, for a caller that does something to the ranks meanwhile. No rank is left when this ends."""
        with tempfile.TemporaryDirectory(prefix="bagua-world-") as folder, free_port() as port:
            call = Path(folder, "call")
            module = sys.modules[function.__module__]
            assert module.__file__ is not None
            call.write_bytes(
                pickle.dumps((module.__file__, function.__module__, function.__qualname__, pickle.dumps(args)))
            )
            run = Run(self, call, port, torch=self._torch or "torch" in vars(module))
            try:
                for rank in range(self.size):
                    run.start(rank)
                yield run
            finally:
                for process in run.started:
                    _kill(process)
                self.output = run.output()

    def environment(self, rank: int, port: int) -> dict[str, str]:
        """The variables of one rank."""
        ours = ("BAGUA_", "TORCHELASTIC_", "MASTER_", "LOCAL_", "GROUP_", "ROLE_", "SLURM_", "OMPI_", "PMI_")
        env = {key: value for key, value in os.environ.items() if not key.startswith(ours)}
        for key in ("RANK", "WORLD_SIZE", "NODE_RANK"):
            env.pop(key, None)
        host = next(number for number, host in enumerate(self.hosts) if rank in host)
        if self._launcher_env:
            env |= {
                "RANK": str(rank),
                "WORLD_SIZE": str(self.size),
                "LOCAL_RANK": str(self.hosts[host].index(rank)),
                "LOCAL_WORLD_SIZE": str(len(self.hosts[host])),
                "GROUP_RANK": str(host),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
            }
        env |= forks.LOADED
        env["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [env.get("PYTHONPATH")])])
        if self._pretend:
            env["BAGUA_HOST_ID"] = f"pretended-host-{host}"
        return env | self._more(rank)

    def _more(self, rank: int) -> dict[str, str]:
        return dict((self._env(rank) if callable(self._env) else self._env) or {})

    def _start(self, rank: int, call: Path, port: int, torch: bool) -> Rank:
        # What a failed group records goes with the run.
        environment = {"BAGUA_TRACE_DIR": str(call.parent / "traces")} | self.environment(rank, port)
        environment[FOLDER] = str(call.parent)
        path = call.with_name(f"output{rank}")
        if not any(key.startswith(forks.LOADING) for key in self._more(rank)):
            namespace = None if self._namespaces is None else self._namespaces[rank]
            return forks.start(rank, call, environment, path, namespace, torch=torch)
        if self._namespaces is not None:
            raise ValueError("only forks can be started in a network namespace")
        with open(path, "wb") as output:
            return subprocess.Popen(
                [sys.executable, "-u", "-m", "tests.world", str(call), str(rank)],
                cwd=ROOT,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                # A process group of its own: what a rank starts is found and ended with it.
                start_new_session=True,
            )

    def _wait(self, ranks: list[Rank]) -> list[int | None]:
        """Exit codes; None for a rank that was still running at the deadline."""
        until = time.monotonic() + self._timeout
        codes: list[int | None] = []
        for rank in ranks:
            try:
                codes.append(rank.wait(max(0.0, until - time.monotonic())))
            except subprocess.TimeoutExpired:
                # Shows where it hangs, in its output.
                for late in ranks:
                    if late.poll() is None:
                        late.send_signal(signal.SIGABRT)
                return codes + [_aborted(late) for late in ranks[len(codes) :]]
        return codes

    def _check(self, ranks: list[Rank], codes: list[int | None], output: Callable[[], list[str]]) -> None:
        wrong = []
        for number, (rank, code) in enumerate(zip(ranks, codes, strict=True)):
            expected = self._expect_exit.get(number, 0)
            if code is None:
                wrong.append(f"rank {number} was still running after {self._timeout} s")
            elif code != expected:
                wrong.append(f"rank {number} ended with {code} instead of {expected}")
            if left := _left(rank.pid):
                wrong.append(f"rank {number} left processes behind: {left}")
        if wrong:
            shown = [f"--- rank {rank} ---\n{text}" for rank, text in enumerate(output())]
            raise RankFailed("\n".join(["; ".join(wrong), *shown]))


class Run:
    """The ranks of one run, while they run."""

    def __init__(self, world: World, call: Path, port: int, torch: bool) -> None:
        self._world, self._call, self._port, self._torch = world, call, port, torch
        #: The process of each rank.
        self.ranks: list[Rank] = []
        #: All processes, those that another one took the place of too.
        self.started: list[Rank] = []

    def start(self, rank: int) -> Rank:
        """Starts a rank, the next one or one again."""
        process = self._world._start(rank, self._call, self._port, self._torch)
        self.started.append(process)
        self.ranks[rank : rank + 1] = [process]
        return process

    def results(self) -> list[Any]:
        """Waits until all ranks have ended as they should. What each returned, None for a rank that left nothing."""
        codes = self._world._wait(self.ranks)
        self._world._check(self.ranks, codes, self.output)
        return [_result(self._call.with_name(f"result{rank}")) for rank in range(self._world.size)]

    def output(self) -> list[str]:
        """Returns the output of each rank."""
        return [_text(self._call.with_name(f"output{rank}")) for rank in range(self._world.size)]


def make_world(size: int, **options: Any) -> World:
    """Creates the world of the fixture `world`."""
    return World(size, **options)


@contextlib.contextmanager
def free_port(ports: range = _PORTS, count: int = 1) -> Iterator[int]:
    """A port without a listener that no other run gets as long as this one holds it. Of several in a row the first."""
    _LOCKS.mkdir(exist_ok=True)
    starts = range(len(ports) - count + 1)
    begin = int.from_bytes(os.urandom(2), "little") % len(starts)
    for offset in range(len(starts)):
        start = starts[(begin + offset) % len(starts)]
        with contextlib.ExitStack() as held:
            if all(_hold(port, held) for port in ports[start : start + count]):
                yield ports[start]
                return
    raise RuntimeError("every port is taken")


def _hold(port: int, held: contextlib.ExitStack) -> bool:
    """Returns True if the port is free. No other run gets the port before `held` is closed."""
    lock = os.open(_LOCKS / str(port), os.O_WRONLY | os.O_CREAT)
    held.callback(os.close, lock)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
    except OSError:
        return False
    return True


def _running(group: int) -> list[str]:
    """Processes of this process group that run; zombies do not count."""
    running = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(OSError):
            name, _, rest = entry.joinpath("stat").read_text(errors="replace").rpartition(")")
            state, _, process_group = rest.split()[:3]
            if int(process_group) == group and state not in "ZX":
                running.append(name.replace("(", "", 1))
    return running


def _left(group: int) -> list[str]:
    """Processes of this process group that run on: those that end with their parent do so a moment later."""
    deadline = time.monotonic() + 10
    while (running := _running(group)) and time.monotonic() < deadline:
        time.sleep(0.01)
    return running


def _aborted(rank: Rank) -> int | None:
    """The exit code of a rank that SIGABRT was sent to; None for one that it ended, or that is frozen."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        code = rank.wait(10)
        return None if code == -signal.SIGABRT else code
    return None


def _kill(rank: Rank) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(rank.pid, signal.SIGKILL)
    rank.wait()


def _text(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""


def _result(path: Path) -> Any:
    return pickle.loads(path.read_bytes()) if path.exists() else None


def load(path: str, name: str) -> ModuleType:
    """The module of the function, under its own name, so that what it defines can be pickled."""
    try:
        return importlib.import_module(name)
    except ImportError:
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
        return module


def _end_torch_without_deadlock() -> None:
    """Tests end their gloo groups by torch's own name, which may hang before torch 2.6: see `torch_end`."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.torch_version.TorchVersion(torch.__version__) < "2.6":
        from bagua.torch_api.membership import torch_destroy_process_group

        torch.distributed.destroy_process_group = torch_destroy_process_group.destroy


def rank_main(call: str, rank: int) -> None:
    """One rank: the main function of its process."""
    path, module, qualname, args = pickle.loads(Path(call).read_bytes())
    function: Any = load(path, module)
    for part in qualname.split("."):
        function = getattr(function, part)
    _end_torch_without_deadlock()
    gloo.end_in_order()
    result = function(rank, *pickle.loads(args))
    whole = Path(call).with_name(f"result{rank}.part")
    whole.write_bytes(pickle.dumps(result))
    whole.rename(whole.with_suffix(""))


@pytest.fixture
def world() -> Callable[..., World]:
    """`world(n, **options).run(function, *args)`: see `tests.world`."""
    return make_world


if __name__ == "__main__":
    rank_main(sys.argv[1], int(sys.argv[2]))
