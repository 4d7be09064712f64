"""Fixtures that every test may ask for."""

from __future__ import annotations

import os

import pytest

from tests.world import world

__all__ = ["world"]


@pytest.fixture(autouse=True, scope="session")
def _records_go_with_the_run(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Flight records of this process, and of processes that tests start themselves, are no litter."""
    os.environ.setdefault("BAGUA_TRACE_DIR", str(tmp_path_factory.mktemp("traces")))
