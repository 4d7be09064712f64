"""The engine for any framework: communicates buckets of arrays, in a fixed order, while the program computes.

Hand over the buckets once, mark each array ready when its values are final, and wait once per step:

    bucket = bagua.Bucket("all", {"bias": bias, "weight": weight})
    bucket.append_centralized(average=True)
    with bagua.Engine() as engine:
        engine.register([bucket])
        ...
        engine.mark_ready("bias")
        engine.mark_ready("weight")
        engine.wait()
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from types import TracebackType
from typing import Any

import numpy

from bagua import config, engine
from bagua import group as groups
from bagua.arrays import Array, operand
from bagua.codecs import Compression, raw_codec
from bagua.operand import Operand

__all__ = ["Bucket", "Engine"]


class Bucket:
    """Named arrays of one element type that are communicated together. Local, with all its methods.

    The arrays must be writable and contiguous, on the host or all on one CUDA device; the bucket keeps them alive.
    ValueError for an empty bucket, TypeError for mixed element types and places.
    """

    def __init__(self, name: str, tensors: Mapping[str, Array] | Iterable[tuple[str, Array]]) -> None:
        pairs = tensors.items() if isinstance(tensors, Mapping) else tensors
        self._memory: dict[str, Operand] = {}
        # Arrays of the operations.
        self._extra: dict[str, Operand] = {}
        #: What encoding lost of each element: float32, with error feedback only.
        self.error: numpy.ndarray[Any, Any] | None = None
        for tensor, array in pairs:
            if tensor in self._memory:
                raise ValueError(f"tensor '{tensor}' is in bucket '{name}' twice")
            self._memory[tensor] = operand(array, f"tensor '{tensor}'").to_write(f"tensor '{tensor}'")
        places = {memory.where: tensor for tensor, memory in reversed(self._memory.items())}
        if len(places) > 1:
            (here, one), (there, other) = list(reversed(places.items()))[:2]
            raise TypeError(f"bucket '{name}': tensor '{other}' is on {there} but '{one}' is on {here}")
        #: The CUDA device of the arrays; None for the host.
        self._device = next((memory.device for memory in self._memory.values()), None)
        options: dict[str, Any] = {}
        if self._device is not None:
            options = {
                "device": self._device,
                "collective": config.cuda_collective(),
                "check": config.cuda_check(),
                "keep": list(self._memory.values()),
            }
        self._raw = engine.Bucket(
            name,
            [(tensor, memory.address, memory.count, memory.dtype, False) for tensor, memory in self._memory.items()],
            **options,
        )

    def __repr__(self) -> str:
        return f"<bagua.Bucket {self.name!r}: tensors={self.tensors}, bytes={self.bytes}, ops={self.ops}>"

    @property
    def name(self) -> str:
        """Its name."""
        return self._raw.name

    @property
    def bytes(self) -> int:
        """Bytes of all arrays."""
        return self._raw.bytes

    @property
    def tensors(self) -> list[str]:
        """Names of the arrays."""
        return list(self._memory)

    @property
    def ops(self) -> list[str]:
        """Names of the operations, in the order in which they run."""
        return self._raw.ops()

    def append_centralized(
        self,
        *,
        average: bool = True,
        hierarchical: bool = False,
        compression: Compression = None,
        error_feedback: bool = False,
    ) -> Bucket:
        """Adds an all_reduce: every rank ends with the average of all ranks, or with the sum. Returns the bucket.

        `hierarchical` combines inside hosts first, also where the group would go flat; False takes the group's route.
        `compression` is a codec's name or a `bagua.Codec`; where `hierarchical`, it is used between hosts only.
        `error_feedback` adds what encoding lost to the next step's values; it is kept in `error`, and for arrays on a
        CUDA device in one of float32 there that is attached as "error". All ranks must give the same. TypeError for
        elements that the codec does not encode, ValueError for error feedback without a codec.
        """
        codec = raw_codec(compression)
        if codec is None:
            if error_feedback:
                raise ValueError(f"bucket '{self.name}': error_feedback without compression has nothing to feed back")
            self._raw.append_centralized(average, hierarchical, False)
            return self
        if error_feedback and self.error is not None:
            raise ValueError(f"bucket '{self.name}' has an operation with error feedback already")
        self._raw.append_compressed(codec, average, hierarchical, error_feedback)
        if error_feedback and self._device is None:
            count = sum(memory.count for memory in self._memory.values())
            self.error = numpy.zeros(count, dtype=numpy.float32)
            self.attach("error", self.error)
        return self

    def attach(self, name: str, array: Array) -> Bucket:
        """Registers an array of the bucket's operations beside its own, such as error memory. Returns the bucket.

        One of the same name is replaced. The bucket holds it; ValueError while the bucket is being communicated,
        TypeError for another place than the bucket's.
        """
        memory = operand(array, f"tensor '{name}'").to_write(f"tensor '{name}'")
        options: dict[str, Any] = {} if memory.device is None else {"device": memory.device, "keep": memory}
        self._raw.attach(name, memory.address, memory.count, memory.dtype, **options)
        self._extra[name] = memory
        return self

    def append_callback(self, function: Callable[[str], object]) -> Bucket:
        """Adds a call of `function(bucket name)` on the communication thread. Returns the bucket.

        An exception in it fails the engine: the next call here raises BaguaError from it, and the other ranks get
        PeerRaisedError. It is the only operation that waits for the GIL. Of arrays on a CUDA device, what it puts on
        the legacy stream there comes between the other operations.
        """
        self._raw.append_callback(function)
        return self

    def clear_ops(self) -> None:
        """Removes all operations."""
        self._raw.clear_ops()
        self.error = None

    def _replace(self, tensor: str, array: Array, stream: int | None) -> Operand:
        memory = operand(array, f"tensor '{tensor}'", stream).to_write(f"tensor '{tensor}'")
        before = self._memory[tensor]
        if memory.where != before.where:
            raise TypeError(f"tensor '{tensor}' is on {memory.where} now; it was registered on {before.where}")
        if memory.dtype != before.dtype:
            raise TypeError(
                f"tensor '{tensor}' has become {memory.dtype_name}; it was registered as {before.dtype_name}"
            )
        return memory


class Engine:
    """One strictly ordered queue of buckets with a communication thread of its own.

    Collective: every rank of the group (the default one when None) makes its engines in the same order. A context
    manager: leaving it shuts the engine down.
    """

    def __init__(self, name: str = "engine", *, group: groups.Group | None = None) -> None:
        owner = group or groups.default(required=True)
        self._raw = owner.communicator.engine(name)
        self._buckets: dict[str, Bucket] = {}
        self._numbers: dict[str, int] = {}
        # Kept until the engine has others: the core reads and writes their memory.
        self._registered: list[Bucket] = []

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.shutdown()

    def register(self, buckets: Iterable[Bucket]) -> None:
        """Waits for what is pending, then replaces the buckets. Their order is that of communication, the same on
        all ranks.

        ValueError for an array, or its name, that appears twice.
        """
        registered = list(buckets)
        names = self._raw.register([bucket._raw for bucket in registered])
        self._registered = registered
        self._buckets = {tensor: bucket for bucket in registered for tensor in bucket.tensors}
        self._numbers = {name: number for number, name in enumerate(names)}

    def mark_ready(self, tensor: str, array: Array | None = None, *, stream: int | None = None) -> None:
        """The array's values are final for this step; the program must neither read nor write it until `wait` returns.

        On a CUDA device they are final when `stream` has come so far (a CUstream by DLPack's numbers, None: the legacy
        stream), and the stream that the interface of a new `array` names. NotImplementedError for one that is being
        captured.

        `array` replaces the one that was registered (same size and type) when the values are somewhere else now.
        ValueError for an unknown name, or one that was marked already; else what went wrong on the communication
        thread.
        """
        number = self._numbers.get(tensor)
        if number is None:
            raise ValueError(f"no bucket holds a tensor named '{tensor}'")
        if array is None:
            self._raw.mark_ready(number, None, None, stream=stream)
            return
        bucket = self._buckets[tensor]
        memory = bucket._replace(tensor, array, stream)
        # Held before the core sees it; what was there before is not in flight, or the core refuses.
        before, bucket._memory[tensor] = bucket._memory[tensor], memory
        try:
            options: dict[str, Any] = (
                {} if memory.device is None else {"keep": memory, "producers": memory.place.producers([memory.place])}
            )
            self._raw.mark_ready(number, memory.address, memory.count, stream=stream, **options)
        except (TypeError, ValueError, NotImplementedError):
            bucket._memory[tensor] = before
            raise

    def wait(self, timeout: float | None = None, *, stream: int | None = None) -> int:
        """Waits until every bucket that is complete was communicated, and returns how many were.

        Of arrays on a CUDA device, work that `stream` (None: the legacy stream) gets from now on sees the results,
        whether or not the device has come so far. NotImplementedError for a stream that is being captured.

        `timeout` is in seconds. ValueError names the arrays that are missing of a bucket that is partly ready;
        BaguaTimeoutError leaves the buckets running.
        """
        return self._raw.wait(timeout, stream=stream)

    def unready(self) -> list[str]:
        """Names of the arrays that are not ready yet, of buckets that were not communicated since the last `wait`."""
        return self._raw.unready()

    def shutdown(self) -> None:
        """Ends the communication thread. Idempotent."""
        self._raw.shutdown()
