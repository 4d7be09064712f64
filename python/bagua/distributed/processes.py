"""Trees of processes, and what a launcher says of them."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

__all__ = ["adopt_orphans", "collect_orphans", "descendants", "how", "kill_orphans", "kill_tree", "say"]

_PR_SET_CHILD_SUBREAPER = 36


def adopt_orphans() -> None:
    """Makes this process the parent of every descendant whose own parent ends."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, ctypes.c_ulong(1), 0, 0, 0)


def collect_orphans(own: int) -> None:
    """Collects the children that have ended, up to `own`, which its owner collects."""
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) and ended.si_pid != own:
            os.waitpid(ended.si_pid, 0)


def kill_orphans() -> None:
    """SIGKILL to every child of this process, by which the kernel replaced their parents, and to their descendants."""
    own = os.getpid()
    refused: set[int] = set()
    # What they start meanwhile becomes a child of this process, too.
    while orphans := {process for process, parent in _all_processes() if parent == own} - refused:
        for orphan in orphans:
            kill_tree(orphan)
            try:
                os.kill(orphan, signal.SIGKILL)
            except PermissionError:
                refused.add(orphan)
            else:
                os.waitpid(orphan, 0)


def descendants(pid: int) -> list[int]:
    """The processes that a process has started, and those that they have, also in other sessions."""
    children: dict[int, list[int]] = {}
    for process, parent in _all_processes():
        children.setdefault(parent, []).append(process)
    found = list(children.get(pid, ()))
    # Grows while it is walked.
    for child in found:
        found.extend(children.get(child, ()))
    return found


def _all_processes() -> Iterator[tuple[int, int]]:
    """Yields every process of this system with its parent."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                # The name of any process is among them, and may be no text.
                yield int(entry.name), int((entry / "stat").read_bytes().rpartition(b")")[2].split()[1])


def how(code: int) -> str:
    """How a process with that exit code ended: -N after signal N."""
    if code > 0:
        return f"ended with exit code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"


def say(text: str) -> None:
    """One line at once, so that those of several programs on one terminal do not mix."""
    # A job does not end because its messages are not read any more.
    with contextlib.suppress(OSError):
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()


def kill_tree(pid: int) -> None:
    """SIGKILL to a process that has not been collected yet, and to its descendants."""
    # It starts nothing more while they are counted.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signal.SIGSTOP)
    for each in (*descendants(pid), pid):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(each, signal.SIGKILL)
