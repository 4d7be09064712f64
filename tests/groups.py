"""Tests that every rank of a group runs, and that check on each rank what they find there; and what happens when a rank
waits in an operation.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Mapping
from typing import Any

import bagua
from tests.waits import arrive, until
from tests.world import World

#: Of these a test takes what it needs.
GIVEN = ("rank", "group")


def when_waiting(act: Callable[[], object]) -> None:
    """Calls this on another thread when the next operation of this rank has begun, which waits for other ranks."""

    def run() -> None:
        until(lambda: any(op["state"] == "started" for op in bagua.flight_recorder()[-1:]), "an operation begins")
        act()

    threading.Thread(target=run, daemon=True).start()


def arrive_waiting(point: str, rank: int) -> None:
    """This rank comes to the point, as by `arrive`, when it waits in its next operation."""
    when_waiting(lambda: arrive(point, rank))


def on_ranks(
    size: int = 0, *, timeout: float = 60.0, env: Mapping[str, str] | None = None
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Makes the test of a scenario that so many ranks run in their group, which they join before and leave afterwards.

    What a scenario takes beyond `GIVEN` are the test's own parameters. Of these `size` is the number of ranks,
    `transport` their BAGUA_TRANSPORT, and `options` are further options of the world. `timeout` is the group's, in
    seconds.
    """

    def made(scenario: Callable[..., None]) -> Callable[..., None]:
        names = list(inspect.signature(scenario).parameters)
        own = [name for name in names if name not in GIVEN]

        @functools.wraps(scenario)
        def run(rank: int, *arguments: Any) -> None:
            given = {"rank": rank, "group": bagua.init(timeout=timeout), **dict(zip(own, arguments, strict=True))}
            scenario(**{name: given[name] for name in names})
            bagua.shutdown()

        run.__qualname__ = f"{scenario.__qualname__}.on_ranks"

        @functools.wraps(scenario)
        def test(**arguments: Any) -> None:
            options = {"env": dict(env or {}), **arguments.get("options", {})}
            if "transport" in arguments:
                options["env"]["BAGUA_TRANSPORT"] = arguments["transport"]
            World(arguments.get("size", size), **options).run(run, *(arguments[name] for name in own))

        parameters = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in own]
        vars(test).update(__signature__=inspect.Signature(parameters), on_ranks=run)
        return test

    return made
