"""The engine of one model: its buckets in order, and the readiness of their tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from bagua import extension, verbs
from bagua.torch_operand import Adapter

from .. import devices
from ..bucket import BaguaBucket
from ..bucket_memory import require_resolved
from ..process_group import DTYPES, Communicator, Handle, ProcessGroup, ReduceOp
from ..tensor import effective, registration
from .state import model_state as _models

_TENSORS = Adapter(compares_shapes=False)

# Seconds that a round of averaging may take to end when averaging stops.
_PATIENCE = 10.0


@dataclass
class AveragedMemory:
    """The memory that an averaging thread reads and writes under ``lock``."""

    #: Contiguous weights, one tensor per dtype.
    weights: list[torch.Tensor]
    #: Contiguous buffers, which are sent to a rank that joins the job.
    buffers: list[torch.Tensor]
    lock: extension.WeightLock
    #: This rank's join server in an elastic job; None otherwise.
    join_server: extension.JoinServer | None
    #: SHA-256 of everything that must be equal on all ranks.
    digest: bytes

    @property
    def device(self) -> torch.device | None:
        """CUDA device of the weights; None for the host."""
        return devices.device_of(self.weights[0]) if self.weights else None

    def described_weights(self) -> list[tuple[int, int, int, bool]]:
        """Returns (address, number of elements, dtype, True if on a device) of each tensor of weights."""
        return [(part.data_ptr(), part.numel(), DTYPES[part.dtype], part.is_cuda) for part in self.weights]

    def described_buffers(self) -> list[tuple[int, int, int, bool]]:
        """Returns (address, length in bytes, code of uint8, True if on a device) of each buffer."""
        code = DTYPES[torch.uint8]
        return [
            (buffer.data_ptr(), buffer.numel() * buffer.element_size(), code, buffer.is_cuda) for buffer in self.buffers
        ]

    def on_device(self) -> tuple[extension.CudaDevice, int, object] | None:
        """Returns the device, torch's current stream there, and the tensors that own the memory; None for the host."""
        device = self.device
        if device is None:
            return None
        keep = [part.detach() for part in (*self.weights, *self.buffers)]
        options = devices.memory_options(device, keep) | devices.stream_options(device)
        return options["device"], options["stream"], keep


class BucketEngine:
    """A strictly ordered queue of buckets with its own communication thread."""

    def __init__(self, name: str, group: ProcessGroup) -> None:
        communicator = group.get_global_communicator()
        if not isinstance(communicator, Communicator):
            raise ValueError(f"this rank is not in {group}, so it cannot communicate there")
        self.name = name
        self.group = group
        self.communicator = communicator
        self._engine = communicator.raw.engine(name)
        self._buckets: list[BaguaBucket] = []
        self._averagers: list[extension.Averager] = []
        # Name -> number of each registered tensor, without padding.
        self._numbers: dict[str, int] = {}
        # CUDA devices of the buckets.
        self._devices: list[torch.device] = []
        # Device of each registered tensor, by number. None for the host.
        self._places: list[torch.device | None] = []
        # For tensors that were replaced by other memory: number -> that memory, kept alive until the next wait.
        self._kept: dict[int, torch.Tensor] = {}
        _models.all_backends.add(self)

    @property
    def rank(self) -> int:
        """This process's rank in the group."""
        return self.communicator.rank()

    @property
    def size(self) -> int:
        """Number of ranks in the group."""
        return self.communicator.nranks()

    def register_ordered_buckets(self, buckets: Sequence[BaguaBucket]) -> None:
        """Replaces the buckets. Their order, which is the order of communication, must be the same on all ranks."""
        for bucket in buckets:
            bucket.check_group(self.group)
        names = self._engine.register([bucket.backend_bucket for bucket in buckets])
        self._numbers = {name: number for number, name in enumerate(names)}
        self._buckets = list(buckets)
        self._places = [bucket.device for bucket in buckets for _ in bucket.tensors]
        self._devices = list(dict.fromkeys(place for place in self._places if place is not None))

    def number(self, name: str) -> int:
        """Returns the number by which a registered tensor is marked ready. Raises ValueError for an unknown name."""
        number = self._numbers.get(name)
        if number is None:
            raise ValueError(f"no registered bucket holds a tensor named {name!r}")
        return number

    def unready(self) -> set[int]:
        """Returns the numbers of tensors that are not ready, in buckets not communicated since the last wait."""
        return {self.number(name) for name in self._engine.unready()}

    def set_step(self, step: int, *, after_load: bool = False) -> None:
        """Sets the training step, counted from 1, to which the next communicated buckets belong; 0 turns the check off.

        Ranks that disagree about the step, or about having loaded a state before it (``after_load``), raise
        MismatchError.
        """
        self._engine.set_step(step, after_load)

    def mark_communication_ready(self, tensor: torch.Tensor) -> None:
        """Reports that a registered tensor's values are final. Raises ValueError for a lazy negation or conjugate."""
        values, name = effective(tensor).detach(), registration(tensor).name
        require_resolved(values, f"tensor {name!r}")
        self.mark_ready(self.number(name), values)

    def mark_ready(self, number: int, values: torch.Tensor | None = None) -> None:
        """Reports that the values of the tensor with this :meth:`number` are final.

        ``values`` holds them if their address changed, and is kept until the wait, or until the device is done with
        them. Only the caller has it, because a user could give it other memory. On a CUDA device the values are final
        once torch's current stream has reached this point.
        """
        where = () if values is None else (values.data_ptr(), values.numel())
        # A model on the host must not touch CUDA, not even to ask if it exists. The engine refuses an unknown number.
        device = self._places[number] if self._devices and 0 <= number < len(self._places) else None
        if device is None:
            self._engine.mark_ready(number, *where)
            if values is not None:
                self._kept[number] = values
            return
        self._engine.mark_ready(number, *where, keep=values, **devices.stream_options(device))

    def wait_pending_comm_ops(self) -> int:
        """Waits until every complete bucket has been communicated, and returns the number of these buckets.

        For buckets on CUDA devices, later work on torch's current streams sees the results. The call does not wait for
        the devices.
        """
        if not self._devices:
            done = self._engine.wait()
            if done == len(self._buckets):
                # Otherwise a bucket may still wait for its other tensors.
                self._kept.clear()
            return done
        first, *others = self._devices
        done = self._engine.wait(**devices.stream_options(first))
        for device in others:
            torch.cuda.current_stream(device).wait_stream(torch.cuda.current_stream(first))
        return done

    def _begin(self, verb: verbs.Verb, tensor: torch.Tensor, *, parts: int = 1, op: int = 0, root: int = 0) -> Handle:
        """Starts a collective in place, in order with the buckets."""
        operand = _TENSORS.write(tensor, "tensor")
        count = operand.count // parts
        ready = verbs.operation(self._engine, verb, None, operand, op=op, root=root, count=count)
        handle = ready.begin(async_op=True)
        assert handle is not None
        return handle

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp) -> Handle:
        """Starts an all_reduce in place, in order with the buckets."""
        return self._begin(verbs.ALL_REDUCE, tensor, op=op)

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns all ranks' tensors, with the rank as first dimension. In order with the buckets."""
        everybody = tensor.new_empty((self.size, *tensor.shape))
        everybody[self.rank] = tensor
        self.all_gather_inplace(everybody)
        return everybody

    def all_gather_inplace(self, everybody: torch.Tensor) -> None:
        """Gathers in place: this rank's tensor is already in its place in ``everybody``."""
        self._begin(verbs.ALL_GATHER, everybody, parts=self.size).wait()

    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        """Broadcasts in place, in order with the buckets."""
        self.start_broadcast(tensor, root).wait()

    def start_broadcast(self, tensor: torch.Tensor, root: int) -> Handle:
        """Starts a broadcast, without waiting for it."""
        return self._begin(verbs.BROADCAST, tensor, root=root)

    def start_averager(
        self, memory: AveragedMemory, interval: float, codec: extension.Codec | None, takes_part: bool
    ) -> extension.Averager:
        """Starts a thread that averages the weights every ``interval`` seconds until it is stopped. Collective.

        The memory must stay valid until then. With ``takes_part=False`` this rank takes part from ``resume()`` on.
        """
        averager = self.communicator.raw.averager(
            self.name,
            memory.described_weights(),
            memory.lock,
            interval,
            codec,
            buffers=memory.described_buffers(),
            join_server=memory.join_server,
            digest=memory.digest,
            takes_part=takes_part,
            device=memory.on_device(),
        )
        self._averagers.append(averager)
        return averager

    def join_averager(
        self, memory: AveragedMemory, interval: float, codec: extension.Codec | None, timeout: float
    ) -> extension.Averager:
        """Starts an averaging thread in a process that joins a running job, within ``timeout`` seconds."""
        assert memory.join_server is not None
        averager = memory.join_server.join(
            self.name,
            memory.described_weights(),
            memory.described_buffers(),
            memory.lock,
            interval,
            codec,
            memory.digest,
            timeout,
            memory.on_device(),
        )
        self._averagers.append(averager)
        return averager

    def reported(self, error: Exception) -> Exception:
        """Reports ``error`` to the other ranks, which would wait for this one otherwise, and returns it."""
        self.communicator.raw.raise_(type(error).__name__, str(error))
        return error

    def shutdown(self) -> None:
        """Ends the communication thread and the averaging. May be called twice."""
        for averager in self._averagers:
            averager.stop(_PATIENCE)
        self._averagers = []
        self._engine.shutdown()
        self._buckets = []
        self._kept = {}


def find(model_name: str) -> BucketEngine | None:
    """Returns the backend of the model with this name, or None."""
    found: BucketEngine | None = _models.backends.get(model_name)
    return found


def adopt(backend: BucketEngine) -> None:
    """Makes ``backend`` the backend of the model with its name."""
    _models.backends[backend.name] = backend


def release(backend: BucketEngine) -> None:
    """Shuts down the backend of a model."""
    if _models.backends.get(backend.name) is backend:
        del _models.backends[backend.name]
    backend.shutdown()


def shut_down_all() -> None:
    """Shuts down all backends, before the group leaves."""
    for backend in list(_models.all_backends):
        backend.shutdown()
    _models.backends.clear()
