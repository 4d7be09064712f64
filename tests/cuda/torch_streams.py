"""torch.cuda on the simulated driver: devices, memory, streams and events, for `tests/cuda/torch_on_sim.py`.

As in torch, the current device and the current streams are a thread's own, stream 0 is the legacy stream and the
default one, other streams are not ordered with it, and memory belongs to the stream that was current when it was made:
it is given back in that stream's order, and behind the streams that `record_stream` named.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import os
import threading
import warnings
from collections.abc import Sequence
from typing import Any

import torch

from tests.cuda.driver import Driver

_NOT_READY = 600


class Runtime:
    """The simulated driver of this process, with the primary contexts of its devices, as torch would use it."""

    def __init__(self) -> None:
        self.driver = Driver()
        self.driver.cuInit(0)
        self.devices = int(self.driver.get("cuDeviceGetCount", kind=ctypes.c_int32))
        self.contexts = [int(self.driver.get("cuDevicePrimaryCtxRetain", each)) for each in range(self.devices)]
        self.local = _Local()
        #: By address.
        self.allocations: dict[int, Allocation] = {}
        self.default = [Stream._of(0, each) for each in range(self.devices)]
        #: How often bytes of a device were read because the program wanted them on the host.
        self.reads_to_the_host = 0
        self._streams: list[tuple[int, int]] = []
        self._readers: list[_Reader] = []
        self._closed = False

    # --- the calling thread's place -----------------------------------------------------------------------------------

    def device(self, device: Any = None) -> int:
        """The number of a device; of the current one for None and a device without a number."""
        if device is None:
            return self.local.device
        if isinstance(device, int):
            number = device
        else:
            device = torch.device(device)
            if device.type != "cuda":
                raise ValueError(f"Expected a cuda device, but got: {device}")
            number = self.local.device if device.index is None else device.index
        if not 0 <= number < self.devices:
            raise RuntimeError("CUDA error: invalid device ordinal")
        return number

    def stream(self, device: int) -> Stream:
        """The calling thread's current stream of a device."""
        return self.local.streams.get(device) or self.default[device]

    def on(self, device: int) -> _Current:
        """A device's context is the thread's meanwhile."""
        return _Current(self, device)

    # --- memory -------------------------------------------------------------------------------------------------------

    def allocate(self, size: int, device: int) -> Any:
        """Device memory as a ctypes array, which frees it when it goes."""
        with self.on(device):
            stream = self.stream(device)
            address = ctypes.c_uint64()
            # An empty tensor has memory too, so that its device is known.
            self.driver.cuMemAllocAsync(ctypes.byref(address), max(size, 1), ctypes.c_void_p(stream.cuda_stream))
        kind = type("_Bytes", (ctypes.c_char * max(size, 1),), {"__del__": _free})
        buffer = kind.from_address(address.value)
        buffer.allocation = self.allocations[address.value] = Allocation(address.value, device, stream)
        return buffer

    def free(self, allocation: Allocation) -> None:
        """Gives memory back in the order of its stream and of those that used it."""
        del self.allocations[allocation.address]
        with self.on(allocation.device):
            if self._closed:
                self.driver.cuMemFree_v2(allocation.address)
                return
            for other in allocation.used_by:
                allocation.stream.wait_stream(other)
            self.driver.cuMemFreeAsync(allocation.address, ctypes.c_void_p(allocation.stream.cuda_stream))

    def read(self, ranges: Sequence[tuple[int, int, int]], device: int, *, again: bool) -> None:
        """Copies ranges (address on the device, on the host, bytes) as work of the current stream, and waits for it.

        Asks whether it is done, again and again: the driver counts no wait of the host.

        `again`: as an operation of a GPU would, which has not begun when its call returns, the stream reads the ranges
        once more, late. It is a fault when the program has written to them meanwhile.
        """
        reader = self.local.readers.get(device)
        if reader is None:
            reader = self.local.readers[device] = _Reader(self, device)
            self._readers.append(reader)
        with self.on(device):
            reader.read(ranges, ctypes.c_void_p(self.stream(device).cuda_stream), again)

    def write(self, ranges: Sequence[tuple[int, int, int]], device: int) -> None:
        """Enqueues copies (address on the device, on the host, bytes) on the current stream.

        The host's bytes are read now.
        """
        with self.on(device):
            stream = ctypes.c_void_p(self.stream(device).cuda_stream)
            for to, from_, size in ranges:
                self.driver.cuMemcpyHtoDAsync_v2(to, ctypes.c_void_p(from_), size, stream)

    def copy(self, to: int, from_: int, size: int, device: int) -> None:
        """Enqueues a copy on a device on the current stream."""
        with self.on(device):
            self.driver.cuMemcpyDtoDAsync_v2(to, from_, size, ctypes.c_void_p(self.stream(device).cuda_stream))

    # --- streams ------------------------------------------------------------------------------------------------------

    def new_stream(self, device: int) -> int:
        """A CUstream, which exists until the process ends, as torch's do."""
        with self.on(device):
            stream = self.driver.stream()
        self._streams.append((stream, device))
        return stream

    def close(self) -> None:
        """Waits for the devices, and gives back what is not the tensors'. For the end of the process."""
        gc.collect()
        for device in range(self.devices):
            with self.on(device):
                self.driver.cuCtxSynchronize()
        self._closed = True
        for reader in self._readers:
            with self.on(reader.device):
                reader.close()
        for stream, device in self._streams:
            with self.on(device):
                self.driver.cuStreamDestroy_v2(stream)


class Allocation:
    """Memory of a device, and to which streams it belongs."""

    def __init__(self, address: int, device: int, stream: Stream) -> None:
        self.address, self.device, self.stream = address, device, stream
        #: Streams that `record_stream` named.
        self.used_by: set[Stream] = set()


def _free(buffer: Any) -> None:
    _runtime().free(buffer.allocation)


class _Local(threading.local):
    def __init__(self) -> None:
        self.device = 0
        self.streams: dict[int, Stream] = {}
        self.readers: dict[int, _Reader] = {}


class _Current:
    """Makes a device's context current for a while."""

    def __init__(self, runtime: Runtime, device: int) -> None:
        self.runtime, self.device = runtime, device

    def __enter__(self) -> None:
        self.runtime.driver.cuCtxPushCurrent_v2(self.runtime.contexts[self.device])

    def __exit__(self, *_: object) -> None:
        self.runtime.driver.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))


class _Reader:
    """Pinned memory and an event of one thread, for reading."""

    def __init__(self, runtime: Runtime, device: int) -> None:
        self.driver, self.device = runtime.driver, device
        with runtime.on(device):
            self.event = self.driver.event()
            self.pinned = self.driver.pinned(1 << 16)
        #: Readings that may still be to come: their streams, where to, and what they must find.
        self._late: list[tuple[int | None, Any, bytes]] = []
        #: Pinned memory that no reading uses.
        self._spare: list[Any] = []

    def read(self, ranges: Sequence[tuple[int, int, int]], stream: ctypes.c_void_p, again: bool) -> None:
        total = sum(size for _, _, size in ranges)
        if total > len(self.pinned):
            self.driver.free_pinned(self.pinned)
            self.pinned = self.driver.pinned(2 * total)
        start = ctypes.addressof(self.pinned)
        self._enqueue(ranges, start, stream)
        self.driver.cuEventRecord(self.event, stream)
        while (code := self.driver.code("cuEventQuery", self.event)) == _NOT_READY:
            os.sched_yield()
        if code:
            raise RuntimeError(f"CUDA error: {code}")
        found = ctypes.string_at(start, total)
        for _, to, size in ranges:
            ctypes.memmove(to, start, size)
            start += size
        done = [late for late in self._late if late[0] == stream.value]
        self._late = [late for late in self._late if late[0] != stream.value]
        self._compare(done)
        if again:
            spare = next((each for each in self._spare if len(each) >= total), None)
            if spare is None:
                spare = self.driver.pinned(max(4096, 1 << (total - 1).bit_length()))
            else:
                self._spare.remove(spare)
            self._enqueue(ranges, ctypes.addressof(spare), stream)
            self._late.append((stream.value, spare, found))

    def _enqueue(self, ranges: Sequence[tuple[int, int, int]], place: int, stream: ctypes.c_void_p) -> None:
        for address, _, size in ranges:
            self.driver.cuMemcpyDtoHAsync_v2(ctypes.c_void_p(place), address, size, stream)
            place += size

    def _compare(self, done: Sequence[tuple[int | None, Any, bytes]]) -> None:
        for _, spare, found in done:
            self._spare.append(spare)
            if ctypes.string_at(ctypes.addressof(spare), len(found)) != found:
                self.driver.simFault(b"torch: an operand was written before its operation had read it")

    def close(self) -> None:
        """When the device has done everything."""
        self._compare(self._late)
        for each in (self.pinned, *self._spare):
            self.driver.free_pinned(each)
        self.driver.cuEventDestroy_v2(self.event)


class TrueRuntime:
    """What scenarios ask of a runtime, where torch has a GPU of its own."""

    def __init__(self) -> None:
        self.driver = Driver()
        #: Not counted.
        self.reads_to_the_host = 0


@functools.cache
def on_true_driver() -> Any:
    """The process's `TrueRuntime`."""
    return TrueRuntime()


_found: list[Runtime] = []


def _runtime() -> Runtime:
    return _found[0]


class Stream:
    """torch.cuda.Stream."""

    cuda_stream: int
    device: torch.device

    def __init__(self, device: Any = None, priority: int = 0, **_: Any) -> None:
        number = _runtime().device(device)
        self.device = torch.device("cuda", number)
        self.cuda_stream = _runtime().new_stream(number)

    @classmethod
    def _of(cls, stream: int, device: int) -> Stream:
        made = cls.__new__(cls)
        made.cuda_stream, made.device = stream, torch.device("cuda", device)
        return made

    @property
    def device_index(self) -> int:
        return int(self.device.index)

    def wait_event(self, event: Event) -> None:
        event.wait(self)

    def wait_stream(self, stream: Stream) -> None:
        self.wait_event(stream.record_event())

    def record_event(self, event: Event | None = None) -> Event:
        event = Event() if event is None else event
        event.record(self)
        return event

    def query(self) -> bool:
        runtime = _runtime()
        with runtime.on(self.device_index):
            return runtime.driver.code("cuStreamQuery", ctypes.c_void_p(self.cuda_stream)) == 0

    def is_capturing(self) -> bool:
        runtime, status = _runtime(), ctypes.c_int()
        with runtime.on(self.device_index):
            runtime.driver.cuStreamIsCapturing(ctypes.c_void_p(self.cuda_stream), ctypes.byref(status))
        return status.value != 0

    def synchronize(self) -> None:
        runtime = _runtime()
        with runtime.on(self.device_index):
            runtime.driver.cuStreamSynchronize(ctypes.c_void_p(self.cuda_stream))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and (self.cuda_stream, self.device) == (other.cuda_stream, other.device)

    def __hash__(self) -> int:
        return hash((self.cuda_stream, self.device))

    def __repr__(self) -> str:
        return f"<torch.cuda.Stream device={self.device} cuda_stream={self.cuda_stream:#x}>"


class Event:
    """torch.cuda.Event. Made at its first record, as torch's."""

    def __init__(self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> None:
        self.cuda_event = 0
        self._device = 0

    def record(self, stream: Stream | None = None) -> None:
        runtime = _runtime()
        stream = current_stream() if stream is None else stream
        with runtime.on(stream.device_index):
            if not self.cuda_event:
                self.cuda_event, self._device = runtime.driver.event(), stream.device_index
            runtime.driver.cuEventRecord(self.cuda_event, ctypes.c_void_p(stream.cuda_stream))

    def wait(self, stream: Stream | None = None) -> None:
        runtime = _runtime()
        stream = current_stream() if stream is None else stream
        if self.cuda_event:
            with runtime.on(stream.device_index):
                runtime.driver.cuStreamWaitEvent(ctypes.c_void_p(stream.cuda_stream), self.cuda_event, 0)

    def query(self) -> bool:
        return not self.cuda_event or _runtime().driver.code("cuEventQuery", self.cuda_event) == 0

    def synchronize(self) -> None:
        if self.cuda_event:
            _runtime().driver.cuEventSynchronize(self.cuda_event)

    def elapsed_time(self, end: Event) -> float:
        """Nothing takes time here."""
        return 0.0

    def __del__(self) -> None:
        if self.cuda_event:
            with _runtime().on(self._device):
                _runtime().driver.cuEventDestroy_v2(self.cuda_event)


class StreamContext:
    """torch.cuda.stream(…): a stream, and its device, are the thread's current ones for a while."""

    def __init__(self, stream: Stream | None) -> None:
        self.stream = stream
        self._before: list[tuple[int, Stream]] = []

    def __enter__(self) -> None:
        if self.stream is not None:
            local = _runtime().local
            self._before.append((local.device, current_stream(self.stream.device)))
            set_stream(self.stream)

    def __exit__(self, *_: object) -> None:
        if self.stream is not None:
            number, stream = self._before.pop()
            set_stream(stream)
            _runtime().local.device = number


class DeviceContext:
    """torch.cuda.device(…)."""

    def __init__(self, device: Any) -> None:
        self.idx = -1 if device is None or device == -1 else _runtime().device(device)
        self._before: list[int] = []

    def __enter__(self) -> None:
        self._before.append(_runtime().local.device)
        if self.idx >= 0:
            _runtime().local.device = self.idx

    def __exit__(self, *_: object) -> None:
        _runtime().local.device = self._before.pop()


def current_stream(device: Any = None) -> Stream:
    """torch.cuda.current_stream."""
    return _runtime().stream(_runtime().device(device))


def default_stream(device: Any = None) -> Stream:
    """torch.cuda.default_stream."""
    return _runtime().default[_runtime().device(device)]


def set_stream(stream: Stream) -> None:
    """torch.cuda.set_stream: also makes its device the current one."""
    local = _runtime().local
    local.device = stream.device_index
    local.streams[stream.device_index] = stream


def set_device(device: Any) -> None:
    """torch.cuda.set_device."""
    _runtime().local.device = _runtime().device(device)


def synchronize(device: Any = None) -> None:
    """torch.cuda.synchronize."""
    with _runtime().on(_runtime().device(device)):
        _runtime().driver.cuCtxSynchronize()


def external_stream(stream_ptr: int, device: Any = None) -> Stream:
    """torch.cuda.ExternalStream."""
    return Stream._of(stream_ptr, _runtime().device(device))


def start() -> Runtime:
    """Puts the simulated driver behind torch.cuda."""
    runtime = Runtime()
    _found.append(runtime)
    nothing = lambda *_, **__: None  # noqa: E731
    replaced: dict[str, Any] = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "_is_in_bad_fork": lambda: False,
        "_lazy_init": nothing,
        "init": nothing,
        "device_count": lambda: runtime.devices,
        "current_device": lambda: runtime.local.device,
        "set_device": set_device,
        "device": DeviceContext,
        "get_device_name": lambda device=None: "simulated",
        "get_device_capability": lambda device=None: (9, 0),
        "Stream": Stream,
        "ExternalStream": external_stream,
        "Event": Event,
        "stream": StreamContext,
        "StreamContext": StreamContext,
        "current_stream": current_stream,
        "default_stream": default_stream,
        "set_stream": set_stream,
        "synchronize": synchronize,
        "empty_cache": nothing,
        # Random numbers are the CPU's, and so is their state.
        "manual_seed": nothing,
        "manual_seed_all": nothing,
        "get_rng_state": lambda device="cuda": torch.empty(0, dtype=torch.uint8),
        "set_rng_state": nothing,
        "is_current_stream_capturing": lambda: current_stream().is_capturing(),
    }
    for name, value in replaced.items():
        setattr(torch.cuda, name, value)
    accelerator = getattr(torch, "accelerator", None)
    if accelerator is not None:
        accelerator.is_available = lambda: True
        accelerator.current_accelerator = lambda check_available=False: torch.device("cuda")
        accelerator.device_count = lambda: runtime.devices
        accelerator.current_device_index = lambda: runtime.local.device
        accelerator.current_stream, accelerator.set_stream = current_stream, set_stream
        accelerator.synchronize = synchronize
    # The backward pass asks CUDA's runtime for devices; the first answer is a warning, which is of no use.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        getattr(torch._C, "_cuda_getDeviceCount", int)()
    return runtime
