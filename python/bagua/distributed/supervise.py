"""Runs torchrun's agent as a child, so that every rank has ended a few seconds after Ctrl-C.

The agent forwards a signal to its ranks and waits for half a minute. This process waits for `_GRACE` seconds, after
SIGTERM for as long as the agent does, and then ends the agent with all that it has started. Where a signal has killed
the agent, it ends the ranks, whose parent it has become. It has one thread and imports no torch.
"""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Sequence

from bagua import config
from bagua.distributed import flags, pet
from bagua.distributed.processes import adopt_orphans, collect_orphans, how, kill_orphans, kill_tree, say
from bagua.distributed.signals import Signals

__all__ = ["supervise"]

# Seconds between the signal that ends the job and SIGKILL. After SIGTERM it is added to the agent's own time.
_GRACE = 2.0

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def supervise(which: str, arguments: Sequence[str], *, end_with_stdin: bool = False) -> int:
    """Runs `which` ("launch" or "run") with its arguments; the exit code.

    That of the agent: 0 when every rank has ended with 0, 1 when one has failed, 2 for arguments that cannot be used;
    130, 143 and 129 after Ctrl-C, SIGTERM and SIGHUP. `end_with_stdin`: the end of standard input ends the job as
    SIGHUP does, if it is a pipe or a socket; ssh closes it when its connection ends.
    """
    watched = sys.stdin.buffer if end_with_stdin and _is_pipe(0) else None
    command = [sys.executable, "-m", "bagua.distributed.agent", str(os.getpid()), which, *arguments]
    adopt_orphans()
    with Signals(signal.SIGCHLD, *_ENDING) as signals:
        # A session of its own: Ctrl-C reaches the ranks through this process alone.
        agent = subprocess.Popen(command, start_new_session=True, stdin=subprocess.DEVNULL if end_with_stdin else None)
        try:
            while (code := agent.poll()) is None:
                arrived = signals.wait(None, watched)
                ending = next((number for number in arrived if number in _ENDING), None)
                if ending is None and watched is not None and not arrived and not os.read(0, 65536):
                    ending = signal.SIGHUP
                if ending is not None:
                    _end(agent, ending, signals, _grace(ending, arguments))
                    return 128 + ending
                collect_orphans(agent.pid)
            if code >= 0:
                return code
            say(f"python -m bagua.distributed.{which}: torchrun's agent {how(code)}: all its ranks are ended")
            kill_orphans()
            return 128 - code
        finally:
            if agent.poll() is None:
                kill_tree(agent.pid)
                agent.wait()


def _grace(number: signal.Signals, arguments: Sequence[str]) -> float:
    """Seconds that the ranks have. SIGTERM comes from engines, which end a job themselves when their time is over."""
    if number is not signal.SIGTERM:
        return _GRACE
    given = flags.value(arguments, "shutdown_timeout") or config.text(pet.name("shutdown_timeout")) or ""
    # The agent refuses what is no number.
    return _GRACE + (int(given) if given.isdecimal() else pet.SHUTDOWN_TIMEOUT_S)


def _end(agent: subprocess.Popen[bytes], number: signal.Signals, signals: Signals, grace: float) -> None:
    """Forwards the signal; after the grace period, or at another signal, the caller ends what is left."""
    agent.send_signal(number)
    deadline = time.monotonic() + grace
    while agent.poll() is None and time.monotonic() < deadline:
        if any(arrived in _ENDING for arrived in signals.wait(deadline - time.monotonic())):
            return


def _is_pipe(descriptor: int) -> bool:
    try:
        mode = os.fstat(descriptor).st_mode
    except OSError:
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)
