"""Trees of processes."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

__all__ = ["descendants", "kill_tree"]


def descendants(pid: int) -> list[int]:
    """The processes that a process has started, and those that they have, also in other sessions."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                children.setdefault(parent, []).append(int(entry.name))
    found = list(children.get(pid, ()))
    # Grows while it is walked.
    for child in found:
        found.extend(children.get(child, ()))
    return found


def kill_tree(pid: int) -> None:
    """SIGKILL to a process that has not been collected yet, and to its descendants."""
    # It starts nothing more while they are counted.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signal.SIGSTOP)
    for each in (*descendants(pid), pid):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(each, signal.SIGKILL)
