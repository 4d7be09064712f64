"""Trees of processes."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

__all__ = ["descendants", "kill_tree"]


def descendants(pid: int) -> list[int]:
    """The processes that a process has started, and those that they have, also in other sessions."""
    children: dict[int, list[int]] = {}
    for process, parent in _from_proc() if Path("/proc/self/stat").exists() else _from_ps():
        children.setdefault(parent, []).append(process)
    found = list(children.get(pid, ()))
    # Grows while it is walked.
    for child in found:
        found.extend(children.get(child, ()))
    return found


def _from_proc() -> Iterator[tuple[int, int]]:
    """Every process of this system with its parent, as Linux shows them."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                yield int(entry.name), int((entry / "stat").read_text().rpartition(")")[2].split()[1])


def _from_ps() -> Iterator[tuple[int, int]]:
    """The same by POSIX's command. OSError without it."""
    listed = subprocess.run(("ps", "-A", "-o", "pid=", "-o", "ppid="), capture_output=True, text=True, check=False)
    for line in listed.stdout.splitlines():
        process, parent = line.split()
        yield int(process), int(parent)


def kill_tree(pid: int) -> None:
    """SIGKILL to a process that has not been collected yet, and to its descendants."""
    # It starts nothing more while they are counted.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signal.SIGSTOP)
    for each in (*descendants(pid), pid):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(each, signal.SIGKILL)
