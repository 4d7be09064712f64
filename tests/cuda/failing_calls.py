"""Ranks on which one call of the driver fails: their errors, and that they end by themselves."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import bagua
from tests.cuda.ranks import Ranks
from tests.cuda.simulated import NEVER
from tests.waits import NOT_BY_SILENCE
from tests.world import World

#: CUDA_ERROR_UNKNOWN.
UNKNOWN = 999


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


def only(rank: int, **variables: object) -> Callable[[int], dict[str, str]]:
    """Variables for one rank only."""
    return lambda each: {name: str(value) for name, value in variables.items()} if each == rank else {}


def run(ranks: Ranks, size: int, function: Any, *arguments: Any, each: Any = None, **variables: object) -> list[Any]:
    """Like `ranks`, with variables for each rank. The reports may have faults, but the ranks must end on their own."""
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
