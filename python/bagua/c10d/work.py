"""``Work``, the result of a collective for torch. A Work and its future complete even if no thread waits.

A future fails through a ``then`` that raises: ``Future.set_exception`` would hand C++ a Python object as the value,
which DDP's reducer would take for the reduced tensor.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.futures

from bagua.process_state import Record, at_exit, record

from .compiler_disable import uncompiled
from .profiling import event, profiled
from .torch_bindings import c10d

if TYPE_CHECKING:
    from torch.futures import Future

    from bagua.handle import AnyHandle

__all__ = ["Work", "seconds"]

#: Seconds that the interpreter's exit waits for continuations of futures, so that a blocked one does not hang it.
_EXIT_TIMEOUT = 5.0


class _Threads(Record):
    """Daemon threads that complete futures and run their continuations. No call waits for another one.

    concurrent.futures.ThreadPoolExecutor is not used because the interpreter joins its threads before the groups are
    left. A continuation that waits for an operation would then keep the process from ending.
    """

    def __init__(self) -> None:
        self._reset()
        # Runs after the exit hook that leaves the groups, which is registered later, when the first group joins.
        at_exit(self._wait_for_calls)

    def _reset(self) -> None:
        #: Calls that no thread has taken yet.
        self._calls: queue.Queue[Callable[[], None]] = queue.Queue()
        #: Number of idle threads, minus calls that have been added for them.
        self._idle = threading.Semaphore(0)

    def call(self, function: Callable[[], None]) -> None:
        """Calls ``function`` on an idle thread, or on a new one if all threads are busy, because each may block."""
        self._calls.put(function)
        if self._idle.acquire(blocking=False):
            return
        try:
            threading.Thread(target=self._serve_calls, name="bagua-future", daemon=True).start()
        except RuntimeError:
            # The system has no thread left, or the interpreter is exiting, when Python 3.12 starts none.
            self._call_next()

    def _serve_calls(self) -> None:
        while True:
            self._call_next()
            self._idle.release()

    def _call_next(self) -> None:
        try:
            # No variable refers to the function, so that an idle thread keeps no tensors of an operation alive.
            self._calls.get()()
        finally:
            self._calls.task_done()

    def _wait_for_calls(self) -> None:
        """Waits until all calls have returned, so that the interpreter does not end threads in a continuation."""
        ended = self._calls.all_tasks_done
        with ended:
            ended.wait_for(lambda: not self._calls.unfinished_tasks, _EXIT_TIMEOUT)

    def after_fork_in_child(self) -> None:
        """Starts without threads, which belong to the parent."""
        self._reset()


_threads = record(_Threads)

#: The constructor of torch's Work, called without ``super()``, which takes 0.1 us.
_construct: Callable[[Any], None] = c10d.Work.__init__


def seconds(limit: timedelta | float | None) -> float | None:
    """Returns torch's timeout in seconds; None for None, zero or less, which mean the default timeout."""
    if limit is None:
        return None
    found = limit.total_seconds() if isinstance(limit, timedelta) else float(limit)
    return found if found > 0 else None


@uncompiled
class Work(c10d.Work):  # type: ignore[misc]
    """One operation, or one that is done already if ``handle`` is None. The handle copies results to their destination.

    Under torch's profiler, waits are events called ``name`` + ``.wait``.
    """

    # Defaults are class attributes, because setting each of them would slow down every small operation.

    #: The operation; None if it is done already.
    handle: AnyHandle | None = None
    #: CUDA devices of the operation's tensors, each once.
    devices: Sequence[torch.device] = ()
    #: The Works that this one combines: see ``BaguaProcessGroup.together``.
    parts: Sequence[Work] = ()
    #: Called once with this Work, when a thread has waited for it or its future is done.
    on_asked: Callable[[Work], object] | None = None
    # Streams that see the results of an operation that is done already.
    _streams: Sequence[Any] = ()
    _error: Exception | None = None
    _future: Future[list[torch.Tensor]] | None = None

    def __init__(
        self,
        handle: AnyHandle | None,
        result: Sequence[torch.Tensor] = (),
        *,
        devices: Sequence[torch.device] = (),
        name: str = "work",
    ) -> None:
        _construct(self)
        self._name = name
        self.handle = handle
        self._result: list[torch.Tensor] = list(result)
        # Re-entrant, because a handle that is done calls back at once.
        self._lock = threading.RLock()
        if devices:
            self.devices = list(dict.fromkeys(devices))
            if handle is None:
                self._streams = [torch.cuda.current_stream(device) for device in self.devices]

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Blocks until the operation is done, and raises its error. Returns True.

        Raises BaguaTimeoutError after ``timeout``; the operation then continues.
        """
        handle = self.handle
        if handle is not None:
            # Checked here, because entering an event that does nothing would cost time.
            if profiled():
                with event(f"{self._name}.wait"):
                    handle.wait(seconds(timeout))
            else:
                handle.wait(seconds(timeout))
        if self.on_asked is not None:
            self.asked()
        if self._error is not None:
            raise self._error
        return True

    def synchronize(self) -> None:
        """Like :meth:`wait`, which orders torch's current stream after operations on a CUDA device."""
        self.wait()

    def is_completed(self) -> bool:
        """Returns True if the operation is done, failed or not, and the results are in place, on a CUDA device as well.

        There, the future is done earlier: when the ranks' part of the work is.
        """
        return self.handle is None or self.handle.is_completed()

    def is_success(self) -> bool:
        """Returns True if the operation is done and did not fail."""
        return self.is_completed() and self.exception() is None

    def exception(self) -> Exception | None:
        """Returns the error of the operation; None while it is running or if it succeeded."""
        if self._error is None and self.handle is not None and self.handle.is_completed():
            try:
                self.handle.wait()
            except Exception as error:
                self._error = error
        return self._error

    def result(self) -> list[torch.Tensor]:
        """Returns the tensors that the operation writes."""
        return self._result

    def get_future(self) -> Future[list[torch.Tensor]]:
        """Returns a future of :meth:`result`. Its continuations run on a thread of Bagua's when the operation is done.

        On a CUDA device, the future is done when the ranks' part of the work is; the device may still be busy. ``wait``
        of the future orders the current streams after the results. A continuation runs with streams of its own that see
        the results. As torch defines it, this order covers the tensors in the value. A rank that gets no tensors
        (``gather``, except on its root) must :meth:`wait` before it writes to its input.
        """
        with self._lock:
            if self._future is None:
                # torch orders streams only if it gets the devices, under this name.
                done: Future[None] = torch.futures.Future(devices=[*self.devices])
                future = done.then(self._outcome)

                def complete() -> None:
                    # The current device here becomes the current one in continuations.
                    with torch.cuda.device(self.devices[0]) if self.devices else contextlib.nullcontext():
                        done.set_result(None)

                def ended(error: Exception | None) -> None:
                    self._error = error or self._error
                    with self._lock:
                        has_no_continuation = self._future is None
                    if has_no_continuation:
                        complete()
                    else:
                        # A continuation may block, but this thread must complete other operations.
                        _threads.call(complete)

                if self.handle is None:
                    complete()
                else:
                    self.handle.then(ended)
                self._future = future
            return self._future

    def source_rank(self) -> int:
        """Returns the sender's rank in the group, for a receive from any source."""
        if self.parts:
            sources = {part.source_rank() for part in self.parts}
            if len(sources) > 1:
                raise RuntimeError(f"parts of the tensor came from different ranks: {sorted(sources)}")
            return sources.pop()
        senders: list[int | None] = getattr(self.handle, "senders", list)()
        if len(senders) != 1:
            raise RuntimeError("only a receive has a source rank")
        (sender,) = senders
        if sender is None:
            raise RuntimeError("the source rank is known when the message has come: wait first")
        return int(sender)

    _source_rank = source_rank

    def asked(self) -> None:
        """Reports that a thread has waited for this Work, or that its future is done."""
        call, self.on_asked = self.on_asked, None
        if call is not None:
            call(self)

    def _outcome(self, _: Future[None]) -> list[torch.Tensor]:
        self.asked()
        if self._error is not None:
            raise self._error
        if self.devices:
            # The streams that torch made current for this call are not ordered yet. torch records events on them next.
            if self.handle is not None:
                self.handle.wait()
            for stream in self._streams:
                torch.cuda.current_stream(stream.device).wait_stream(stream)
        return self._result
