"""`Work`: what a verb returns to torch. It completes without being waited for; so does its future.

A future that fails is one whose `then` raised: `Future.set_exception` would hand C++ a Python object as the value,
which DDP's reducer takes for the reduced tensor.
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

from bagua.lifecycle import Record, at_exit, record

from .compiler_disable import uncompiled
from .profiling import event, profiled
from .torch_bindings import c10d

if TYPE_CHECKING:
    from torch.futures import Future

    from bagua.handle import AnyHandle

__all__ = ["DoneWork", "Work", "seconds"]

#: How long the interpreter's exit waits for continuations of futures, in seconds: one that blocks must not hang it.
_EXIT_TIMEOUT = 5.0


class _Threads(Record):
    """Daemon threads that complete futures, and so run their continuations. No call waits for another one.

    concurrent.futures.ThreadPoolExecutor is not used because the interpreter joins its threads before the groups are
    left. A continuation that waits for an operation would then keep the process from ending.
    """

    def __init__(self) -> None:
        self._reset()
        # Runs after the exit hook that leaves the groups, which is registered later, when the first group joins.
        at_exit(self._end)

    def _reset(self) -> None:
        #: Calls that no thread has taken.
        self._calls: queue.Queue[Callable[[], None]] = queue.Queue()
        #: Number of threads that wait for a call which has not been added yet.
        self._idle = threading.Semaphore(0)

    def call(self, function: Callable[[], None]) -> None:
        """Calls `function` on an idle thread, or on a new one if all are busy: each of them may be blocked."""
        self._calls.put(function)
        if self._idle.acquire(blocking=False):
            return
        try:
            threading.Thread(target=self._run, name="bagua-future", daemon=True).start()
        except RuntimeError:
            # The system has no thread left, or this is the interpreter's exit, during which Python 3.12 starts none.
            self._call_next()

    def _run(self) -> None:
        while True:
            self._call_next()
            self._idle.release()

    def _call_next(self) -> None:
        try:
            # No variable keeps the function, and with it the tensors of an operation, while the thread is idle.
            self._calls.get()()
        finally:
            self._calls.task_done()

    def _end(self) -> None:
        """Waits until all calls have returned. The interpreter would end the threads in the midst of a continuation."""
        ended = self._calls.all_tasks_done
        with ended:
            ended.wait_for(lambda: not self._calls.unfinished_tasks, _EXIT_TIMEOUT)

    def after_fork_in_child(self) -> None:
        """The threads are the parent's."""
        self._reset()


_threads = record(_Threads)

#: The constructor of torch's Work. Without `super()`, which costs 0.1 us.
_construct: Callable[[Any], None] = c10d.Work.__init__


def seconds(limit: timedelta | float | None) -> float | None:
    """Seconds of a timeout of torch; None for what means no timeout of its own: None, zero or less."""
    if limit is None:
        return None
    found = limit.total_seconds() if isinstance(limit, timedelta) else float(limit)
    return found if found > 0 else None


@uncompiled
class Work(c10d.Work):  # type: ignore[misc]
    """One operation. `handle` None: it is done already. The handle copies results to where the caller wants them.

    Under torch's profiler its waits are events, `name` with `.wait` behind it.
    """

    # Defaults are attributes of the class, because setting each of them costs time in every small operation.

    #: The operations; None when they are done already.
    handle: AnyHandle | None = None
    #: CUDA devices of its tensors, each once.
    devices: Sequence[torch.device] = ()
    #: The operations of a Work that stands for several: see `BaguaProcessGroup.together`.
    parts: Sequence[Work] = ()
    #: Called once with this Work, when a thread has waited for it or its future is done.
    on_asked: Callable[[Work], object] | None = None
    # Of an operation that is done already: the streams that see its results.
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
        # Re-entrant: a handle that is done already calls back at once.
        self._lock = threading.RLock()
        if devices:
            self.devices = list(dict.fromkeys(devices))
            if handle is None:
                self._streams = [torch.cuda.current_stream(device) for device in self.devices]

    # --- what torch calls ---------------------------------------------------------------------------------------------

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Waits until it is done, or raises its error. After `timeout` BaguaTimeoutError, and the operation goes on."""
        handle = self.handle
        if handle is not None:
            # A handle that is not timed costs less without a `with`.
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
        """As :meth:`wait`, which orders torch's current stream after operations on a CUDA device."""
        self.wait()

    def is_completed(self) -> bool:
        """True when it is done, well or not, and its results are where they belong: on a CUDA device, too.

        The future of an operation there is done earlier, when the ranks' part is.
        """
        return self.handle is None or self.handle.is_completed()

    def is_success(self) -> bool:
        """True when it is done and did not fail."""
        return self.is_completed() and self.exception() is None

    def exception(self) -> Exception | None:
        """What it failed with; None while it runs and after success."""
        if self._error is None and self.handle is not None and self.handle.is_completed():
            try:
                self.handle.wait()
            except Exception as error:
                self._error = error
        return self._error

    def result(self) -> list[torch.Tensor]:
        """The tensors that were written."""
        return self._result

    def get_future(self) -> Future[list[torch.Tensor]]:
        """Returns a future of :meth:`result`. Its continuations run when the operation is done, on a thread of Bagua's.

        On a CUDA device the future is done when the ranks' part is, whether or not the device has come so far. Its
        `wait` orders the current streams after the results, and a continuation has streams of its own that see them, as
        torch has it: a tensor in the value is what is ordered, and a rank that gets none (`gather`, but at its root)
        has to :meth:`wait` before it writes to its input.
        """
        with self._lock:
            if self._future is None:
                # torch orders streams only if it is given the devices, and by this name.
                done: Future[None] = torch.futures.Future(devices=[*self.devices])
                future = done.then(self._outcome)

                def complete() -> None:
                    # The device that is current here is the current one in continuations.
                    with torch.cuda.device(self.devices[0]) if self.devices else contextlib.nullcontext():
                        done.set_result(None)

                def ended(error: Exception | None) -> None:
                    self._error = error or self._error
                    with self._lock:
                        has_no_continuation = self._future is None
                    if has_no_continuation:
                        complete()
                    else:
                        # A continuation may block. The thread that calls this has to end other operations meanwhile.
                        _threads.call(complete)

                if self.handle is None:
                    complete()
                else:
                    self.handle.then(ended)
                self._future = future
            return self._future

    def source_rank(self) -> int:
        """The rank in the group whose message came, of a receive from any source."""
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

    # --- how it ends --------------------------------------------------------------------------------------------------

    def asked(self) -> None:
        """Reports that a thread has waited for it, or that its future is done."""
        call, self.on_asked = self.on_asked, None
        if call is not None:
            call(self)

    def _outcome(self, _: Future[None]) -> list[torch.Tensor]:
        self.asked()
        if self._error is not None:
            raise self._error
        if self.devices:
            # Nothing has ordered the streams that torch has made current for this; it records events on them next.
            if self.handle is not None:
                self.handle.wait()
            for stream in self._streams:
                torch.cuda.current_stream(stream.device).wait_stream(stream)
        return self._result


@uncompiled
class DoneWork(Work):
    """An operation that has returned, on tensors of the host. Half of what a small one costs would be a whole Work.

    Its maker sets the result, because a constructor in Python takes as long as torch's.
    """

    _name = "work"
    _lock = threading.RLock()

    __init__ = c10d.Work.__init__

    def wait(self, timeout: timedelta | None = None) -> bool:
        """It is done."""
        return True
