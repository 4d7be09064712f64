"""Ranks on which one call of the driver fails: their errors, and that they end by themselves."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import bagua
from tests.cuda.device_arrays import Cuda
from tests.cuda.driver import HOST_FUNCTION
from tests.cuda.ranks import Ranks
from tests.cuda.simulated import NEVER
from tests.waits import NOT_BY_SILENCE
from tests.world import World

__all__ = [
    "SHORT",
    "UNKNOWN",
    "Calls",
    "blocked",
    "check_each",
    "count_calls",
    "die_in_the_middle",
    "fields_of",
    "is_lost",
    "only",
    "run",
    "two_errors",
]

#: CUDA_ERROR_OUT_OF_MEMORY and _UNKNOWN.
SHORT, UNKNOWN = 2, 999

#: How a rank may end a scenario in which a call failed somewhere; "test: …" is a call of the test's own.
OUTCOMES = {"done", "DeviceError", "PeerRaisedError", "BaguaTimeoutError", "PeerLostError"}

#: How often each function is called before the scenario's own part, and altogether.
Calls = tuple[dict[str, int], dict[str, int]]


def fields_of(error: BaseException) -> dict[str, Any]:
    """The class, the text and the fields of an error, which can be pickled."""
    fields = {name: getattr(error, name, None) for name in ("api", "code", "name", "device", "rank", "kind")}
    return {"class": type(error).__name__, "text": str(error), **fields}


def two_errors(step: Callable[[], object], seconds: float = 40.0) -> list[dict[str, Any]]:
    """The first error of this rank and the one that it gets when it goes on; fewer when there are none in time.

    A rank that has the others' data before one of them fails gets the error at a later step.
    """
    found: list[dict[str, Any]] = []
    until = time.monotonic() + seconds
    while len(found) < 2 and time.monotonic() < until:
        try:
            step()
        except bagua.BaguaError as error:
            found.append(fields_of(error))
    return found


@contextmanager
def blocked(cuda: Cuda, stream: int, ended: Path) -> Iterator[None]:
    """What the stream gets from now on begins when this ends, which `ended` shows to the driver's thread."""

    @HOST_FUNCTION
    def blocks(_: Any) -> None:
        deadline = time.monotonic() + 60
        while not ended.exists() and time.monotonic() < deadline:
            time.sleep(0.01)

    cuda.driver.cuLaunchHostFunc(stream, blocks, None)
    try:
        yield
    finally:
        ended.touch()


def only(rank: int, **variables: object) -> Callable[[int], dict[str, str]]:
    """Variables for one rank only."""
    return lambda each: {name: str(value) for name, value in variables.items()} if each == rank else {}


def run(ranks: Ranks, size: int, function: Any, *arguments: Any, each: Any = None, **variables: object) -> list[Any]:
    """As `ranks`, with variables of each rank; the reports may have faults, but the ranks must end by themselves."""
    base = {
        "BAGUA_CUDA_COLLECTIVE": "staged",
        "BAGUA_LIBCUDA": str(ranks.library),
        "BAGUA_LIBNCCL": str(ranks.library.with_name("libnccl.so.2")),
        "BAGUA_SIM_DELAY_US": str(NEVER),
        **{name: str(value) for name, value in ranks.compiler.items()},
    }
    base |= {name: str(value) for name, value in variables.items()}
    world = World(size, env=lambda rank: base | (each(rank) if each else {}), timeout=60)
    found = world.run(function, *arguments)
    for text in world.output:
        assert "panicked" not in text, text
    return found


def count_calls(ranks: Ranks, scenario: Callable[..., str], *arguments: object, **variables: object) -> Calls:
    """How often `scenario(rank, …, False)` and `scenario(rank, …, True)` call each function, where nothing fails."""
    found = []
    for whole in (False, True):
        ranks(2, scenario, *arguments, whole, clean=False, **variables)
        counts = [report["calls"] for report in ranks.reports]
        names = counts[0] | counts[1]
        found.append({name.split("_v")[0]: max(each.get(name, 0) for each in counts) for name in names})
    return found[0], found[1]


def check_each(
    ranks: Ranks,
    scenario: Callable[..., str],
    *arguments: object,
    calls: Calls,
    function: str,
    raised_for: Iterable[str],
    rank: int,
    code: int,
    last: bool,
    **variables: object,
) -> None:
    """The function fails at its first call of the scenario, in the middle, and with `last` at its last one.

    Where it is the first one, the rank must raise it, for functions of `raised_for`.
    """
    before, after = (counts.get(function, 0) for counts in calls)
    assert after > before, "the scenario calls it"
    places = {before + 1, (before + after + 1) // 2} | ({after} if last else set())
    for nth in sorted(places):
        fail = f"{function}:{nth}:{code}"
        each = only(rank, BAGUA_SIM_FAIL=fail)
        found = run(ranks, 2, scenario, *arguments, True, each=each, BAGUA_TIMEOUT=10, **variables)
        if nth == before + 1 and function in raised_for:
            assert found[rank] == "DeviceError" or found[rank].startswith("test: "), (fail, found)
        assert all(end in OUTCOMES or end.startswith("test: ") for end in found), (fail, found)


def die_in_the_middle(rank: int, folder: str, begin: Callable[[], object], step: Callable[[], object]) -> int | None:
    """Rank 1 begins and kills itself; the other one steps until it loses a rank, and returns which.

    Rank 1 waits for the other one before it dies: what it has completed itself may still be in progress there.
    """
    here = Path(folder, "here")
    if rank == 1:
        begin()
        while not here.exists():
            time.sleep(0.001)
        os.kill(os.getpid(), signal.SIGKILL)
    here.touch()
    while True:
        try:
            # The first of these meets the one that rank 1 has begun.
            step()
        except bagua.PeerLostError as error:
            return error.rank


def is_lost(ranks: Ranks, scenario: Callable[..., Any], folder: Path, *arguments: object, **variables: object) -> None:
    """In `scenario(rank, folder, …)` rank 1 of two kills itself; rank 0 returns what `die_in_the_middle` did."""

    with ranks.world(2, **variables, **NOT_BY_SILENCE) as world:
        world._expect_exit = {1: -signal.SIGKILL}
        lost, _ = world.run(scenario, str(folder), *arguments)
    assert lost == 1
    ranks.check()
