"""The engine behind one model: its buckets in order, and which of their tensors are ready."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from bagua import engine, verbs
from bagua.torch_operand import Adapter

from .. import devices
from ..bucket import BaguaBucket
from ..bucket_memory import require_resolved
from ..process_group import DTYPES, Communicator, Handle, ProcessGroup, ReduceOp
from ..tensor import effective, registration
from .state import model_state as _models

_TENSORS = Adapter(compares_shapes=False)

# Seconds that a round of averaging in progress may take to its end when the averaging stops.
_PATIENCE = 10.0


@dataclass
class AveragedMemory:
    """What an averaging thread reads and writes, under ``lock``."""

    #: Contiguous weights, one tensor per dtype.
    weights: list[torch.Tensor]
    #: Contiguous; a rank that joins the job gets them.
    buffers: list[torch.Tensor]
    lock: engine.WeightLock
    #: This rank's, in an elastic job.
    join_server: engine.JoinServer | None
    #: Of what must be equal on all ranks.
    digest: bytes

    @property
    def device(self) -> torch.device | None:
        """The CUDA device of the weights; None for the host."""
        return devices.device_of(self.weights[0]) if self.weights else None

    def described_weights(self) -> list[tuple[int, int, int, bool]]:
        """Address, count, dtype, and whether it is on a device."""
        return [(part.data_ptr(), part.numel(), DTYPES[part.dtype], part.is_cuda) for part in self.weights]

    def described_buffers(self) -> list[tuple[int, int, int, bool]]:
        """Their bytes, of whatever dtype."""
        code = DTYPES[torch.uint8]
        return [
            (buffer.data_ptr(), buffer.numel() * buffer.element_size(), code, buffer.is_cuda) for buffer in self.buffers
        ]

    def on_device(self) -> tuple[engine.CudaDevice, int, object] | None:
        """The device, torch's current stream there, and the tensors that own the memory; None for the host."""
        device = self.device
        if device is None:
            return None
        keep = [part.detach() for part in (*self.weights, *self.buffers)]
        options = devices.memory_options(device, keep) | devices.stream_options(device)
        return options["device"], options["stream"], keep


class BucketEngine:
    """One strictly ordered queue of buckets with a communication thread of its own."""

    def __init__(self, name: str, group: ProcessGroup) -> None:
        communicator = group.get_global_communicator()
        if not isinstance(communicator, Communicator):
            raise ValueError(f"this rank is not in {group}, so it cannot communicate there")
        self.name = name
        self.group = group
        self.communicator = communicator
        self._engine = communicator.raw.engine(name)
        self._buckets: list[BaguaBucket] = []
        # Threads that average the weights of the model.
        self._averagers: list[engine.Averager] = []
        # Number of each registered tensor, padding left out.
        self._numbers: dict[str, int] = {}
        # CUDA devices of the buckets, and that of each registered tensor by number.
        self._devices: list[torch.device] = []
        self._places: list[torch.device | None] = []
        # By number: memory in place of a registered tensor's, which the engine may read and write until the wait.
        self._kept: dict[int, torch.Tensor] = {}
        _models.all_backends.add(self)

    @property
    def rank(self) -> int:
        """This process's rank in the group."""
        return self.communicator.rank()

    @property
    def size(self) -> int:
        """Ranks in the group."""
        return self.communicator.nranks()

    def register_ordered_buckets(self, buckets: Sequence[BaguaBucket]) -> None:
        """Replaces the buckets. Their order is the order of communication, and must be the same on all ranks."""
        for bucket in buckets:
            bucket.check_group(self.group)
        names = self._engine.register([bucket.backend_bucket for bucket in buckets])
        self._numbers = {name: number for number, name in enumerate(names)}
        self._buckets = list(buckets)
        self._places = [bucket.device for bucket in buckets for _ in bucket.tensors]
        self._devices = list(dict.fromkeys(place for place in self._places if place is not None))

    def number(self, name: str) -> int:
        """The number by which a registered tensor is marked ready. ValueError for an unknown name."""
        number = self._numbers.get(name)
        if number is None:
            raise ValueError(f"no registered bucket holds a tensor named {name!r}")
        return number

    def unready(self) -> set[int]:
        """Numbers of the tensors that are not ready, of buckets that were not communicated since the last wait."""
        return {self.number(name) for name in self._engine.unready()}

    def set_step(self, step: int, *, after_load: bool = False) -> None:
        """Buckets that go from now on belong to this step of the training, counted from 1: MismatchError where another
        rank communicates them in another one, or has not loaded a state before it as this one (``after_load``). 0: the
        steps are not compared.
        """
        self._engine.set_step(step, after_load)

    def mark_communication_ready(self, tensor: torch.Tensor) -> None:
        """A registered tensor has its final values for this step. ValueError for a lazy negation or conjugate."""
        values, name = effective(tensor), registration(tensor).name
        require_resolved(values, f"tensor {name!r}")
        self.mark_ready(self.number(name), values)

    def mark_ready(self, number: int, values: torch.Tensor | None = None) -> None:
        """The same by :meth:`number`. ``values`` has them, if their address changed, and is kept until the wait.

        On a CUDA device they are final when torch's current stream there has come so far, and the engine keeps
        ``values`` until the device is done with them.
        """
        where = () if values is None else (values.data_ptr(), values.numel())
        # A model on the host asks nothing of CUDA, not even whether it is there. The engine refuses an unknown number.
        device = self._places[number] if self._devices and 0 <= number < len(self._places) else None
        if device is None:
            self._engine.mark_ready(number, *where)
            if values is not None:
                self._kept[number] = values
            return
        keep = None if values is None else values.detach()
        self._engine.mark_ready(number, *where, keep=keep, **devices.stream_options(device))

    def wait_pending_comm_ops(self) -> int:
        """Waits until every bucket that was complete is communicated, and returns how many were.

        Of buckets on CUDA devices, work that torch's current streams there get from now on sees the results, whether or
        not the devices have come so far.
        """
        if not self._devices:
            done = self._engine.wait()
            if done == len(self._buckets):
                # Otherwise a bucket may be waiting for others of its tensors.
                self._kept.clear()
            return done
        first, *others = self._devices
        done = self._engine.wait(**devices.stream_options(first))
        for device in others:
            torch.cuda.current_stream(device).wait_stream(torch.cuda.current_stream(first))
        return done

    def _begin(self, verb: verbs.Verb, tensor: torch.Tensor, *, parts: int = 1, op: int = 0, root: int = 0) -> Handle:
        """A verb in place, in order with the buckets."""
        operand = _TENSORS.write(tensor, "tensor")
        count = operand.count // parts
        ready = verbs.operation(self._engine, verb, None, operand, op=op, root=root, count=count)
        handle = ready.begin(async_op=True)
        assert handle is not None
        return handle

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp) -> Handle:
        """In place, in order with the buckets."""
        return self._begin(verbs.ALL_REDUCE, tensor, op=op)

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Every rank's tensor, by rank in the first dimension; in order with the buckets."""
        everybody = tensor.new_empty((self.size, *tensor.shape))
        everybody[self.rank] = tensor
        self.all_gather_inplace(everybody)
        return everybody

    def all_gather_inplace(self, everybody: torch.Tensor) -> None:
        """The same where this rank's is in its place already."""
        self._begin(verbs.ALL_GATHER, everybody, parts=self.size).wait()

    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        """In place, in order with the buckets."""
        self.start_broadcast(tensor, root).wait()

    def start_broadcast(self, tensor: torch.Tensor, root: int) -> Handle:
        """The same without the wait."""
        return self._begin(verbs.BROADCAST, tensor, root=root)

    def start_averager(
        self, memory: AveragedMemory, interval: float, codec: engine.Codec | None, takes_part: bool
    ) -> engine.Averager:
        """Averages weights every ``interval`` seconds on a thread of its own, until it is stopped. The memory must stay
        valid until then. Without ``takes_part`` this rank takes part from ``resume()`` on. Collective."""
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
        self, memory: AveragedMemory, interval: float, codec: engine.Codec | None, timeout: float
    ) -> engine.Averager:
        """The same in a process that joins a running job. BaguaTimeoutError after ``timeout`` seconds."""
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
        """``error``, after it was reported to the other ranks, which would wait for this one otherwise."""
        self.communicator.raw.raise_(type(error).__name__, str(error))
        return error

    def shutdown(self) -> None:
        """Ends the communication thread, and the averaging. May be called twice."""
        for averager in self._averagers:
            averager.stop(_PATIENCE)
        self._averagers = []
        self._engine.shutdown()
        self._buckets = []
        self._kept = {}


def find(model_name: str) -> BucketEngine | None:
    """The backend of a model by its name."""
    found: BucketEngine | None = _models.backends.get(model_name)
    return found


def adopt(backend: BucketEngine) -> None:
    """Makes a backend that of the model of its name."""
    _models.backends[backend.name] = backend


def release(backend: BucketEngine) -> None:
    """Shuts a model's backend down."""
    if _models.backends.get(backend.name) is backend:
        del _models.backends[backend.name]
    backend.shutdown()


def shut_down_all() -> None:
    """Shuts every backend down, before the group leaves."""
    for backend in list(_models.all_backends):
        backend.shutdown()
    _models.backends.clear()
