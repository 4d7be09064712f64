"""Operations on torch's tensors in the memory of CUDA devices, in the order of torch's current streams.

Of a tensor its device and its addresses are asked, of torch.cuda the current stream and events.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch

from bagua import config, engine
from bagua.handle import Handle

from .arrays import device_of

__all__ = ["DeviceHandle", "TensorStream", "current_stream", "refuse_capture"]

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


class TensorStream:
    """The device of tensors: an operation on them begins after what the current stream has at the call."""

    def __init__(self, device: torch.device, then_orders: bool = True) -> None:
        self._device = device
        self._then_orders = then_orders
        # The stream of the call.
        self._stream: torch.cuda.Stream | None = None

    @property
    def stream(self) -> torch.cuda.Stream:
        """That of the call: the one that was current when it was asked for first."""
        if self._stream is None:
            self._stream = torch.cuda.current_stream(self._device)
        return self._stream

    @property
    def device(self) -> engine.CudaDevice:
        """The device as the core knows it."""
        return device_of(self._device.index)

    @property
    def where(self) -> str:
        """The device, for error texts."""
        return str(self._device)

    def call(self, raw: engine.Communicator | engine.Engine, _: Sequence[TensorStream] = ()) -> engine.CudaCall:
        """See `DeviceStream.call`."""
        return raw.cuda_call(self.device, _number(self.stream), [], config.cuda_collective(), config.cuda_check())

    def call_messages(self, raw: engine.Communicator, _: Sequence[TensorStream] = ()) -> engine.CudaCall:
        """See `DeviceStream.call_messages`."""
        return raw.cuda_messages(self.device, _number(self.stream), [])

    def handle(self, done: engine.Handle | None, finish: Callable[[], None] | None = None) -> DeviceHandle | None:
        """The handle of an asynchronous operation; None of one that has returned, which has ordered its stream."""
        return None if done is None else DeviceHandle(done, self._device, self.stream, finish, self._then_orders)


class DeviceHandle(Handle[None]):
    """An operation on a device that may still be running.

    `copy` copies the results to where the caller wants them: once, on the stream of the verb, as what it reads belongs
    to it.
    """

    def __init__(
        self,
        raw: engine.Handle,
        device: torch.device,
        stream: torch.cuda.Stream,
        copy: Callable[[], None] | None,
        then_orders: bool,
    ) -> None:
        super().__init__([raw], copy)
        self._device = device
        self._stream = stream
        self._then_orders = then_orders
        make: Any = torch.cuda.Event
        #: Recorded behind the copies.
        self._copied: Any = None if copy is None else make()

    @property
    def raw(self) -> engine.Handle:
        """The operation as the extension knows it, which orders no stream of torch's."""
        raw: Any = self._parts[0]
        return cast("engine.Handle", raw)

    def wait(self, timeout: float | None = None, *, stream: int | None = None) -> None:
        """Waits for the ranks' part, or raises its error; after `timeout` seconds BaguaTimeoutError.

        Work that torch's current stream gets from now on sees the result, whether or not the device has come so far.
        """
        if self._copied is None:
            self.raw.wait(timeout, stream=current_stream(self._device))
            return
        self.raw.wait(timeout, stream=_number(self._stream))
        self._finished()
        torch.cuda.current_stream(self._device).wait_event(self._copied)

    def synchronize(self, timeout: float | None = None) -> None:
        """As `wait`, until the device is done too; the copies are waited for without a limit."""
        super().synchronize(timeout)
        if self._copied is not None:
            self._copied.synchronize()

    def then(self, callback: Callable[[Exception | None], object], /) -> None:
        """Calls `callback(error)` once when the ranks' part is done: `error` is None, or what `wait` raises.

        Work that the callback puts on the current stream of its thread sees the result. Not without `then_orders`: that
        stream is mostly the device's default stream, whose other work would wait for the result too.
        """
        super().then(callback)

    def is_completed(self) -> bool:
        """True when it is done, well or not, and the device with it and with the copies."""
        return super().is_completed() and (self._copied is None or bool(self._copied.query()))

    @property
    def _is_what_came(self) -> bool:
        return super()._is_what_came and not self._then_orders

    def _before_callback(self) -> None:
        self._finished()
        if self._then_orders:
            self.wait()

    def _run(self, finish: Callable[[], None]) -> None:
        with torch.cuda.stream(self._stream):
            self.raw.wait(stream=_number(self._stream))
            finish()
            self._copied.record()
