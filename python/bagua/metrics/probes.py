"""What a supervisor such as Kubernetes asks a rank: whether its process makes progress, and whether it has joined."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

from bagua.lifecycle import process

__all__ = ["LIMIT_S", "Answer", "alive", "joined", "ready"]

#: Seconds in which every control thread has to run. It sends heartbeats every second or more often.
LIMIT_S = 3.0

#: Seconds between two looks at the threads.
_POLL_S = 0.02

#: Name of the control thread of each world of two ranks or more, as the core starts it.
_CONTROL = "bagua-control"

_TASKS = Path("/proc/self/task")


class Answer(NamedTuple):
    """The answer to a probe."""

    #: Whether it is status 200; else 503.
    ok: bool
    #: One line: what was looked at, and what was found.
    text: str


def alive(limit: float = LIMIT_S) -> Answer:
    """Whether the control threads of this process run: those that send heartbeats and report failures.

    It watches the kernel's count of their context switches in `/proc/self/task` until each has grown, for at most
    `limit` seconds; a control thread wakes every second, or five times in BAGUA_HEARTBEAT_TIMEOUT if that is more
    often. So `ok` means that each ran while this function did. It does not mean that the training makes progress, nor
    that a peer can be reached.

    A world of one rank has no control thread, and that of a group that is being joined does not run yet: `ok`, and the
    text says that none was looked at. Then it shows only that this function was called.
    """
    deadline = time.monotonic() + limit
    before: dict[str, int] = {}
    while True:
        try:
            now = _switches()
        except OSError as error:
            return Answer(False, f"cannot look at the control thread: {error}")
        group = joined()
        # The control thread of a group that is being joined sends no heartbeats yet.
        joins = group is None and not process.live_groups()
        if joins or (not now and (group is None or group.size == 1)):
            what = "no group has been joined" if group is None else "a world of one rank has none"
            return Answer(True, f"this server answers; no control thread was looked at: {what}")
        # One that has ended meanwhile is not in `now`, and one that began counts from here.
        waiting = [thread for thread, count in now.items() if before.setdefault(thread, count) == count]
        if now and not waiting:
            return Answer(True, f"control thread runs: {', '.join(sorted(now))}")
        if time.monotonic() >= deadline:
            if not now:
                return Answer(False, f"the default group has {group.size} ranks, but no control thread runs")
            return Answer(False, f"control thread {', '.join(sorted(waiting))} did not run for {limit} s")
        time.sleep(_POLL_S)


def ready() -> Answer:
    """Whether the default group has been joined, or torch.distributed's world of the backend "bagua", and has not
    failed.

    A failure that no call of this rank has raised yet gets its flight record here.
    """
    group = joined()
    if group is None:
        return Answer(False, "not joined: there is no default group, not yet or not any more")
    try:
        group._communicator.cause()
    except Exception as error:
        return Answer(False, f"the group {group.name!r} has failed: {error}")
    return Answer(True, f"joined: rank {group.rank} of {group.size}")


def joined() -> Any:
    """The default group, or torch.distributed's world of the backend "bagua"; None where there is neither."""
    if process.default_group is not None:
        return process.default_group
    # torch before 2.6 does not say that it destroys a group.
    torchs = sys.modules.get("torch.distributed")
    return process.torchs_world if torchs is not None and torchs.is_initialized() else None


def _switches() -> dict[str, int]:
    """Context switches of each control thread of this process, by thread id. OSError without /proc."""
    found = {}
    for task in _TASKS.iterdir():
        try:
            if (task / "comm").read_text().strip() != _CONTROL:
                continue
            lines = (task / "status").read_text().splitlines()
        except (FileNotFoundError, ProcessLookupError):
            # It has ended since the folder was read.
            continue
        found[task.name] = sum(int(line.partition(":")[2]) for line in lines if "ctxt_switches" in line)
    return found
