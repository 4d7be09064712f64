"""Buckets of raw engines, on the host or on the simulated driver."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from bagua import config, extension
from bagua import group as groups
from bagua.cuda.arrays import device_of
from tests.cuda.device_arrays import LEGACY, Cuda

#: Elements of a bucket's tensors.
SIZES = (1000, 1, 4099)


def held(dtype: Any) -> np.dtype[Any]:
    """Returns the NumPy dtype that holds the elements: integers for bfloat16."""
    return np.dtype(np.uint16 if isinstance(dtype, str) and dtype == "bfloat16" else dtype)


class Memory:
    """An array on the host (without `cuda`) or on the device."""

    def __init__(self, cuda: Cuda | None, count: int, dtype: Any = np.float32, stream: int = LEGACY) -> None:
        self.count, self.cuda = count, cuda
        zeros = np.zeros(count, held(dtype))
        self.array: Any = zeros if cuda is None else cuda.array(zeros, stream=stream)
        self.address: int = self.array.ctypes.data if cuda is None else self.array.address
        self.code = extension.DTYPES[dtype if isinstance(dtype, str) else np.dtype(dtype).name]

    def write(self, values: Any, stream: int = LEGACY) -> None:
        """New values; on the device, when the stream has come so far."""
        if self.cuda is None:
            self.array[:] = values
        else:
            self.array.write(np.broadcast_to(values, self.count), stream)

    def read(self, stream: int = LEGACY) -> np.ndarray[Any, Any]:
        """The values as work of the stream sees them."""
        return np.array(self.array) if self.cuda is None else np.array(self.array.read(stream))


class Tensors:
    """A bucket `raw` and the memory of its tensors, which lie back to back if `flat`; `stream` makes it, late."""

    def __init__(
        self,
        cuda: Cuda | None,
        name: str,
        *,
        flat: bool = True,
        sizes: Sequence[int] = SIZES,
        dtype: Any = np.float32,
        padding: int = 0,
        stream: int = LEGACY,
    ) -> None:
        self.cuda, self.name, self.sizes = cuda, name, [*sizes, *([padding] if padding else [])]
        self.dtype, self.stream = held(dtype), stream
        if flat:
            self.memory = [Memory(cuda, sum(self.sizes), dtype, stream)]
        else:
            self.memory = [Memory(cuda, size, dtype, stream) for size in self.sizes]
        self.extra: dict[str, Memory] = {}
        described, at = [], 0
        for number, size in enumerate(self.sizes):
            address = self.memory[0].address + at * self.dtype.itemsize if flat else self.memory[number].address
            described.append((f"{name}.{number}", address, size, self.memory[0].code, number >= len(sizes)))
            at += size
        options: dict[str, Any] = {}
        if cuda is not None:
            options = {"device": device_of(cuda.device), "collective": config.cuda_collective(), "keep": self.memory}
        self.raw = extension.Bucket(name, described, **options)
        self.marks = len(sizes)

    @property
    def count(self) -> int:
        """Elements, padding included."""
        return sum(self.sizes)

    def attach(self, name: str, count: int | None = None, dtype: Any = None) -> None:
        """Adds an extra tensor of zeros, which the stream writes late."""
        count = self.count if count is None else count
        made = Memory(self.cuda, count, self.dtype if dtype is None else dtype, self.stream)
        options: dict[str, Any] = {} if self.cuda is None else {"device": device_of(self.cuda.device), "keep": made}
        self.raw.attach(name, made.address, made.count, made.code, **options)
        self.extra[name] = made

    def write(self, values: Any, stream: int = LEGACY) -> None:
        """New values for all tensors, one after the other."""
        values, at = np.broadcast_to(values, self.count), 0
        for memory in self.memory:
            memory.write(values[at : at + memory.count], stream)
            at += memory.count

    def read(self, stream: int = LEGACY) -> np.ndarray[Any, Any]:
        """The values of all tensors, one after the other."""
        return np.concatenate([memory.read(stream) for memory in self.memory])


class Queue:
    """An engine with buckets."""

    def __init__(self, name: str, *buckets: Tensors) -> None:
        self.raw = groups.default(required=True).communicator.engine(name)
        self.buckets: tuple[Tensors, ...] = ()
        # Another rank may have failed by then: a caller that expects that registers where it looks for the error.
        if buckets:
            self.register(*buckets)

    def register(self, *buckets: Tensors) -> None:
        """Replaces the buckets."""
        self.buckets = ()
        self.numbers = {name: number for number, name in enumerate(self.raw.register([each.raw for each in buckets]))}
        self.buckets = buckets

    def mark(self, bucket: Tensors, stream: int | None = None) -> None:
        """All tensors of the bucket are final."""
        for number in range(bucket.marks):
            self.raw.mark_ready(self.numbers[f"{bucket.name}.{number}"], stream=stream)

    def step(self, stream: int | None = None) -> None:
        """All buckets are final; they are communicated when it returns."""
        for bucket in self.buckets:
            self.mark(bucket, stream)
        assert self.raw.wait(30.0, stream=stream) == len(self.buckets)


class Sides:
    """Buckets on the host and the same on a device, each side with an engine of its own."""

    def __init__(self, cuda: Cuda, make: Callable[[Cuda | None], list[Tensors]], name: str = "of") -> None:
        host, device = make(None), make(cuda)
        self.pairs = list(zip(host, device, strict=True))
        self.queues = [Queue(f"{name} the host", *host), Queue(f"{name} the device", *device)]

    def step(self, values: Callable[[Tensors], Any], stream: int = LEGACY) -> None:
        """Both of a pair get the values, and are communicated; then they, and what is attached, hold the same bytes."""
        for host, device in self.pairs:
            given = values(host)
            host.write(given)
            device.write(given, stream)
        for queue in self.queues:
            queue.step(stream)
        for host, device in self.pairs:
            assert host.read().tobytes() == device.read(stream).tobytes(), host.name
            for name, extra in host.extra.items():
                assert extra.read().tobytes() == device.extra[name].read(stream).tobytes(), (host.name, name)

    def shutdown(self) -> None:
        """Ends both engines."""
        for queue in self.queues:
            queue.raw.shutdown()
