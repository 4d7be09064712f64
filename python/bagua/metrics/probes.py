"""Probes for a supervisor such as Kubernetes: do the control threads run, and has the group been joined?"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

from bagua.process_state import process

__all__ = ["LIMIT_S", "Answer", "alive", "joined", "ready"]

#: Seconds in which every control thread has to run. It normally wakes at least once a second.
LIMIT_S = 3.0

#: Seconds between two checks of the threads.
_POLL_S = 0.02

#: Name of the control thread of each world of two ranks or more, as the core starts it.
_CONTROL = "bagua-control"

_TASKS = Path("/proc/self/task")


class Answer(NamedTuple):
    """The result of a probe."""

    #: True for status 200, False for 503.
    ok: bool
    #: One line that says what was checked and found.
    text: str


def alive(limit: float = LIMIT_S) -> Answer:
    """Checks that this process's control threads run, which send heartbeats and report failures.

    Watches the kernel's count of their context switches in `/proc/self/task` until each has grown, for at most `limit`
    seconds. (A control thread wakes every second, or five times per BAGUA_HEARTBEAT_TIMEOUT if that is more often.)
    `ok` therefore means that each thread ran during this call. It does not mean that training makes progress, or that
    peers can be reached.

    In a world of one rank, or while no group has been joined, there is no control thread to check. The answer is then
    `ok`, and the text says so.
    """
    deadline = time.monotonic() + limit
    before: dict[str, int] = {}
    while True:
        try:
            now = _switches()
        except OSError as error:
            return Answer(False, f"cannot check the control thread: {error}")
        group = joined()
        # While a group is being joined, its control thread does not send heartbeats yet.
        joins = group is None and not process.live_groups()
        if joins or (not now and (group is None or group.size == 1)):
            what = "no group has been joined" if group is None else "a world of one rank has none"
            return Answer(True, f"this server answers; no control thread was checked: {what}")
        # A thread that has ended is not in `now`. A new thread counts from here.
        waiting = [thread for thread, count in now.items() if before.setdefault(thread, count) == count]
        if now and not waiting:
            return Answer(True, f"control thread runs: {', '.join(sorted(now))}")
        if time.monotonic() >= deadline:
            if not now:
                return Answer(False, f"the default group has {group.size} ranks, but no control thread runs")
            return Answer(False, f"control thread {', '.join(sorted(waiting))} did not run for {limit} s")
        time.sleep(_POLL_S)


def ready() -> Answer:
    """Checks that the default group, or torch.distributed's world of the backend "bagua", is joined and has not failed.

    Writes the flight record of a failure that no call of this rank has raised yet.
    """
    group = joined()
    if group is None:
        return Answer(False, "not joined: there is no default group now")
    try:
        group._communicator.cause()
    except Exception as error:
        return Answer(False, f"the group {group.name!r} has failed: {error}")
    return Answer(True, f"joined: rank {group.rank} of {group.size}")


def joined() -> Any:
    """Returns the default group, or torch.distributed's world of the backend "bagua"; None if there is neither."""
    if process.default_group is not None:
        return process.default_group
    # torch before 2.6 does not notify us when it destroys a group.
    torchs = sys.modules.get("torch.distributed")
    return process.torchs_world if torchs is not None and torchs.is_initialized() else None


def _switches() -> dict[str, int]:
    """Returns each control thread's context switches, by thread id. Raises OSError without /proc."""
    found = {}
    for task in _TASKS.iterdir():
        try:
            if (task / "comm").read_text().strip() != _CONTROL:
                continue
            lines = (task / "status").read_text().splitlines()
        except (FileNotFoundError, ProcessLookupError):
            # The thread has ended since the folder was read.
            continue
        found[task.name] = sum(int(line.partition(":")[2]) for line in lines if "ctxt_switches" in line)
    return found
