"""How a rank ends: uncaught exceptions are told to the peers, the interpreter's exit leaves the groups, Ctrl-C ends
waits.

Nothing of this happens in a forked child, whose groups are its parent's.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
import weakref
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any

from bagua import engine

if TYPE_CHECKING:
    from bagua.verbs import Verbs

__all__ = ["install", "watch"]

# How long the interpreter's exit waits for callbacks of handles, in seconds: a callback that blocks must not hang it.
_LAST_CALLBACKS = 5.0

# Groups that hear of an uncaught exception.
_watched: weakref.WeakSet[Verbs] = weakref.WeakSet()
# The process that installed this; 0 before.
_home = 0
# What a forked child must not drop, because dropping it would speak to the parent's peers.
_kept: list[Any] = []


def watch(group: Verbs) -> None:
    """An uncaught exception is told to this group's other ranks."""
    _watched.add(group)


def install(shutdown: Callable[[], None], forget: Callable[[], None]) -> None:
    """Once per process: the hooks, that of exit with `shutdown`, that of a forked child with `forget`. Every time, on
    the main thread: Ctrl-C.
    """
    global _home
    _listen()
    if _home == os.getpid():
        return
    first = _home == 0
    _home = os.getpid()
    if not first:
        # A forked child that starts a group of its own has inherited the hooks.
        return

    def leave() -> None:
        if _home == os.getpid():
            try:
                shutdown()
            finally:
                # The operations that were pending have ended or end now. Their callbacks need the interpreter.
                engine.wait_for_callbacks(_LAST_CALLBACKS)

    atexit.register(leave)
    os.register_at_fork(after_in_child=lambda: _in_child(forget))
    before = sys.excepthook

    def excepthook(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        try:
            tell(kind, error)
        finally:
            before(kind, error, traceback)

    sys.excepthook = excepthook


def tell(kind: type[BaseException], error: BaseException) -> None:
    """Tells the other ranks of every group that this one raised; they get PeerRaisedError."""
    if _home != os.getpid():
        return
    # The world first: its ranks are everybody's.
    for group in sorted(_watched, key=lambda group: -group.size):
        group.communicator.raise_(kind.__name__, str(error))


def _listen() -> None:
    """Lets the core hear Ctrl-C while the main thread is in a blocking verb, unless somebody else uses the
    wakeup descriptor.
    """
    if threading.current_thread() is not threading.main_thread() or (_home and _home != os.getpid()):
        return
    descriptor = engine.listen_for_interrupts()
    before = signal.set_wakeup_fd(descriptor, warn_on_full_buffer=False)
    if before not in (-1, descriptor):
        signal.set_wakeup_fd(before)


def _in_child(forget: Callable[[], None]) -> None:
    # Before they are forgotten.
    _kept.extend(_watched)
    _watched.clear()
    forget()
    # The descriptor leads to the parent's ear.
    if threading.current_thread() is threading.main_thread():
        signal.set_wakeup_fd(-1)
