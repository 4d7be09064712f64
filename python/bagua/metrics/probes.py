"""Probes for a supervisor such as Kubernetes: does the interpreter run threads, and has the group been joined?"""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

from bagua.process_state import process

__all__ = ["Answer", "alive", "joined", "ready"]


class Answer(NamedTuple):
    """The result of a probe."""

    #: True for status 200, False for 503.
    ok: bool
    #: One line that says what was checked and found.
    text: str


def alive() -> Answer:
    """Says that this process answers, which needs the interpreter's lock. Other ranks notice if its heartbeat stops."""
    return Answer(True, "this process answers")


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
