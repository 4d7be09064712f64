"""`torch.futures.Future` with devices for `tests/cuda/torch_on_sim.py`: the true one asks the CUDA runtime.

It keeps to the rules that torch documents for CUDA tensors:

- `set_result` records an event on the current stream of each device that a tensor of the value is on, and of no other.
- `wait` blocks until the value is there, and has the current streams wait for these events; the host does not.
- A callback runs on the thread that completes the future, or at once; under a stream of torch's pool on each of the
  future's devices, which waits for these events, and with the device as the current one that was it in `set_result`.
- What `then` returns has the same devices.
- A tensor in the value that is on none of the devices is an error. Without devices nothing is ordered.
- Tensors of the value belong to the streams that were ordered, as `record_stream` has it.
"""

from __future__ import annotations

import contextlib
import copy
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.futures
from torch._jit_internal import _extract_tensors  # type: ignore[attr-defined]

from tests.cuda import torch_streams

__all__ = ["Future", "collect_all", "install", "wait_all"]

_TrueFuture: Any = torch.futures.Future
#: As many as torch has on a device.
_POOL = 32


class _Pool:
    """Streams of the devices, each in its turn."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._made: dict[int, list[torch_streams.Stream]] = {}
        self._next: dict[int, int] = {}

    def take(self, device: int) -> torch_streams.Stream:
        with self._lock:
            made, number = self._made.setdefault(device, []), self._next.get(device, 0)
            if number == len(made):
                made.append(torch_streams.Stream(device))
            self._next[device] = (number + 1) % _POOL
            return made[number]


_pool = _Pool()


class Future(_TrueFuture):  # type: ignore[misc]
    """torch.futures.Future on simulated devices. The value and the waiting are the true one's, on the CPU."""

    def __init__(self, *, devices: Sequence[Any] | None = None) -> None:
        super().__init__()
        self._devices = sorted({torch_streams._runtime().device(device) for device in devices or ()})
        self._tensors: list[torch.Tensor] = []
        self._events: list[tuple[int, torch_streams.Event]] = []
        # The current device of whoever completed it.
        self._device = 0

    def __class_getitem__(cls, item: Any) -> Any:
        """`Future[…]` is the same type as before, by which annotations are compared."""
        return _TrueFuture[item]

    def set_result(self, result: Any) -> None:
        if self._devices:
            tensors = [tensor for tensor in _extract_tensors(result) if tensor.is_cuda]
            places = sorted({tensor.get_device() for tensor in tensors})
            strange = [place for place in places if place not in self._devices]
            if strange:
                self._fail(ValueError(f"the result has tensors on devices {strange}, the future only {self._devices}"))
                return
            self._device = torch.cuda.current_device()
            self._tensors = tensors
            self._events = [(place, torch_streams.current_stream(place).record_event()) for place in places]
        super().set_result(result)

    def set_exception(self, result: Any) -> None:
        assert isinstance(result, Exception)
        self._fail(result)

    def wait(self) -> Any:
        value = super().wait()
        self._order()
        return value

    def then(self, callback: Callable[[Any], Any]) -> Future:
        child = Future(devices=self._devices)

        def complete(done: Future) -> None:
            try:
                value = callback(done)
            except Exception as error:
                # Of an exception of Python torch keeps the text.
                child._fail(RuntimeError(f"{type(error).__name__}: {error}"))
            else:
                child.set_result(value)

        self.add_done_callback(complete)
        return child

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        def call(_: Any) -> None:
            with contextlib.ExitStack() as left:
                for place in self._devices:
                    left.enter_context(torch_streams.StreamContext(_pool.take(place)))
                if self._devices:
                    left.enter_context(torch_streams.DeviceContext(self._device))
                self._order()
                callback(self)

        super().add_done_callback(call)

    def _order(self) -> None:
        for place, event in self._events:
            event.wait(torch_streams.current_stream(place))
        for tensor in self._tensors:
            tensor.record_stream(torch_streams.current_stream(tensor.device))  # type: ignore[arg-type]

    def _fail(self, error: Exception) -> None:
        if self._devices:
            self._device = torch.cuda.current_device()

        error = error.with_traceback(None)

        def unwrap(_: Any) -> None:
            # A copy, or its traceback would keep the waiting frame alive, and no collector finds a cycle through C++.
            raise copy.copy(error) from None

        self._set_unwrap_func(unwrap)
        super().set_result(None)


def collect_all(futures: Sequence[Any]) -> Any:
    """torch.futures.collect_all. Its value has futures, no tensors: their own `wait` orders streams."""
    found = Future(devices=[place for future in futures for place in getattr(future, "_devices", ())])
    lock, left = threading.Lock(), [len(futures)]

    def one_more(_: Any) -> None:
        with lock:
            left[0] -= 1
            last = left[0] == 0
        if last:
            found.set_result(list(futures))

    for future in futures:
        future.add_done_callback(one_more)
    return found


def wait_all(futures: Sequence[Any]) -> list[Any]:
    """torch.futures.wait_all."""
    return [future.wait() for future in collect_all(futures).wait()]


def install() -> None:
    """Puts them behind torch.futures, whose names are asked where a future is made."""
    module: Any = torch.futures
    module.Future, module.collect_all, module.wait_all = Future, collect_all, wait_all
