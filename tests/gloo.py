"""The end of a process that uses torch's gloo groups.

A thread of gloo that has completed an operation lets go of the operation's tensors later. Where Python ends meanwhile,
the thread asks for Python's lock, is ended there, and takes the process with it: "terminate called without an active
exception", exit code -6 (https://github.com/pytorch/pytorch/pull/179291). `destroy_process_group` does not prevent it
while a model of torch's DistributedDataParallel holds the group. So processes of tests wait for these threads.
"""

from __future__ import annotations

import atexit
import os
import runpy
import sys
import time
from pathlib import Path

#: The threads of torch's gloo groups that run operations, by their name in Linux.
THREADS = "pt_gloo_runloop\n"

#: A thread sleeps between two operations, but also while it waits for Python's lock, which is free while we sleep.
PAUSE_S = 0.001


def _busy() -> bool:
    for thread in Path("/proc/self/task").iterdir():
        try:
            if (thread / "comm").read_text() == THREADS and ") S " not in (thread / "stat").read_text():
                return True
        except OSError:  # it has ended
            continue
    return False


def wait_for_threads() -> None:
    """Returns when no thread of a gloo group does anything, seen twice in a row."""
    idle = 0
    while idle < 2:
        time.sleep(PAUSE_S)
        idle = 0 if _busy() else idle + 1


def arguments(script: Path) -> list[str]:
    """Returns the arguments for Python to run a file that uses gloo alone."""
    return [str(Path(__file__)), str(script)]


def end_in_order() -> None:
    """Lets this process wait for the threads of gloo when it ends, after all exit hooks that come later than this."""
    atexit.register(wait_for_threads)


if __name__ == "__main__":
    end_in_order()
    sys.argv = sys.argv[1:]
    sys.path[0] = os.path.dirname(sys.argv[0])
    runpy.run_path(sys.argv[0], run_name="__main__")
