"""Questions about processes that tests, or their ranks, have started."""

from __future__ import annotations

from pathlib import Path

from tests.waits import until


def stat_of(pid: int) -> list[str] | None:
    """Returns the kernel's status of a process: its state, its parent and more. `None` if there is no such process.

    It may end between the opening of the file and the reading, which then says that there is no such process.
    """
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None


def is_running(pid: int) -> bool:
    """Returns True if the process exists and is not a zombie, which only waits for its parent."""
    stat = stat_of(pid)
    return stat is not None and stat[0] not in "ZX"


def pid_of(path: Path) -> int:
    """The process that a rank has named, once it has."""
    until(path.exists, f"{path.name} is written")
    return int(path.read_text())
