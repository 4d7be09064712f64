"""Fixtures that every test may ask for."""

from tests.world import world

__all__ = ["world"]
