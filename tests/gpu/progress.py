"""A plugin of pytest that writes each test's outcome to a file at once, in case the run is killed."""

from __future__ import annotations

import json
import os
from typing import Any


def pytest_runtest_logreport(report: Any) -> None:
    """A line per test: of its call, or of the preparation or the end that skipped it or failed."""
    if report.when == "call" or report.outcome != "passed":
        line = {"test": report.nodeid, "outcome": report.outcome, "seconds": report.duration, "text": _text(report)}
        with open(os.environ["BAGUA_TESTS_PROGRESS"], "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def _text(report: Any) -> str:
    if report.outcome == "skipped":
        return str(report.longrepr[-1]) if isinstance(report.longrepr, tuple) else str(report.longrepr)
    return "" if report.outcome == "passed" else str(report.longreprtext)
