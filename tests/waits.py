"""How tests wait: for a condition with a deadline, for each other, and for an error that ends a loop."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path

#: With these variables a rank notices the death of another one by its connections or not at all: silence counts only
#: after the deadline of every test.
NOT_BY_SILENCE = {"BAGUA_HEARTBEAT_TIMEOUT": "600"}

#: The variable with the folder of a run of ranks (`tests.world`).
FOLDER = "TEST_WORLD_FOLDER"


def until(condition: Callable[[], bool], what: str = "a condition", seconds: float = 60.0) -> None:
    """Waits until something holds; an error that names it when it does not come to be."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        time.sleep(0.001)


def for_ever(call: Callable[[], object]) -> None:
    """Until the call raises."""
    while True:
        call()


def on_threads(call: Callable[[int], object], numbers: Iterable[int]) -> None:
    """Calls it with each number on a thread of its own, at once. Raises the first error of a thread."""
    errors: list[BaseException] = []

    def run(number: int) -> None:
        try:
            call(number)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in numbers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def arrive(point: str, rank: int) -> None:
    """This rank of a run has come to the point, whose name is used once in the run."""
    Path(os.environ[FOLDER], f"{point} {rank}").touch()


def await_arrival(point: str, ranks: Iterable[int]) -> None:
    """Returns when all these ranks have come to the point."""
    for rank in ranks:
        until(Path(os.environ[FOLDER], f"{point} {rank}").exists, f"rank {rank} comes to: {point}")


def meet(point: str, rank: int, ranks: Iterable[int]) -> None:
    """Returns when all these ranks of a run have come to the point, whose name is used once in the run.

    Before a rank fails on purpose: a barrier of the group holds the others a moment longer than the rank that leaves it
    first, and they would rightly lose that rank inside the barrier.
    """
    arrive(point, rank)
    await_arrival(point, ranks)
