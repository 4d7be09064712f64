"""Fixtures of the tests on a GPU.

A test that asks for `ranks` runs on the device only. One that asks for `anywhere` also runs on the simulated driver.
"""

from __future__ import annotations

import pytest

from tests.cuda.ranks import OnDevice, Ranks, _driver_of_ranks
from tests.gpu.place import why_not

__all__ = ["_driver_of_ranks"]


@pytest.fixture
def ranks() -> Ranks:
    """Runs ranks on device 0 of this machine; skips where there is none."""
    if reason := why_not():
        pytest.skip(reason)
    return OnDevice()


@pytest.fixture(params=["simulated", "device"])
def anywhere(request: pytest.FixtureRequest) -> Ranks:
    """Runs ranks on the simulated driver, and on device 0."""
    if request.param == "device":
        found: Ranks = request.getfixturevalue("ranks")
        return found
    return Ranks(request.getfixturevalue("_driver_of_ranks"))
