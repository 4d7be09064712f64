"""Fixtures that every test may ask for."""

from __future__ import annotations

import os
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import pytest

from tests import forks
from tests.world import world

__all__ = ["world"]


def pytest_configure(config: pytest.Config) -> None:
    """The processes of one run start their ranks from the same processes."""
    if (run := getattr(config, "workerinput", None)) is not None:
        forks.run_name = run["testrunuid"]


@pytest.fixture(autouse=True, scope="session")
def _temporary_files_go_with_the_run(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Flight records and temporary folders of this process, and of those that tests start, are in pytest's folder."""
    os.environ.setdefault("BAGUA_TRACE_DIR", str(tmp_path_factory.mktemp("traces")))
    os.environ["TMPDIR"] = str(tmp_path_factory.mktemp("tmp"))
    # What was found before, by this process.
    tempfile.tempdir = None


def _is_large(parameters: dict[str, Any]) -> bool:
    """Returns True if a test runs on more than two ranks or on simulated hosts, by the names of its parameters."""
    ranks = [parameters.get("size"), parameters.get("layout")]
    hosts = [parameters.get("hosts"), *(ranks[1:] if not isinstance(ranks[1], int) else [])]
    options = parameters.get("options")
    return (
        any(isinstance(number, int) and number > 2 for number in ranks)
        or any(value is not None for value in hosts)
        or (isinstance(options, dict) and "hosts" in options)
    )


def pytest_collection_modifyitems(items: Sequence[pytest.Item]) -> None:
    """A test that is parametrized by worlds is slow in the large ones, where it runs in smaller ones too."""
    runs: dict[tuple[str, str], list[pytest.Function]] = defaultdict(list)
    for item in items:
        if isinstance(item, pytest.Function) and hasattr(item, "callspec"):
            runs[item.path.as_posix(), item.originalname].append(item)
    for cases in runs.values():
        large = [case for case in cases if _is_large(case.callspec.params)]
        if len(large) < len(cases):
            for case in large:
                case.add_marker(pytest.mark.slow)
