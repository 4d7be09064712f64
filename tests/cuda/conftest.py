"""Fixtures of the tests on the simulated driver."""

from tests.cuda.ranks import _driver_of_ranks, ranks

__all__ = ["_driver_of_ranks", "ranks"]
