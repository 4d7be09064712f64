"""Runs scenarios on the simulated driver: each in a process of its own, whose report is read when it has ended."""

from __future__ import annotations

import fcntl
import inspect
import json
import os
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]

#: A driver whose work begins only when a call waits for it.
NEVER = 3_600_000_000

Scenario = Callable[..., Any]


class Ended(NamedTuple):
    """A scenario that has ended."""

    value: Any
    """What it returned, as JSON."""
    report: dict[str, Any]
    """The simulated driver's report of its process."""

    @property
    def clean(self) -> bool:
        """Whether the report has neither a fault nor a leak."""
        return not self.report["faults"] and not self.report["leaked"]


def built(target: str = "cuda-sim") -> Path:
    """The folder with the libraries that a target of the Makefile makes; skips where they cannot be made."""
    if shutil.which("g++") is None or shutil.which("make") is None:
        pytest.skip("the simulated driver is made by make and g++, and one of them is absent")
    made = ROOT / "target" / "cuda-sim"
    made.mkdir(parents=True, exist_ok=True)
    # Each process of a run of pytest comes here, and an object that one compiles is none that another can link.
    with open(made / "making", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        subprocess.run(["make", "--no-print-directory", "--silent", "--jobs=2", target], cwd=ROOT, check=True)
    return made


class Simulator:
    """`simulator(scenario, …)` runs `scenario(cuda, …)` on the simulated driver."""

    def __init__(self, folder: Path, reports: Path) -> None:
        self.library = folder / "libcuda.so.1"
        self.reports = reports

    def environment(self, **variables: object) -> dict[str, str]:
        """The environment of a process on the simulated driver: of its variables these, and no others."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith("BAGUA_SIM_")}
        named = {
            "BAGUA_LIBCUDA": self.library,
            "BAGUA_SIM_DELAY_US": NEVER,
            "BAGUA_SIM_REPORT": self.reports / "report",
        }
        return kept | {name: str(value) for name, value in (named | variables).items()}

    def start(self, scenario: Scenario, *arguments: Any, **variables: object) -> subprocess.Popen[str]:
        """Starts a scenario, whose source is its whole program: it sees what tests/cuda/driver.py defines."""
        source = textwrap.dedent(inspect.getsource(scenario))
        program = (
            "import json, sys, ctypes, os, threading, time\nfrom tests.cuda.driver import *\n"
            f"{source}\nvalue = {scenario.__name__}(Driver(), *json.loads({json.dumps(arguments)!r}))\n"
            "print('value', json.dumps(value))\n"
        )
        return subprocess.Popen(
            [sys.executable, "-c", program],
            cwd=ROOT,
            env=self.environment(**variables),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def end(self, process: subprocess.Popen[str], said: str = "") -> Ended:
        """Waits until a scenario has ended, and reads what it made."""
        out, err = process.communicate(said, timeout=120)
        assert process.returncode == 0, err
        value = [line for line in out.splitlines() if line.startswith("value ")][-1]
        report = self.reports / f"report.{process.pid}"
        return Ended(json.loads(value.removeprefix("value ")), json.loads(report.read_text()))

    def __call__(self, scenario: Scenario, *arguments: Any, **variables: object) -> Ended:
        return self.end(self.start(scenario, *arguments, **variables))


@pytest.fixture(scope="session")
def _simulated_driver() -> Path:
    return built()


@pytest.fixture
def simulator(_simulated_driver: Path, tmp_path: Path) -> Simulator:
    """Runs scenarios on the simulated driver."""
    return Simulator(_simulated_driver, tmp_path)
