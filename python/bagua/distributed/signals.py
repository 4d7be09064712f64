"""Signals as values that a program waits for, so that none interrupts it at an arbitrary place."""

from __future__ import annotations

import os
import select
import signal
import time
from typing import Any

__all__ = ["Signals"]


class Signals:
    """Turns signals into values: inside the `with` block, they only make `wait` return. Use it on the main thread.

    It uses a handler and a pipe instead of `sigwait`, because libraries have already started threads that do not block
    these signals, and the kernel may deliver a signal to any of them.
    """

    def __init__(self, *numbers: signal.Signals) -> None:
        self._numbers = numbers
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Signals:
        self._read, self._write = os.pipe()
        for end in (self._read, self._write):
            os.set_blocking(end, False)
        self._wakeup = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        for number in self._numbers:
            # Respect nohup, which starts programs with SIGHUP ignored.
            if number is not signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
                self._before[number] = signal.signal(number, lambda *_: None)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._wakeup)
        os.close(self._read)
        os.close(self._write)

    def wait(self, timeout: float | None = None) -> list[signal.Signals]:
        """Returns the signals that have arrived since the last call, in order, or none after `timeout` seconds."""
        deadline = None if timeout is None else time.monotonic() + timeout
        poll = select.poll()
        poll.register(self._read, select.POLLIN)
        while True:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            poll.poll(None if left is None else left * 1000)
            arrived = self._arrived()
            if arrived or left == 0:
                return arrived

    def _arrived(self) -> list[signal.Signals]:
        try:
            return [signal.Signals(number) for number in os.read(self._read, 65536) if number in self._before]
        except BlockingIOError:
            return []
