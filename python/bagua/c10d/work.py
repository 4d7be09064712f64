"""`Work`: what a verb returns to torch. It is done by itself, and its future too, whether or not somebody waits.

A future that fails is one whose `then` raised: `Future.set_exception` would hand C++ a Python object as the value,
which DDP's reducer takes for the reduced tensor.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.futures

from .profiling import event
from .torch_c10d import c10d
from .uncompiled import uncompiled

if TYPE_CHECKING:
    from torch.futures import Future

__all__ = ["Handle", "Together", "Work", "WorkHandle", "seconds"]


class Handle(Protocol):
    """An operation of the core that may still be running: `engine.Handle`, or several of them."""

    def wait(self, timeout: float | None = None) -> None:
        """Waits until it is done, or raises its error; after `timeout` seconds BaguaTimeoutError.

        Of an operation on a CUDA device: for the ranks' part, and orders torch's current stream there after the result.
        """

    def then(self, callback: Callable[[Exception | None], object], /) -> None:
        """Calls `callback(error)` once, when it is done. Orders no stream."""

    def is_completed(self) -> bool:
        """True when it is done, well or not."""


class _Completing(threading.local):
    """Of each thread: whether it runs the continuations of a future."""

    def __init__(self) -> None:
        self.now = False


_completing = _Completing()


def seconds(limit: timedelta | float | None) -> float | None:
    """Seconds of a timeout of torch; None for what means no timeout of its own: None, zero or less."""
    if limit is None:
        return None
    found = limit.total_seconds() if isinstance(limit, timedelta) else float(limit)
    return found if found > 0 else None


@contextlib.contextmanager
def _streams_of_its_own(devices: Sequence[torch.device]) -> Iterator[None]:
    """Other current streams on devices, for what orders the current stream where nobody wants that."""
    make: Any = torch.cuda.Stream
    with contextlib.ExitStack() as left:
        for device in devices:
            left.enter_context(torch.cuda.stream(make(device)))
        yield


@uncompiled
class Work(c10d.Work):  # type: ignore[misc]
    """One operation. `handle` None: it is done already. `finish` copies results to where the caller wants them.

    Under torch's profiler its waits are events, `name` with `.wait` behind it.
    """

    def __init__(
        self,
        handle: Handle | None,
        result: Sequence[torch.Tensor] = (),
        finish: Callable[[], None] | None = None,
        *,
        devices: Sequence[torch.device] = (),
        name: str = "work",
    ) -> None:
        super().__init__()
        self._name = name
        #: CUDA devices of its tensors, each once. The handle copies results there itself.
        self.devices = list(dict.fromkeys(devices))
        self._handle = handle
        # Of an operation that is done already: the streams that see its results.
        self._streams = [torch.cuda.current_stream(device) for device in self.devices if handle is None]
        self._result = list(result)
        # None once it ran.
        self._finish = finish
        self._error: Exception | None = None
        self._future: Future[list[torch.Tensor]] | None = None
        #: Called once with this Work, when a thread has waited for it or its future is done.
        self.on_asked: Callable[[Work], object] | None = None
        # Re-entrant: a handle that is done already calls back at once.
        self._lock = threading.RLock()
        if handle is not None and finish is not None:
            # Without anybody who waits the results are copied too.
            handle.then(self._ended)

    # --- what torch calls ---------------------------------------------------------------------------------------------

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Waits until it is done, or raises its error. After `timeout` BaguaTimeoutError, and the operation goes on."""
        if self._handle is not None:
            with event(f"{self._name}.wait"):
                self._handle.wait(seconds(timeout))
        self._asked()
        self._copy_results()
        if self._error is not None:
            raise self._error
        return True

    def synchronize(self) -> None:
        """As :meth:`wait`, which orders torch's current stream after operations on a CUDA device."""
        self.wait()

    def is_completed(self) -> bool:
        """True when it is done, well or not, and its results are where they belong: on a CUDA device, too.

        The future of an operation there is done earlier, when the ranks' part is.
        """
        if self._handle is not None and not self._handle.is_completed():
            return False
        return self._finish is None or self.exception() is not None

    def is_success(self) -> bool:
        """True when it is done and did not fail."""
        return self.is_completed() and self.exception() is None

    def exception(self) -> Exception | None:
        """What it failed with; None while it runs and after success."""
        if self._error is None and self._handle is not None and self._handle.is_completed():
            try:
                self._handle.wait()
            except Exception as error:
                self._error = error
        return self._error

    def result(self) -> list[torch.Tensor]:
        """The tensors that were written."""
        return self._result

    def get_future(self) -> Future[list[torch.Tensor]]:
        """A future of :meth:`result`. Continuations run when the operation is done, on a thread of their own.

        On a CUDA device it is done when the ranks' part is, whether or not the device has come so far. Its `wait`
        orders the current streams after the results, and a continuation has streams of its own that see them, as torch
        has it: a tensor in the value is what is ordered, and a rank that gets none (`gather`, but at its root) has to
        :meth:`wait` before it writes to its input.
        """
        with self._lock:
            if self._future is None:
                # By this name, and with the devices, without which torch orders no stream.
                done: Future[None] = torch.futures.Future(devices=[*self.devices])
                self._future = done.then(self._outcome)

                def complete(error: Exception | None) -> None:
                    self._ended(error)
                    before, _completing.now = _completing.now, True
                    try:
                        with torch.cuda.device(self.devices[0]) if self.devices else contextlib.nullcontext():
                            # The device that is current here is so in continuations.
                            done.set_result(None)
                    finally:
                        _completing.now = before

                self._when_done(complete)
            return self._future

    def source_rank(self) -> int:
        """The rank in the group whose message came, of a receive from anybody."""
        senders = getattr(self._handle, "senders", None)
        if senders is None:
            raise RuntimeError("only a receive has a source rank")
        (sender,) = senders()
        if sender is None:
            raise RuntimeError("the source rank is known when the message has come: wait first")
        return int(sender)

    _source_rank = source_rank

    def when_done(self, callback: Callable[[Exception | None], object]) -> None:
        """Calls `callback(error)` once, when it is done and its results have been copied."""

        def complete(error: Exception | None) -> None:
            self._ended(error)
            callback(self._error)

        self._when_done(complete)

    # --- how it ends --------------------------------------------------------------------------------------------------

    def _when_done(self, complete: Callable[[Exception | None], None]) -> None:
        handle = self._handle
        if handle is None:
            complete(self._error)
        elif not _completing.now:
            handle.then(complete)
        else:
            # A continuation of another future asks, and may wait for this one: it occupies the thread that would
            # complete it. PowerSGD's hook does.
            def complete_here() -> None:
                error: Exception | None = None
                try:
                    with _streams_of_its_own(self.devices):
                        handle.wait()
                except Exception as failure:
                    error = failure
                complete(error)

            threading.Thread(target=complete_here, name="bagua-future", daemon=True).start()

    def _ended(self, error: Exception | None) -> None:
        if error is not None:
            self._error = error
            return
        try:
            self._copy_results()
        except Exception as failure:
            self._error = failure

    def _copy_results(self) -> None:
        # Under the lock, so that a second thread returns after the copy too.
        with self._lock:
            if self._finish is not None:
                self._finish()
                self._finish = None

    def _asked(self) -> None:
        call, self.on_asked = self.on_asked, None
        if call is not None:
            call(self)

    def _outcome(self, _: Future[None]) -> list[torch.Tensor]:
        self._asked()
        if self._error is not None:
            raise self._error
        if self.devices:
            # Nothing has ordered the streams that torch has made current for this; it records events on them next.
            if self._handle is not None:
                self._handle.wait()
            for stream in self._streams:
                torch.cuda.current_stream(stream.device).wait_stream(stream)
        return self._result


class Together:
    """Several handles as one, which is done when all are."""

    def __init__(self, handles: Sequence[Handle]) -> None:
        self._handles = list(handles)

    def wait(self, timeout: float | None = None) -> None:
        """Waits for each in turn, up to `timeout` seconds for each."""
        for handle in self._handles:
            handle.wait(timeout)

    def is_completed(self) -> bool:
        """True when all are done."""
        return all(handle.is_completed() for handle in self._handles)

    def then(self, callback: Callable[[Exception | None], object], /) -> None:
        """Calls back with the first error when the last one is done."""
        if not self._handles:
            callback(None)
            return
        lock, left, first = threading.Lock(), [len(self._handles)], list[Exception]()

        def one_more(error: Exception | None) -> None:
            with lock:
                if error is not None:
                    first.append(error)
                left[0] -= 1
                last = left[0] == 0
            if last:
                callback(first[0] if first else None)

        for handle in self._handles:
            handle.then(one_more)


class WorkHandle:
    """A :class:`Work` as a handle, to be one of several."""

    def __init__(self, work: Work) -> None:
        self._work = work

    def wait(self, timeout: float | None = None) -> None:
        """As :meth:`Work.wait`."""
        self._work.wait(None if timeout is None else timedelta(seconds=timeout))

    def is_completed(self) -> bool:
        """As :meth:`Work.is_completed`."""
        return self._work.is_completed()

    def then(self, callback: Callable[[Exception | None], Any], /) -> None:
        """Calls back when its results have been copied."""
        self._work.when_done(callback)
