"""Reductions that type checkers know of the verbs."""

from __future__ import annotations

from bagua import collectives
from bagua.extension import OPS


def test_the_reductions_that_type_checkers_know_are_those_of_the_core() -> None:
    assert set(collectives.Op.__args__[0].__args__) == set(OPS)
