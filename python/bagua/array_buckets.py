"""The engine for any framework: communicates buckets of arrays in a fixed order while the program computes.

Register the buckets once, mark each array ready when its values are final, and wait once per step:

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

from bagua import config, extension
from bagua import group as groups
from bagua.arrays import Array, operand
from bagua.codecs import Compression, raw_codec
from bagua.operand import Operand

__all__ = ["Bucket", "Engine"]


class Bucket:
    """Named arrays of one element type that are communicated together. All methods are local to this rank.

    The arrays must be writable and contiguous, on the host or all on one CUDA device. The bucket keeps them alive.
    Raises ValueError for an empty bucket or a duplicate name, and TypeError if element types or devices differ.
    """

    def __init__(self, name: str, tensors: Mapping[str, Array] | Iterable[tuple[str, Array]]) -> None:
        pairs = tensors.items() if isinstance(tensors, Mapping) else tensors
        self._memory: dict[str, Operand] = {}
        # Arrays of operations, such as error memory; see `attach`.
        self._extra: dict[str, Operand] = {}
        #: The encoding error that error feedback adds to the next step, in float32, one per element. None without error
        #: feedback and for arrays on a CUDA device.
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
        self._raw = extension.Bucket(
            name,
            [(tensor, memory.address, memory.count, memory.dtype, False) for tensor, memory in self._memory.items()],
            **options,
        )

    def __repr__(self) -> str:
        return f"<bagua.Bucket {self.name!r}: tensors={self.tensors}, bytes={self.bytes}, ops={self.ops}>"

    @property
    def name(self) -> str:
        """Name of the bucket."""
        return self._raw.name

    @property
    def bytes(self) -> int:
        """Total bytes of all arrays."""
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
        """Appends an all_reduce: every rank ends with the average of all ranks, or the sum if `average` is False.
        Returns the bucket.

        `hierarchical`: True reduces inside each host first, even if the group would use a flat all_reduce. False uses
        the group's own choice.

        `compression`: name of a codec, or a `bagua.Codec`. With `hierarchical`, only the exchange between hosts is
        compressed.

        `error_feedback`: True adds the encoding error of each step to the values of the next step. The error is kept in
        `error`; for arrays on a CUDA device it is a float32 array there, attached as "error".

        All ranks must pass the same arguments. Raises TypeError if the codec cannot encode the element type, and
        ValueError for error feedback without a codec.
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
        """Registers an array that the bucket's operations use besides the bucket's own, such as error memory. Returns
        the bucket.

        Replaces an attached array of the same name. The bucket keeps the array alive. Raises ValueError while the
        bucket is being communicated, and TypeError if the array is not on the bucket's device.
        """
        memory = operand(array, f"tensor '{name}'").to_write(f"tensor '{name}'")
        options: dict[str, Any] = {} if memory.device is None else {"device": memory.device, "keep": memory}
        self._raw.attach(name, memory.address, memory.count, memory.dtype, **options)
        self._extra[name] = memory
        return self

    def append_callback(self, function: Callable[[str], object]) -> Bucket:
        """Appends a call of `function(bucket name)` on the communication thread. Returns the bucket.

        If the function raises, the engine fails: the next call on this rank raises BaguaError from that exception, and
        the other ranks raise PeerRaisedError. This is the only operation that waits for the GIL. For arrays on a CUDA
        device, work that the function puts on the legacy stream runs between the operations before and after it.
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
        # Keeps the arrays alive, because the core reads and writes their memory.
        self._registered: list[Bucket] = []

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.shutdown()

    def register(self, buckets: Iterable[Bucket]) -> None:
        """Waits for pending buckets, then replaces the registered buckets.

        Buckets are communicated in this order, which must be the same on all ranks. Raises ValueError if an array or a
        name appears twice.
        """
        registered = list(buckets)
        names = self._raw.register([bucket._raw for bucket in registered])
        self._registered = registered
        self._buckets = {tensor: bucket for bucket in registered for tensor in bucket.tensors}
        self._numbers = {name: number for number, name in enumerate(names)}

    def mark_ready(self, tensor: str, array: Array | None = None, *, stream: int | None = None) -> None:
        """Declares that an array's values are final for this step. The program must not read or write it until `wait`
        returns.

        `array` replaces the registered array if the values are now in other memory. Size and element type must be the
        same.

        `stream`: for arrays on a CUDA device, the stream (a CUstream as an integer, in DLPack's numbering; None is the
        legacy stream) after whose present work the values are final. If a new `array` names a stream of its own, that
        stream is waited for too.

        Raises ValueError if no bucket has this tensor or it was marked already, NotImplementedError if the stream is
        being captured, and any error that the communication thread has met.
        """
        number = self._numbers.get(tensor)
        if number is None:
            raise ValueError(f"no bucket holds a tensor named '{tensor}'")
        if array is None:
            self._raw.mark_ready(number, None, None, stream=stream)
            return
        bucket = self._buckets[tensor]
        memory = bucket._replace(tensor, array, stream)
        # Keep the new array alive before the core sees it. The core refuses the call if the old one is in flight.
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
        """Blocks until every complete bucket has been communicated. Returns the number of those buckets.

        For arrays on a CUDA device, work that is put on `stream` (None: the legacy stream) after this call sees the
        results; the host does not wait for the device.

        `timeout` is in seconds. Raises ValueError naming the missing arrays if a bucket is only partly ready;
        BaguaTimeoutError, which leaves the buckets running; NotImplementedError if the stream is being captured.
        """
        return self._raw.wait(timeout, stream=stream)

    def unready(self) -> list[str]:
        """Returns the arrays that are not ready, of buckets that were not communicated since the last `wait`."""
        return self._raw.unready()

    def shutdown(self) -> None:
        """Ends the communication thread. Idempotent."""
        self._raw.shutdown()
