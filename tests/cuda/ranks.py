"""Ranks whose arrays are on the simulated driver, and what the driver says of them when they have ended."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.cuda.simulated import NEVER, built
from tests.world import World

#: Host waits of the tests' own arrays. The product makes none on the thread that calls.
OWN_WAITS = {"cuCtxSynchronize@main", "cuMemFree_v2@main"}

Function = Callable[..., Any]


class Ranks:
    """`ranks(n, function, …)` runs `function(rank, …)` on n ranks, and returns what they returned."""

    def __init__(self, folder: Path) -> None:
        self.library = folder / "libcuda.so.1"
        #: The reports of the last run, in no order.
        self.reports: list[dict[str, Any]] = []
        #: What the ranks of the last run printed.
        self.output: list[str] = []

    @contextmanager
    def world(
        self, size: int, *, hosts: Sequence[Sequence[int]] | None = None, timeout: float = 60.0, **variables: object
    ) -> Iterator[World]:
        """Ranks on the simulated driver with these variables; the reports are there when it ends."""
        with tempfile.TemporaryDirectory(prefix="bagua-reports-") as folder:
            named: dict[str, object] = {
                "BAGUA_LIBCUDA": self.library,
                "BAGUA_SIM_DELAY_US": NEVER,
                "BAGUA_SIM_REPORT": Path(folder, "report"),
            }
            if broken := os.environ.get("BAGUA_SIM_BREAK"):
                named["BAGUA_SIM_BREAK"] = broken  # by `make cuda-breaks`
            env = {name: str(value) for name, value in (named | variables).items()}
            world = World(size, env=env, hosts=hosts, timeout=timeout)
            try:
                yield world
            finally:
                self.output = world.output
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
            assert set(report["host_waits"]) <= OWN_WAITS


@pytest.fixture(scope="session")
def _driver_of_ranks() -> Path:
    return built()


@pytest.fixture
def ranks(_driver_of_ranks: Path) -> Ranks:
    """Runs ranks on the simulated driver."""
    return Ranks(_driver_of_ranks)
