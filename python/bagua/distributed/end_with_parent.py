"""Runs a command that the kernel kills (SIGKILL) when the process that started it ends.

    python -I -S end_with_parent.py PID COMMAND [ARGUMENT ...]

PID is the parent's process id. This program replaces itself with the command. prctl(PR_SET_PDEATHSIG) survives execve
and acts when the thread that started the process ends, so parents must start it on their main thread. It runs as a
file, so that it imports no package, and as a separate program, because `preexec_fn` would run Python in a fork of a
process that may have threads.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main(arguments: list[str]) -> None:
    """Replaces this process with the command. Raises OSError if the kernel refuses or the command cannot be run."""
    parent, *command = arguments
    ask(int(parent), signal.SIGKILL)
    # Python ignores these two signals, and the command would inherit that.
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    os.execvp(command[0], command)


def ask(parent: int, number: signal.Signals) -> None:
    """Asks the kernel to send this process a signal when the parent ends. Raises OSError if the kernel refuses."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(number), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    # Another process has adopted this one, because the parent ended before the kernel was asked.
    if os.getppid() != parent:
        os.kill(os.getpid(), number)


if __name__ == "__main__":
    main(sys.argv[1:])
