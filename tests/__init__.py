"""Tests of the Python side; the fixture that starts ranks is in `tests.world`."""
