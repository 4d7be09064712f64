"""The lines that a launcher prints about the processes that it started."""

from __future__ import annotations

import contextlib
import signal
import sys

__all__ = ["how", "say"]


def how(code: int) -> str:
    """Returns how a process with an exit code ended; -N means signal N."""
    if code > 0:
        return f"ended with exit code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"


def say(text: str) -> None:
    """Writes one line to standard error at once, so that lines of several programs do not mix."""
    # A job does not end because nobody reads its messages any more.
    with contextlib.suppress(OSError):
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()
