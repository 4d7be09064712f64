"""Cases that share a world of ranks: each is tried on every rank, and a test for each looks at what became of it."""

from __future__ import annotations

import functools
import os
import traceback
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import pytest

from tests.world import make_world

#: Ranks on one host, or how many each pretended host has: "2+1".
Layout = int | str

#: Every size, and hosts that have as many ranks as each other and not.
HOSTED: tuple[Layout, ...] = (2, 3, 4, "2+2", "2+1")

#: A rank's variable: which cases it runs, one of PARTS; all without it.
PART = "TEST_CASES"
PARTS = ("quick", "slow")


def is_slow(case: Callable[..., object]) -> bool:
    """Returns True if a case has the marker ``slow``."""
    return any(mark.name == "slow" for mark in getattr(case, "pytestmark", []))


def is_run(case: Callable[..., object]) -> bool:
    """Returns True if this rank runs the case."""
    return os.environ.get(PART) in (None, PARTS[is_slow(case)])


def slow_but(quick: Collection[Any], rows: Iterable[Any]) -> list[Any]:
    """The rows of a table with the marker `slow`, but for these: they show what others do in `make test`."""
    return [row if row in quick else pytest.param(row, marks=pytest.mark.slow) for row in rows]


def attempt(cases: Mapping[str, Callable[[], object]], meet: Callable[[], object]) -> dict[str, str]:
    """Runs all cases on this rank, with a barrier of all ranks after each; by name, what each raised ("" when nothing).

    A rank on which a case failed does not come to the barrier: the others fail there, too.
    """
    outcome = {}
    for name, case in cases.items():
        try:
            case()
            meet()
            outcome[name] = ""
        except Exception:
            outcome[name] = traceback.format_exc()
    return outcome


def check_outcomes(found: Sequence[Mapping[str, str]], name: str, *more: str) -> None:
    """Fails with every rank's traceback, and `more`, when a case failed; a rank may have had no part in it."""
    texts = {rank: outcome[name] for rank, outcome in enumerate(found) if name in outcome}
    assert texts, f"no rank ran {name}"
    failed = [f"--- rank {rank} ---\n{text}" for rank, text in texts.items()]
    assert not any(texts.values()), "\n".join([*failed, *more])


def hosts_of(layout: Layout) -> list[list[int]] | None:
    """The ranks of each pretended host; None for one host."""
    if isinstance(layout, int):
        return None
    ranks = iter(range(sum(map(int, layout.split("+")))))
    return [[next(ranks) for _ in range(int(count))] for count in layout.split("+")]


@functools.cache
def outcomes(
    run: Callable[..., Any], layout: Layout, timeout: int, part: str | None, *arguments: str
) -> list[dict[str, str]]:
    """Every rank's outcomes of `run`, which calls :func:`attempt`. Runs once for all tests of a module."""
    hosts = hosts_of(layout)
    size = layout if isinstance(layout, int) else sum(map(len, hosts or []))
    env = {"BAGUA_TIMEOUT": str(timeout)} | ({} if part is None else {PART: part})
    # A case that hangs must not cost the whole deadline of the run.
    world = make_world(size, hosts=hosts, env=env, timeout=240.0)
    found: list[dict[str, str]] = world.run(run, *arguments)
    return found


def each_case(
    cases: Sequence[Any], *layouts: Layout, run: Callable[..., Any], arguments: Sequence[str] = (), timeout: int = 30
) -> Callable[..., None]:
    """The test of a module for each of its cases on each layout, where `run(rank, *arguments)` tries them all.

    A case with the marker `slow` gives it to its test, and has worlds of its own where `make test` runs the others.
    `timeout` is the ranks' BAGUA_TIMEOUT in seconds: more than 30 where the start of many ranks on few cores must not
    count as a rank that is missing.
    """
    # Imports torch, without which ranks of other modules start faster.
    from tests.distributed.left_out import skip_if_left_out

    large = tuple(layout for layout in layouts if not isinstance(layout, int) or layout > 2)

    @pytest.mark.parametrize("layout", layouts, ids=str)
    @pytest.mark.parametrize(
        "case", [pytest.param(case, marks=[pytest.mark.slow] * is_slow(case), id=case.__name__) for case in cases]
    )
    def test(case: Any, layout: Layout) -> None:
        skip_if_left_out(case)
        # All tests of a large world are slow where there are smaller ones: tests/conftest.py.
        part = None if layout in large and large != layouts else PARTS[is_slow(case)]
        check_outcomes(outcomes(run, layout, timeout, part, *arguments), case.__name__)

    return test
