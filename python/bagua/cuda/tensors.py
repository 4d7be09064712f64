"""Operations on torch's tensors in the memory of CUDA devices, in the order of torch's current streams.

Of a tensor its device and its addresses are asked, of torch.cuda the current stream and events.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

from bagua import config, engine

from .arrays import device_of

__all__ = ["DeviceHandle", "TensorPlace", "current_stream", "refuse_capture"]

#: The legacy stream, by DLPack's number; torch names it 0.
_LEGACY = 1


def _number(stream: torch.cuda.Stream) -> int:
    return stream.cuda_stream or _LEGACY


def current_stream(device: torch.device) -> int:
    """The current stream of the calling thread there, by DLPack's numbers."""
    return _number(torch.cuda.current_stream(device))


def refuse_capture(device: torch.device) -> None:
    """NotImplementedError when the current stream is being captured into a graph; leaves the capture as it is."""
    device_of(device.index).refuse_capture([current_stream(device)])


class TensorPlace:
    """The device's side of one operation on tensors there: it begins after what the current stream has at the call."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        #: The stream of the call.
        self.stream = torch.cuda.current_stream(device)

    def call(self, raw: engine.Communicator | engine.Engine) -> engine.CudaCall:
        """What the verbs of the extension take. NotImplementedError when the stream is being captured."""
        wish, check = config.cuda_collective(), config.cuda_check()
        return raw.cuda_call(device_of(self.device.index), _number(self.stream), [], wish, check)

    def call_messages(self, raw: engine.Communicator) -> engine.CudaCall:
        """As `call`, for messages."""
        return raw.cuda_messages(device_of(self.device.index), _number(self.stream), [])

    def handle(
        self, raw: engine.Handle | None, copy: Callable[[], None] | None = None, *, then_orders: bool = True
    ) -> DeviceHandle | None:
        """The handle of an asynchronous operation; None of one that has returned, which has ordered its stream.

        `copy` copies the results to where the caller wants them; for `then_orders` see `DeviceHandle.then`.
        """
        if raw is None:
            return None
        if copy is None:
            return DeviceHandle(raw, self.device, then_orders)
        return CopyingHandle(raw, self, copy, then_orders)


class DeviceHandle:
    """An operation on a device that may still be running."""

    def __init__(self, raw: engine.Handle, device: torch.device, then_orders: bool) -> None:
        self._raw = raw
        self._device = device
        self._then_orders = then_orders

    @property
    def raw(self) -> engine.Handle:
        """The operation as the extension knows it, which orders no stream of torch's."""
        return self._raw

    def wait(self, timeout: float | None = None) -> None:
        """Waits for the ranks' part, or raises its error; after `timeout` seconds BaguaTimeoutError.

        Work that torch's current stream gets from now on sees the result, whether or not the device has come so far.
        """
        self._raw.wait(timeout, stream=current_stream(self._device))

    def synchronize(self, timeout: float | None = None) -> None:
        """As `wait`, until the device is done too, so that the host may read what it has written."""
        self._raw.synchronize(timeout)

    def senders(self) -> list[int | None]:
        """Of received messages: the ranks that sent them; None for one that has not come."""
        return self._raw.senders()

    def then(self, callback: Callable[[Exception | None], object], /) -> None:
        """Calls `callback(error)` once when the ranks' part is done: `error` is None, or what `wait` raises.

        Work that the callback puts on the current stream of its thread sees the result. Not without `then_orders`: that
        stream is mostly the device's default stream, whose other work would wait for the result too.
        """
        if not callable(callback):
            raise TypeError(f"{callback!r} is not callable")

        def ended(error: Exception | None) -> None:
            if error is None:
                try:
                    self._before_callback()
                except Exception as failure:
                    error = failure
            callback(error)

        self._raw.then(ended)

    def _before_callback(self) -> None:
        if self._then_orders:
            self.wait()

    def is_completed(self) -> bool:
        """True when it is done, well or not, and the device with it."""
        return self._raw.is_completed()


class CopyingHandle(DeviceHandle):
    """An operation on a device whose results have to be copied to where the caller wants them.

    The copies are made once, at the first call of this, on the stream of the verb: what they read belongs to it.
    """

    def __init__(self, raw: engine.Handle, place: TensorPlace, copy: Callable[[], None], then_orders: bool) -> None:
        super().__init__(raw, place.device, then_orders)
        self._stream = place.stream
        # None once it ran.
        self._copy: Callable[[], None] | None = copy
        #: Recorded behind the copies.
        make: Any = torch.cuda.Event
        self._copied: Any = make()
        self._lock = threading.Lock()

    def _enqueue(self) -> None:
        # Under the lock, so that a second thread returns after the copies were enqueued too.
        with self._lock:
            copy, self._copy = self._copy, None
            if copy is not None:
                with torch.cuda.stream(self._stream):
                    super().wait()
                    copy()
                    self._copied.record()

    def wait(self, timeout: float | None = None) -> None:
        """As :meth:`DeviceHandle.wait`, for the copies too."""
        self._raw.wait(timeout, stream=_number(self._stream))
        self._enqueue()
        torch.cuda.current_stream(self._device).wait_event(self._copied)

    def _before_callback(self) -> None:
        self._enqueue()
        super()._before_callback()

    def synchronize(self, timeout: float | None = None) -> None:
        """As :meth:`DeviceHandle.synchronize`; the copies are waited for without a limit."""
        self._raw.synchronize(timeout)
        self._enqueue()
        self._copied.synchronize()

    def is_completed(self) -> bool:
        """True when it is done, well or not, and the device with it and with the copies."""
        if not self._raw.is_completed():
            return False
        try:
            self._enqueue()
        except Exception:  # it failed
            return True
        return bool(self._copied.query())
