"""Fixtures of the tests on the simulated driver."""

import pytest

from tests.cuda.ranks import _driver_of_ranks, ranks, simulated_compiler

__all__ = ["_driver_of_ranks", "ranks", "simulated_compiler"]


@pytest.fixture(scope="session")
def compiler(simulated_compiler: dict[str, str]) -> dict[str, str]:
    """Variables for ranks that launch kernels; tests/gpu has others."""
    return simulated_compiler
