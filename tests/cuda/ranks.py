"""Ranks whose arrays are on the simulated driver, and what the driver says of them when they have ended; and ranks
whose arrays are on the machine's own.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.cuda.pretended_nvrtc import pretended_nvrtc
from tests.cuda.simulated import NEVER, built
from tests.world import World

#: Host waits of the tests' own arrays. The product makes none on the thread that calls.
OWN_WAITS = {"cuCtxSynchronize@main", "cuMemFree_v2@main"}
#: How a thread of the product frees memory that it shared, when its group has ended.
FREES = "cuMemFree_v2@bagua-"

Function = Callable[..., Any]


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
            if broken := os.environ.get("BAGUA_SIM_BREAK"):
                named["BAGUA_SIM_BREAK"] = broken  # by `make cuda-breaks`
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

    def check(self) -> None:
        """Neither a fault, nor a leak, nor a wait for the device on the thread that calls, in any report."""
        for report in self.reports:
            assert report["faults"] == []
            assert report["leaked"] == 0
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
        """Whether a rank left something behind is not known: the driver does not report it."""
        with self.world(size, **options) as world:
            return world.run(function, *arguments)

    def check(self) -> None:
        """Nothing is known of the ranks."""


@pytest.fixture(scope="session")
def _driver_of_ranks() -> Path:
    folder = built("cuda-kernels-host")
    pretended_nvrtc(folder / "pretended")
    return built()


@pytest.fixture
def ranks(_driver_of_ranks: Path) -> Ranks:
    """Runs ranks on the simulated driver."""
    return Ranks(_driver_of_ranks)
