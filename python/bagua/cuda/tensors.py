"""Operations on torch tensors on CUDA devices, in the order of torch's current streams.

Only the tensor's device and address, and torch.cuda's current stream and events, are used.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch

from bagua import config, extension
from bagua.handle import Handle

from .arrays import device_of

__all__ = ["DeviceHandle", "TensorStream", "current_stream", "refuse_capture"]

#: The legacy stream, by DLPack's number; torch names it 0.
_LEGACY = 1


def _number(stream: torch.cuda.Stream) -> int:
    return stream.cuda_stream or _LEGACY


def current_stream(device: torch.device) -> int:
    """Returns the calling thread's current stream on a device, in DLPack's numbering."""
    return _number(torch.cuda.current_stream(device))


def refuse_capture(device: torch.device) -> None:
    """Raises NotImplementedError if the current stream is being captured into a graph. Does not disturb the capture."""
    device_of(device.index).refuse_capture([current_stream(device)])


class TensorStream:
    """The device of tensors. An operation on them begins after the work that the current stream has at the call."""

    def __init__(self, device: torch.device, then_orders: bool = True) -> None:
        self._device = device
        self._then_orders = then_orders
        self._stream: torch.cuda.Stream | None = None

    @property
    def stream(self) -> torch.cuda.Stream:
        """The stream of the call: the one that was current when this property was first read."""
        if self._stream is None:
            self._stream = torch.cuda.current_stream(self._device)
        return self._stream

    @property
    def device(self) -> extension.CudaDevice:
        return device_of(self._device.index)

    @property
    def where(self) -> str:
        return str(self._device)

    def call(
        self, raw: extension.Communicator | extension.Engine, _: Sequence[TensorStream] = ()
    ) -> extension.CudaCall:
        return raw.cuda_call(self.device, _number(self.stream), [], config.cuda_collective(), config.cuda_check())

    def call_messages(self, raw: extension.Communicator, _: Sequence[TensorStream] = ()) -> extension.CudaCall:
        return raw.cuda_messages(self.device, _number(self.stream), [])

    def handle(self, done: extension.Handle | None, finish: Callable[[], None] | None = None) -> DeviceHandle | None:
        """Returns the handle of an asynchronous operation; None if `done` is None, as the stream is then in order."""
        return None if done is None else DeviceHandle(done, self._device, self.stream, finish, self._then_orders)


class DeviceHandle(Handle[None]):
    """The handle of an operation on a device.

    `copy` copies the results to the caller's memory. It runs once, on the stream of the verb, which owns the memory
    that it reads.
    """

    def __init__(
        self,
        raw: extension.Handle,
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
        #: Event recorded after the copies.
        self._copied: Any = None if copy is None else make()

    @property
    def raw(self) -> extension.Handle:
        """The extension's handle, which does not order torch's streams."""
        raw: Any = self._parts[0]
        return cast("extension.Handle", raw)

    def wait(self, timeout: float | None = None, *, stream: int | None = None) -> None:
        """Blocks until the ranks' part is done. Raises its error, or BaguaTimeoutError after `timeout` seconds.

        Does not wait for the device: work that is put on torch's current stream after this call sees the result.
        """
        if self._copied is None:
            self.raw.wait(timeout, stream=current_stream(self._device))
            return
        self.raw.wait(timeout, stream=_number(self._stream))
        self._finished()
        torch.cuda.current_stream(self._device).wait_event(self._copied)

    def synchronize(self, timeout: float | None = None) -> None:
        """Blocks as `wait` does, and until the device and the copies are done. No timeout limits the copies."""
        super().synchronize(timeout)
        if self._copied is not None:
            self._copied.synchronize()

    def then(self, callback: Callable[[Exception | None], object], /) -> None:
        """Calls `callback(error)` once when the ranks' part is done: `error` is None, or what `wait` raises.

        With `then_orders`, work that the callback puts on its thread's current stream sees the result. That stream is
        usually the device's default stream, so its other work would wait for the result too; without `then_orders` it
        does not.
        """
        super().then(callback)

    def is_completed(self) -> bool:
        """Returns True if the operation is done or has failed, and the device and the copies are done too."""
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
