"""Fixtures of the tests on a GPU.

A test that asks for `ranks` runs on the device only. One that asks for `anywhere` also runs on the simulated driver.
"""

from __future__ import annotations

import os
from typing import Any

import pytest

from tests.cuda.ranks import OnDevice, Ranks, simulated_compiler
from tests.cuda.simulated import built
from tests.gpu.place import why_not

__all__ = ["simulated_compiler"]


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
    return Ranks(built())


@pytest.fixture
def compiler(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Variables for ranks that launch kernels. On the device NVRTC and the cache are those of the machine."""
    on_device = "anywhere" not in request.fixturenames or request.node.callspec.params["anywhere"] == "device"
    if on_device:
        return {"XDG_CACHE_HOME": os.environ["XDG_CACHE_HOME"]} if "XDG_CACHE_HOME" in os.environ else {}
    found: dict[str, Any] = request.getfixturevalue("simulated_compiler")
    return found
