"""Ranks whose arrays are on the simulated driver, and what the driver says of them when they have ended; and ranks
whose arrays are on the machine's own.
"""

from __future__ import annotations

import functools
import inspect
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import bagua
from tests.cases import check_outcomes
from tests.cuda.device_arrays import Cuda
from tests.cuda.pretended_nvrtc import pretended_nvrtc
from tests.cuda.simulated import NEVER, built
from tests.world import World

#: Host waits of the tests' own arrays. The product makes none on the thread that calls.
OWN_WAITS = {"cuCtxSynchronize@main", "cuMemFree_v2@main"}
#: How a thread of the product frees memory that it shared, when its group has ended.
FREES = "cuMemFree_v2@bagua-"

Function = Callable[..., Any]

#: Of these a scenario takes what it needs.
GIVEN = ("rank", "cuda", "group")
#: The collectives of device memory.
BOTH = ("staged", "nccl")


class Ranks:
    """`ranks(n, function, …)` runs `function(rank, …)` on n ranks, and returns what they returned."""

    def __init__(self, folder: Path) -> None:
        self.library = folder / "libcuda.so.1"
        #: Where machine code comes from and where it is kept; it names the kernels, and no rank compiles.
        self.compiler = {"BAGUA_LIBNVRTC": folder / "pretended" / "libnvrtc.so", "XDG_CACHE_HOME": folder / "pretended"}
        #: The reports of the last run, in no order.
        self.reports: list[dict[str, Any]] = []
        #: What the ranks of the last run printed.
        self.output: list[str] = []

    @contextmanager
    def world(
        self, size: int, *, hosts: Sequence[Sequence[int]] | None = None, timeout: float = 60.0, **variables: object
    ) -> Iterator[World]:
        """Ranks on the simulated driver with these variables; the reports are there when it ends."""
        with self.environment() as named:
            env = named | {name: str(value) for name, value in variables.items()}
            world = World(size, env=env, hosts=hosts, timeout=timeout)
            try:
                yield world
            finally:
                self.output = world.output

    @contextmanager
    def environment(self) -> Iterator[dict[str, str]]:
        """The variables of processes on the simulated driver; the reports are there when it ends."""
        with tempfile.TemporaryDirectory(prefix="bagua-reports-") as folder:
            named: dict[str, object] = {
                "BAGUA_CUDA_COLLECTIVE": "staged",
                "BAGUA_LIBCUDA": self.library,
                "BAGUA_LIBNCCL": self.library.with_name("libnccl.so.2"),
                "BAGUA_SIM_DELAY_US": NEVER,
                "BAGUA_SIM_REPORT": Path(folder, "report"),
                **self.compiler,
            }
            try:
                yield {name: str(value) for name, value in named.items()}
            finally:
                self.reports = [json.loads(path.read_text()) for path in Path(folder).iterdir()]

    def __call__(self, size: int, function: Function, *arguments: Any, clean: bool = True, **options: Any) -> list[Any]:
        """With `clean` no rank may have made a mistake, left something behind, or waited for the device on "main"."""
        with self.world(size, **options) as world:
            found = world.run(function, *arguments)
        if clean:
            self.check()
            assert len(self.reports) == size
        return found

    def by(self, collective: str, size: int, function: Function, *arguments: Any, **options: Any) -> list[Any]:
        """The same, with a device for each rank, whose arrays a collective of this name combines."""
        named = {"BAGUA_CUDA_COLLECTIVE": collective, "BAGUA_SIM_DEVICES": max(size, 2)}
        return self(size, function, *arguments, **named | options)

    def check(self, leaking: int = 0) -> None:
        """No report has a fault or a wait for the device on the thread that calls, and at most `leaking` have leaks."""
        assert sum(report["leaked"] > 0 for report in self.reports) <= leaking
        for report in self.reports:
            assert report["faults"] == []
            assert {wait for wait in report["host_waits"] if not wait.startswith(FREES)} <= OWN_WAITS

    def check_no_copies(self) -> None:
        """In the last run only the tests' own arrays were copied between host and device, on the thread "main"."""
        for report in self.reports:
            assert {copy for copy in report["copies"] if not copy.endswith("@main")} == set()


class OnDevice(Ranks):
    """The same on the machine's own driver, which begins work at once and reports nothing. All ranks have device 0."""

    def __init__(self) -> None:
        self.reports = []
        self.output = []

    @contextmanager
    def world(
        self, size: int, *, hosts: Sequence[Sequence[int]] | None = None, timeout: float = 120.0, **variables: object
    ) -> Iterator[World]:
        """Ranks with these variables, but for those of the simulated driver."""
        # A fork of a process in which torch has asked for devices could not use them. OMP_NUM_THREADS keeps ranks from
        # being forks.
        named: dict[str, object] = {"BAGUA_CUDA_COLLECTIVE": "staged", "OMP_NUM_THREADS": 1}
        named |= {name: value for name, value in os.environ.items() if name.startswith("BAGUA_LIB")}
        named |= {name: value for name, value in variables.items() if not name.startswith("BAGUA_SIM_")}
        world = World(size, env={name: str(value) for name, value in named.items()}, hosts=hosts, timeout=timeout)
        try:
            yield world
        finally:
            self.output = world.output

    def __call__(self, size: int, function: Function, *arguments: Any, clean: bool = True, **options: Any) -> list[Any]:
        """Runs the function on all ranks. This driver does not report if a rank left something behind."""
        with self.world(size, **options) as world:
            return world.run(function, *arguments)

    def check(self, leaking: int = 0) -> None:
        """Nothing is known of the ranks."""


class Ended(NamedTuple):
    """A world of ranks that has ended, in which several cases were tried: see `tests.cases`."""

    outcomes: list[dict[str, str]]
    ranks: Ranks

    def check(self, case: str) -> None:
        """Fails with every rank's traceback, and what the driver reports, when a case failed."""
        check_outcomes(self.outcomes, case, *(str(report["faults"]) for report in self.ranks.reports))


def ended(driver: Path, size: int, function: Function, *arguments: Any, **options: Any) -> Ended:
    """Runs cases on ranks; the reports are checked by a test of their own."""
    ranks = Ranks(driver)
    return Ended(ranks(size, function, *arguments, clean=False, **options), ranks)


@contextmanager
def arrays() -> Iterator[dict[str, Any]]:
    """Yields the objects that a scenario on arrays may take, without a group."""
    cuda = Cuda()
    yield {"cuda": cuda}
    cuda.close()


@contextmanager
def grouped() -> Iterator[dict[str, Any]]:
    """Like `arrays`, in the group of all ranks, which the scenario may leave."""
    with arrays() as made:
        yield made | {"group": bagua.init()}
        bagua.shutdown()


Setup = Callable[[], AbstractContextManager[dict[str, Any]]]


def device_rank(scenario: Function, setup: Setup = grouped) -> Function:
    """A scenario as a function of the rank: it gets its rank, what `setup` makes, by name, and the rest in order."""
    names = list(inspect.signature(scenario).parameters)

    @functools.wraps(scenario)
    def run(rank: int, *arguments: Any) -> Any:
        with setup() as made:
            given = {name: value for name, value in ({"rank": rank} | made).items() if name in names}
            return scenario(**given, **dict(zip((name for name in names if name not in given), arguments, strict=True)))

    return run


def on_ranks(
    size: int, setup: Setup = grouped, *, by: Sequence[str] = ("staged",), **options: Any
) -> Callable[[Function], Any]:
    """Makes the test of a scenario, which runs it on so many ranks by each collective.

    What a scenario takes beyond `GIVEN` are the test's own parameters, the collective's name among them as `by`. The
    test's `on_ranks` is the function of a rank.
    """

    def made(scenario: Function) -> Any:
        run = device_rank(scenario, setup)
        run.__qualname__ = f"{scenario.__qualname__}.on_ranks"
        own = [name for name in inspect.signature(scenario).parameters if name not in GIVEN]

        @functools.wraps(scenario)
        def test(ranks: Ranks, by: str, **arguments: Any) -> None:
            ranks.by(by, size, run, *((arguments | {"by": by})[name] for name in own), **options)

        fixtures = dict.fromkeys(["ranks", "by", *own])
        parameters = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in fixtures]
        vars(test).update(__signature__=inspect.Signature(parameters), on_ranks=run)
        return pytest.mark.parametrize("by", by)(test)

    return made


@pytest.fixture(scope="session")
def _driver_of_ranks() -> Path:
    folder = built("cuda-kernels-host")
    pretended_nvrtc(folder / "pretended")
    return built()


@pytest.fixture
def ranks(_driver_of_ranks: Path) -> Ranks:
    """Runs ranks on the simulated driver."""
    return Ranks(_driver_of_ranks)
