"""Buckets: tensors that are communicated together, and the operations on them."""

from __future__ import annotations

import mmap
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from bagua import extension, shared_memory
from bagua.codecs import Compression, raw_codec

from . import devices
from .bucket_memory import BucketSlice, FlatMemory, layout_of, require_resolved
from .model_engine.votes import VOTE_BYTES
from .process_group import Communicator, ProcessGroup, dtype_code
from .process_group.state import group_state
from .tensor import BaguaTensor, Registration, effective, registration
from .utils import check_contiguous


def _flat_memory(count: int, like: torch.Tensor, name: str) -> tuple[torch.Tensor, object]:
    """Returns zeros with dtype and device of ``like``, and the owner of their memory. Local.

    The memory is shared with the ranks of this host if there is a default group of several ranks, and private
    otherwise. On a device the zeros own their memory.
    """
    if like.device.type != "cpu" or count == 0:
        flat = torch.zeros(count, dtype=like.dtype, device=like.device)
        return flat, flat
    world = group_state.world
    nbytes = count * like.dtype.itemsize
    owner: Any
    if isinstance(world, Communicator) and world.nranks() > 1:
        owner = shared_memory.memory(world.raw, nbytes, f"bagua-bucket-{name}")
    else:
        owner = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(owner, dtype=like.dtype), owner


class DecentralizedSynchronousOp:
    """The result of :meth:`BaguaBucket.append_decentralized_synchronous_op`."""

    def __init__(self, device: torch.device | None = None) -> None:
        self._device = device

    def copy_back_peer_weight(self, bucket: extension.Bucket) -> None:
        """Copies the average into the tensors of ``bucket``, which is ``BaguaBucket.backend_bucket``.

        Call it after the wait for the bucket. Raises ValueError while the bucket is being communicated.
        """
        bucket.copy_from_extra("peer_weight", **devices.stream_options(self._device))


class AsyncModelAverageOp:
    """The result of :meth:`BaguaBucket.append_asynchronous_model_average_op`.

    A thread holds the lock while it uses or changes the weights. It may take the lock several times.
    """

    def __init__(
        self, core: extension.AsyncModelAverage, lock: extension.WeightLock, device: torch.device | None = None
    ) -> None:
        self._lock = lock
        self._device = device
        self._abort: Callable[[], None] = partial(core.set_takes_part, False)
        self._reset: Callable[[], None] = partial(core.set_takes_part, True)
        self._status: Callable[[], str] = lambda: "running" if core.takes_part else "stopped"

    def lock_weight(self) -> None:
        """Takes the lock, after waiting for a round that is copying or writing the weights.

        On a CUDA device, later work on torch's current stream runs after the work of that round.
        """
        self._lock.lock(**devices.stream_options(self._device))

    def unlock_weight(self) -> None:
        """Releases the lock. Raises BaguaError, a RuntimeError, on a thread that does not hold it."""
        self._lock.unlock(**devices.stream_options(self._device))

    def control_by(self, abort: Callable[[], None], reset: Callable[[], None], status: Callable[[], str]) -> None:
        """Makes the methods below call these functions instead. Used by an algorithm that runs the rounds itself."""
        self._abort, self._reset, self._status = abort, reset, status

    def abort(self) -> None:
        """Takes this rank out of the rounds, so that its weights neither count nor change. Not collective."""
        self._abort()

    def reset(self) -> None:
        """Takes part again from the next round on. Not collective."""
        self._reset()

    def get_status(self) -> str:
        """Returns "running" or "stopped", or "warmup" if an algorithm runs the rounds."""
        return self._status()


class BaguaBucket:
    """Bagua tensors of one dtype and device, under one name. All methods are local.

    - ``tensors``: The tensors, which must be registered (``ensure_bagua_tensor``).
    - ``name``: Name of the bucket.
    - ``flatten``: True moves the effective tensors into contiguous memory, which the other ranks of this host can map
      and reduce without a copy. Tensors on a CUDA device move to contiguous memory there. Without a default group the
      memory is private.
    - ``alignment``: If above 1, zeros are added so that the number of elements is a multiple of it.
    - ``group``: The group of operations that are appended without a group. None means the default group. A bucket of a
      sub-group is built on its ranks only.

    Lazy negations and conjugates (``is_neg()``, ``is_conj()``) are resolved with ``flatten``; without it they raise
    ValueError.
    """

    def __init__(
        self,
        tensors: Sequence[torch.Tensor],
        name: str,
        flatten: bool,
        alignment: int = 1,
        *,
        group: ProcessGroup | None = None,
    ) -> None:
        if not tensors:
            raise ValueError(f"bucket {name!r} has no tensors")
        if alignment < 1:
            raise ValueError(f"bucket {name!r}: alignment {alignment} is not positive")
        self.tensors = list(tensors)
        self.name = name
        self.alignment = alignment
        self.bagua_module_name = registration(self.tensors[0]).module_name
        # The memory of a flattened bucket, and the slice of each tensor in it, padding included.
        self.memory: FlatMemory | None = None
        self.places: list[BucketSlice] = []
        self.padding_tensor: torch.Tensor | None = None
        # Error feedback: what encoding lost of each element, without padding, in float32.
        self.error: torch.Tensor | None = None
        # For decentralized algorithms, each as long as the bucket: the mean with the peers' weights; this rank's
        # weights as both neighbours in a ring know them; and the neighbours' weights.
        self._peer_weight: torch.Tensor | None = None
        self._weight: torch.Tensor | None = None
        self._left_peer_weight: torch.Tensor | None = None
        self._right_peer_weight: torch.Tensor | None = None
        self._async_op: AsyncModelAverageOp | None = None
        #: The elements after the tensors that hold the ranks' votes. None until :meth:`reserve` is called.
        self.room: torch.Tensor | None = None
        # Memory for the votes, allocated directly after the flat tensors. None if the tensors are not flat.
        self._spare: torch.Tensor | None = None
        # Objects that keep the flat memory and the operations' memory alive, even if no tensor uses it any more.
        self._owners: list[object] = []
        self._extra: dict[str, torch.Tensor] = {}
        self._built_for = group
        # The group of the appended operations; None means the model's group.
        self._group: ProcessGroup | None = None
        # Registration of each tensor, padding included.
        self.registrations = self._check()
        parts = [each.effective(tensor) for each, tensor in zip(self.registrations, self._members(), strict=True)]
        if flatten:
            self._flatten(parts)
        self.flatten = flatten
        # The memory registered with the core: the bucket's own, or the tensors' memory, which the core uses unless it
        # gets a newer address.
        self._registered = [values.detach() for values in parts] if self.memory is None else [self.memory.own]
        #: CUDA device of the tensors; None for the host.
        self.device = devices.device_of(self._registered[0])
        self.backend_bucket = self._in_core()

    def _in_core(self) -> extension.Bucket:
        # Detached, because hooks and graphs may refer to the bucket.
        keep = None if self.device is None else [values.detach() for values in self._registered]
        described = self._described()
        if self.room is not None:
            # The engine does not wait for padding.
            code = described[0][3]
            described.append((f"bagua_room_{self.name}", self.room.data_ptr(), self.room.numel(), code, True))
            if keep is not None:
                keep.append(self.room)
        return extension.Bucket(self.name, described, **devices.bucket_options(self.device, keep))

    def reserve(self) -> torch.Tensor:
        """Returns zeros behind the bucket's tensors, for a vote of each rank of the group.

        The ranks add them up with the tensors, without the codec of an operation. Operations must be appended again,
        and the bucket registered again with its engine.
        """
        if self.room is None:
            like = self._registered[0]
            spare = torch.zeros(self._votes(), dtype=like.dtype, device=like.device)
            self.room = spare if self._spare is None else self._spare
            self.backend_bucket = self._in_core()
        return self.room

    def _votes(self) -> int:
        """Returns the number of elements for the votes of all ranks."""
        group = self._built_for or group_state.default_group
        return 0 if group is None else len(group.ranks) * VOTE_BYTES

    def __repr__(self) -> str:
        first = self._registered[0]
        count = sum(values.numel() for values in self._registered)
        options = {
            "tensors": len(self.tensors),
            "elements": count,
            "dtype": first.dtype,
            "device": str(first.device),
            "flatten": self.flatten,
            "alignment": self.alignment,
            "ops": self.backend_bucket.ops(),
        }
        shown = ", ".join(f"{name}={value!r}" for name, value in options.items())
        return f"<BaguaBucket {self.name!r} of model {self.bagua_module_name!r}: {shown}>"

    def _check(self) -> list[Registration]:
        """Checks the tensors, adds the padding, and returns all registrations."""
        known = [registration(tensor) for tensor in self.tensors]
        names = [each.name for each in known]
        repeated = sorted(name for name, times in Counter(names).items() if times > 1)
        if repeated:
            raise ValueError(f"bucket {self.name!r}: {repeated} appear(s) twice")
        parts = [each.effective(tensor) for each, tensor in zip(known, self.tensors, strict=True)]
        first = parts[0]
        kind = first.device, first.layout, first.dtype, self.bagua_module_name
        for values, each in zip(parts, known, strict=True):
            if values is not first and (values.device, values.layout, values.dtype, each.module_name) == kind:
                continue
            label = each.name
            what = f"tensor {label!r} of bucket {self.name!r}"
            devices.check_place(values, what)
            dtype_code(values, what)
            if values.device != first.device:
                raise TypeError(
                    f"bucket {self.name!r} mixes {names[0]!r} on {first.device} with {label!r} on {values.device}"
                )
            if values.dtype != first.dtype:
                raise ValueError(
                    f"bucket {self.name!r} mixes {names[0]!r} ({first.dtype} on {first.device}) "
                    f"with {label!r} ({values.dtype} on {values.device})"
                )
            if each.module_name != self.bagua_module_name:
                raise ValueError(
                    f"bucket {self.name!r} mixes tensors of models {self.bagua_module_name!r} and {each.module_name!r}"
                )
        short = -sum(part.numel() for part in parts) % self.alignment
        if short:
            padding = torch.zeros(short, dtype=first.dtype, device=first.device)
            self.padding_tensor = BaguaTensor.to_bagua_tensor(
                padding, f"bagua_padding_tensor_bucket_{self.name}", self.bagua_module_name
            )
            known.append(registration(self.padding_tensor))
        return known

    def _members(self) -> list[torch.Tensor]:
        return self.tensors if self.padding_tensor is None else [*self.tensors, self.padding_tensor]

    def _effective(self) -> list[torch.Tensor]:
        return [effective(tensor) for tensor in self._members()]

    def _described(self) -> list[tuple[str, int, int, int, bool]]:
        described: list[tuple[str, int, int, int, bool]] = []
        if self.memory is not None:
            code = dtype_code(self.memory.own, self.name)
            described = [
                (known.name, place.address, place.shape.numel(), code, False)
                for known, place in zip(self.registrations, self.places, strict=True)
            ]
            if self.padding_tensor is not None:
                described[-1] = (*described[-1][:-1], True)
            return described
        for known, tensor, values in zip(self.registrations, self._members(), self._registered, strict=True):
            name = known.name
            if layout_of(values) != values.stride():
                raise ValueError(f"tensor {name!r} of bucket {self.name!r} has gaps in memory: flatten the bucket")
            require_resolved(values, f"tensor {name!r} of bucket {self.name!r}, which is not flattened,")
            code = dtype_code(values, name)
            described.append((name, values.data_ptr(), values.numel(), code, tensor is self.padding_tensor))
        return described

    def _flatten(self, parts: Sequence[torch.Tensor]) -> None:
        count = sum(part.numel() for part in parts)
        whole = self._allocate(count + self._votes() if count else 0, parts[0], self.name)
        self.memory = FlatMemory(whole[:count])
        self._spare = whole[count:] if count else None
        offset = 0
        for each, part in zip(self.registrations, parts, strict=True):
            place = BucketSlice(self.memory, part, offset)
            if each.is_stand_in:
                part.data = place.stand_in()
            else:
                place.take(part)
                part.data = place.tensor()
            self.places.append(place)
            offset += part.numel()

    @property
    def backend_tensor(self) -> torch.Tensor | None:
        """The flat memory of a flattened bucket; None for other buckets."""
        return None if self.memory is None else self.memory.shown()

    def _allocate(self, count: int, like: torch.Tensor, name: str) -> torch.Tensor:
        flat, owner = _flat_memory(count, like, name)
        self._owners.append(owner)
        return flat

    def flattened_tensor(self) -> torch.Tensor:
        """Returns a new flat tensor with a copy of the effective tensors' values and the padding."""
        parts = self._effective()
        flat = torch.zeros(sum(part.numel() for part in parts), dtype=parts[0].dtype, device=parts[0].device)
        offset = 0
        with torch.no_grad():
            for part in parts:
                flat.as_strided(part.shape, layout_of(part), offset).copy_(part)
                offset += part.numel()
        return flat

    def extra_memory(self, name: str) -> torch.Tensor:
        """Returns zeros with the bucket's dtype and elements, padding included. Shared memory with ``flatten``."""
        values = self._registered
        count = sum(part.numel() for part in values)
        if not self.flatten:
            return torch.zeros(count, dtype=values[0].dtype, device=values[0].device)
        return self._allocate(count, values[0], f"{self.name}-{name}")

    def parts_of(self, flat: torch.Tensor) -> dict[str, torch.Tensor]:
        """Returns views of ``flat``, one per tensor of the bucket, by name. ``flat`` may have no padding at the end."""
        parts, offset = {}, 0
        layouts = [(place.shape, place.strides) for place in self.places] or [
            (values.shape, layout_of(values)) for values in self._registered
        ]
        for _, known, (shape, strides) in zip(self.tensors, self.registrations, layouts, strict=False):
            parts[known.name] = flat.as_strided(shape, strides, flat.storage_offset() + offset)
            offset += shape.numel()
        return parts

    def check_flatten(self) -> bool:
        """Returns True if the effective tensors are contiguous in memory."""
        return check_contiguous(self._effective())

    def bytes(self) -> int:
        """Returns the bytes of all tensors, padding included."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self._effective())

    def check_group(self, group: ProcessGroup) -> None:
        """Raises NotImplementedError if operations were appended for a group other than ``group``."""
        if self._group is not None and self._group.ranks != group.ranks:
            raise NotImplementedError(
                f"bucket {self.name!r} has operations for ranks {self._group.ranks}, but its model communicates "
                f"with {group.ranks}: append operations for the model's group"
            )

    def append_python_op(
        self, python_function: Callable[[str], None], group: ProcessGroup | None = None
    ) -> BaguaBucket:
        """Appends a call of ``python_function(bucket name)`` on the communication thread. Returns the bucket.

        For a bucket on a CUDA device, the function's work on the default stream runs between the other operations. If
        the function raises, backward on this rank raises BaguaError from that exception, and the other ranks raise
        PeerRaisedError.
        """
        self._group = group or self._group
        self.backend_bucket.append_callback(python_function)
        return self

    def append_centralized_synchronous_op(
        self,
        hierarchical: bool = False,
        average: bool = True,
        scattergather: bool = False,
        compression: Compression = None,
        group: ProcessGroup | None = None,
        *,
        error_feedback: bool = False,
    ) -> BaguaBucket:
        """Appends a sum or average of the tensors over all ranks. Returns the bucket.

        - ``hierarchical``: Adds inside each host first, then between hosts.
        - ``average``: True divides by the number of ranks.
        - ``scattergather``: Required with ``compression``: each rank reduces one part of the bucket.
        - ``compression``: A codec's name, a :class:`bagua.Codec`, or None. With ``hierarchical`` it is used between
          hosts only.
        - ``group``: The group, see :class:`BaguaBucket`.
        - ``error_feedback``: Adds what encoding lost to the values of the next step. Kept in :attr:`error`.

        Raises ValueError for options that do not fit each other, and TypeError for a dtype that the codec cannot
        encode.
        """
        codec = raw_codec(compression)
        if codec is None:
            if error_feedback:
                raise ValueError(f"bucket {self.name!r}: error_feedback without compression has nothing to feed back")
            self.backend_bucket.append_centralized(average, hierarchical, scattergather)
        else:
            if error_feedback and self.error is not None:
                raise ValueError(f"bucket {self.name!r} has an operation with error feedback already")
            if not scattergather:
                raise ValueError(f"bucket {self.name!r}: compression needs scattergather=True")
            exact = 0 if self.room is None else self.room.numel()
            self.backend_bucket.append_compressed(codec, average, hierarchical, error_feedback, exact)
            if error_feedback:
                count = sum(values.numel() for values in self._registered)
                count -= 0 if self.padding_tensor is None else self.padding_tensor.numel()
                self.error = torch.zeros(count, dtype=torch.float32, device=self._registered[0].device)
                self._attach("error", self.error)
        self._group = group or self._group
        return self

    def append_automatic_op(
        self,
        compression: Compression,
        hierarchical: bool = False,
        average: bool = True,
        group: ProcessGroup | None = None,
    ) -> BaguaBucket:
        """Appends a sum or average over all ranks that uses the codec only if that is faster. Returns the bucket.

        The ranks time both ways in the first 10 of every 1,000 communications. ``backend_bucket.choice()`` is the
        codec's name, or "" for none. Raises NotImplementedError for tensors on a CUDA device, because timing would have
        to wait for the device.
        """
        codec = raw_codec(compression)
        if codec is None:
            raise ValueError(f"bucket {self.name!r}: an automatic choice needs a compression")
        exact = 0 if self.room is None else self.room.numel()
        self.backend_bucket.append_automatic(codec, average, hierarchical, exact)
        self._group = group or self._group
        return self

    def append_decentralized_synchronous_op(
        self,
        peer_weight: torch.Tensor,
        hierarchical: bool = True,
        peer_selection_mode: str = "all",
        group: ProcessGroup | None = None,
    ) -> DecentralizedSynchronousOp:
        """Appends an average with peers. The average is written to ``peer_weight``; the tensors do not change.

        - ``peer_weight``: A tensor with the bucket's dtype and number of elements, padding included.
        - ``hierarchical``: The members are hosts, with the mean of their ranks, instead of ranks.
        - ``peer_selection_mode``: "all", "shift_one" (another peer in each round, for an even number of members),
          "ring", "exponential" or "one_peer_exponential".
        - ``group``: The group, see :class:`BaguaBucket`.

        A round's number is the number of times that the bucket has been communicated. Raises ValueError for an argument
        that does not fit.
        """
        among = group or self._built_for or group_state.default_group
        extension.check_peer_selection(peer_selection_mode, 1 if among is None else among.members(hierarchical))
        self._check_length("peer_weight", peer_weight)
        self.backend_bucket.append_decentralized(peer_selection_mode, hierarchical)
        self._attach("peer_weight", peer_weight)
        self._group = group or self._group
        return DecentralizedSynchronousOp(self.device)

    def append_low_precision_decentralized_synchronous_op(
        self,
        weight: torch.Tensor,
        left_peer_weight: torch.Tensor,
        right_peer_weight: torch.Tensor,
        hierarchical: bool = True,
        compression: Compression = "MinMaxUInt8",
        group: ProcessGroup | None = None,
    ) -> None:
        """Appends an exchange of encoded differences with both neighbours in a ring, which replaces the tensors.

        - ``weight``: This member's weights as both neighbours know them.
        - ``left_peer_weight``, ``right_peer_weight``: The neighbours' weights as this member knows them. These three
          tensors have the bucket's dtype and number of elements, and start as copies of the respective member's
          weights.
        - ``hierarchical``: The members are hosts, with the mean of their ranks, instead of ranks.
        - ``compression``: A codec's name or a :class:`bagua.Codec`.
        - ``group``: The group, see :class:`BaguaBucket`.

        Raises ValueError for an argument that does not fit.
        """
        codec = raw_codec(compression)
        if codec is None:
            raise ValueError(f"bucket {self.name!r}: a low-precision operation needs a compression")
        replicas = {"weight": weight, "left_peer_weight": left_peer_weight, "right_peer_weight": right_peer_weight}
        for name, replica in replicas.items():
            self._check_length(name, replica)
        self.backend_bucket.append_low_precision_decentralized(codec, hierarchical)
        for name, replica in replicas.items():
            self._attach(name, replica)
        self._group = group or self._group

    def _check_length(self, name: str, tensor: torch.Tensor) -> None:
        devices.check_place(tensor, f"{name} of bucket {self.name!r}")
        values = self._registered
        if tensor.device != values[0].device:
            raise TypeError(
                f"bucket {self.name!r} mixes {registration(self.tensors[0]).name!r} on {values[0].device} "
                f"with {name!r} on {tensor.device}"
            )
        count, dtype = sum(part.numel() for part in values), values[0].dtype
        if tensor.numel() != count or tensor.dtype != dtype or not tensor.is_contiguous():
            raise ValueError(
                f"bucket {self.name!r} has {count} elements of {dtype}: its {name} must be contiguous and have the "
                f"same number and dtype, not {tensor.numel()} of {tensor.dtype}"
            )

    def _attach(self, name: str, tensor: torch.Tensor) -> None:
        """Registers a tensor of an operation, and keeps it alive."""
        code = dtype_code(tensor, f"{name} of bucket {self.name!r}")
        tensor = tensor.detach()
        options = devices.memory_options(self.device, tensor)
        self.backend_bucket.attach(name, tensor.data_ptr(), tensor.numel(), code, **options)
        self._extra[name] = tensor

    def append_asynchronous_model_average_op(
        self,
        peer_selection_mode: str = "all",
        group: ProcessGroup | None = None,
        *,
        lock: extension.WeightLock | None = None,
    ) -> AsyncModelAverageOp:
        """Appends asynchronous averaging: averages a snapshot of the tensors over the ranks that take part, and adds
        average - snapshot to the tensors under a lock.

        Each communication of the bucket is one round. (The algorithm "async" starts its rounds itself.)
        ``peer_selection_mode`` must be "all", else ValueError. ``lock`` is the lock of the weights; None makes a new
        one. Raises TypeError for elements that are not real floating-point numbers. Returns the operation, which is
        also ``bucket._async_op``.
        """
        if peer_selection_mode != "all":
            raise ValueError(
                f"peer_selection_mode of an asynchronous average must be 'all', not {peer_selection_mode!r}"
            )
        # An algorithm's lock orders streams with rounds that are not the bucket's.
        elsewhere = lock is not None
        lock = extension.WeightLock() if lock is None else lock
        core = self.backend_bucket.append_asynchronous_model_average(lock, elsewhere=elsewhere)
        self._async_op = AsyncModelAverageOp(core, lock, self.device)
        self._group = group or self._group
        return self._async_op

    def clear_ops(self) -> BaguaBucket:
        """Removes the operations. Returns the bucket."""
        self.backend_bucket.clear_ops()
        self._group = None
        self.error = None
        self._async_op = None
        return self


__all__ = ["BaguaBucket", "BaguaTensor"]
