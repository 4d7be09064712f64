"""What happens to a rank or to a line, and whom an error may name then. Adding a fault is adding a class here."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import signal
import socket
import time
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from tests.chaos.cell import Cell, Stage

#: Of the system call of that name, on all architectures (include/uapi/asm-generic/unistd.h).
_PIDFD_GETFD = 438


class Fault:
    """A fault; an instance belongs to one cell."""

    name: ClassVar[str]
    #: The results are right and nothing raises.
    harmless: ClassVar[bool] = False
    #: Happens on the lines between hosts.
    on_the_network: ClassVar[bool] = False
    #: The rank that it hits does not live on.
    kills: ClassVar[bool] = False
    #: Seconds of the heartbeat timeout that pass before it can be noticed.
    heartbeats: ClassVar[int] = 0

    def strike(self, stage: Stage) -> float:
        """Makes it happen. The moment, in seconds of the monotonic clock."""
        raise NotImplementedError

    def end(self, stage: Stage) -> None:
        """Makes it go away, once all ranks that can have noticed it."""

    def may_be_named(self, cell: Cell, by: int) -> set[int]:
        """The ranks that the error of rank `by` may name."""
        return {cell.victim}


class Kill(Fault):
    name = "SIGKILL"
    kills = True

    def strike(self, stage: Stage) -> float:
        at = time.monotonic()
        os.kill(stage.run.ranks[stage.cell.victim].pid, signal.SIGKILL)
        return at


class Freeze(Fault):
    name = "SIGSTOP, SIGCONT"
    heartbeats = 1

    def strike(self, stage: Stage) -> float:
        at = time.monotonic()
        os.kill(stage.run.ranks[stage.cell.victim].pid, signal.SIGSTOP)
        return at

    def end(self, stage: Stage) -> None:
        os.kill(stage.run.ranks[stage.cell.victim].pid, signal.SIGCONT)


FAULTS: dict[str, type[Fault]] = {fault.name: fault for fault in (Kill, Freeze)}
