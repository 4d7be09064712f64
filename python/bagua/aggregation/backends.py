"""The ranks that an aggregation communicates with: one protocol, and an implementation for each library.

``Alone`` is the one to read first. An aggregation calls :func:`find` each time, so it may be built before the process
group, and keeps working after the group is replaced.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import ClassVar, Literal, Protocol

import torch
import torch.distributed as dist

from bagua import group as neutral
from bagua import verbs
from bagua.errors import BaguaError
from bagua.torch_api import communication, env
from bagua.torch_api.process_group import Communicator, ProcessGroup, ReduceOp
from bagua.torch_operand import Adapter

Reduction = Literal["sum", "mean", "min", "max"]

#: A caller's choice of ranks: ``None`` is our default group, ``"torch"`` the default group of torch.distributed.
Group = ProcessGroup | neutral.Group | dist.ProcessGroup | str | None

_TENSORS = Adapter()

HALVES = (torch.float16, torch.bfloat16)


class Reducer(Protocol):
    """Ranks that can all-reduce."""

    size: int

    def place(self, device: torch.device, use_cuda: bool) -> torch.device:
        """Returns the device from which a tensor is sent: CUDA if ``use_cuda``, or if nothing else works."""

    def all_reduce(self, data: torch.Tensor, op: Reduction) -> None:
        """Combines a contiguous tensor of any dtype and shape in place. The result is bitwise equal on all ranks.

        Half precision is accumulated in float32 and rounded once.
        """


class Peers(Reducer, Protocol):
    """Ranks with all operations that aggregations need."""

    rank: int

    def all_gather(self, data: torch.Tensor) -> torch.Tensor:
        """Returns every rank's flat tensor of n elements as a tensor of shape [size, n], in rank order."""

    def exchange(self, data: torch.Tensor, peers: Sequence[int]) -> list[torch.Tensor]:
        """Sends a flat tensor to some ranks, which send theirs. Returns these in the order of ``peers``."""


class Alone:
    """A single rank: sends nothing, and needs no process group."""

    rank = 0
    size = 1

    def place(self, device: torch.device, use_cuda: bool) -> torch.device:
        return device

    def all_reduce(self, data: torch.Tensor, op: Reduction) -> None:
        """Leaves the tensor as it is."""

    def all_gather(self, data: torch.Tensor) -> torch.Tensor:
        return data.unsqueeze(0)

    def exchange(self, data: torch.Tensor, peers: Sequence[int]) -> list[torch.Tensor]:
        if peers:
            raise ValueError(f"ranks {list(peers)} cannot be reached: there is one rank only")
        return []


class BaguaPeers:
    """Ranks of one of our groups. Tensors are sent from host memory."""

    _OPS: ClassVar = {
        "sum": ReduceOp.SUM,
        "mean": ReduceOp.AVG,
        "min": ReduceOp.MIN,
        "max": ReduceOp.MAX,
    }

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        self.rank = communicator.rank()
        self.size = communicator.nranks()

    def place(self, device: torch.device, use_cuda: bool) -> torch.device:
        return torch.device("cpu")

    def all_reduce(self, data: torch.Tensor, op: Reduction) -> None:
        self._communicator.allreduce_inplace(data, self._OPS[op])

    def all_gather(self, data: torch.Tensor) -> torch.Tensor:
        everybody = data.new_empty((self.size, data.numel()))
        self._communicator.allgather(data, everybody)
        return everybody

    def exchange(self, data: torch.Tensor, peers: Sequence[int]) -> list[torch.Tensor]:
        """Sends and receives all messages at once, so that no order of calls can deadlock."""
        received = [torch.empty_like(data) for _ in peers]
        if peers:
            sent, room = _TENSORS.read(data, "tensor"), [_TENSORS.write(theirs, "tensor") for theirs in received]
            pairs = list(zip(peers, room, strict=True))
            verbs.exchange(self._communicator.raw, [(peer, sent) for peer in peers], pairs).begin()
        return received


class TorchPeers:
    """Ranks of a process group of torch.distributed with any backend."""

    _OPS: ClassVar = {
        "sum": dist.ReduceOp.SUM,
        "mean": dist.ReduceOp.SUM,
        "min": dist.ReduceOp.MIN,
        "max": dist.ReduceOp.MAX,
    }

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        # For example "cpu:gloo,cuda:nccl".
        backends = str(dist.get_backend_config(group)).split(",")
        # Our own backend copies messages through host memory anyway.
        self._devices = {part.partition(":")[0] for part in backends if ":" in part and part != "cuda:bagua"}

    def place(self, device: torch.device, use_cuda: bool) -> torch.device:
        """Returns host memory, unless CUDA is asked for and supported, or the backend (NCCL) supports nothing else."""
        if use_cuda and device.type == "cuda" and "cuda" in self._devices:
            return device
        if "cpu" in self._devices or not self._devices:
            return torch.device("cpu")
        return device if device.type == "cuda" else torch.device("cuda", torch.cuda.current_device())

    def all_reduce(self, data: torch.Tensor, op: Reduction) -> None:
        """Sums half precision in float32 and divides a sum for the mean, because not all backends do."""
        wide = data.float() if data.dtype in HALVES else data
        dist.all_reduce(wide, self._OPS[op], group=self._group)
        if op == "mean":
            wide.div_(self.size)
        if wide is not data:
            data.copy_(wide)

    def all_gather(self, data: torch.Tensor) -> torch.Tensor:
        everybody = data.new_empty((self.size, data.numel()))
        dist.all_gather(list(everybody.unbind()), data, group=self._group)
        return everybody

    def exchange(self, data: torch.Tensor, peers: Sequence[int]) -> list[torch.Tensor]:
        """Sends and receives all messages in one batch, so that no order of calls can deadlock."""
        received = [torch.empty_like(data) for _ in peers]
        messages = []
        for peer, theirs in zip(peers, received, strict=True):
            world = dist.get_global_rank(self._group, peer)
            messages.append(dist.P2POp(dist.isend, data, world, self._group))
            messages.append(dist.P2POp(dist.irecv, theirs, world, self._group))
        for request in dist.batch_isend_irecv(messages) if messages else []:
            request.wait()
        return received


class HorovodReducer:
    """Ranks of Horovod, through the module ``horovod.torch``."""

    def __init__(self, horovod: ModuleType) -> None:
        self._horovod = horovod
        self.size = int(horovod.size())

    def place(self, device: torch.device, use_cuda: bool) -> torch.device:
        return device if use_cuda else torch.device("cpu")

    def all_reduce(self, data: torch.Tensor, op: Reduction) -> None:
        """Uses Horovod's Sum and never its Average, so that the division is the same with every library.

        Passes no name, so that Horovod numbers the tensors and two calls in flight cannot collide.
        """
        wide = data.float() if data.dtype in HALVES else data
        kind = {"min": "Min", "max": "Max"}.get(op, "Sum")
        result = self._horovod.allreduce(wide, op=getattr(self._horovod, kind))
        data.copy_(result / self.size if op == "mean" else result)


def find(group: Group = None, world_size: int | None = None) -> Peers:
    """Returns the ranks of a group.

    ``world_size`` 1 returns :class:`Alone`. Another number must be the group's size (else ValueError); ``None`` accepts
    any size. Without ``group``, uses our default group. Raises BaguaError if there is none although the environment
    names several ranks.
    """
    if world_size == 1:
        return Alone()
    peers = _choose(group)
    if world_size is not None and peers.size != world_size:
        raise ValueError(f"world_size is {world_size}, but the group has {peers.size} rank(s)")
    return peers


def _choose(group: Group) -> Peers:
    if isinstance(group, str):
        if group != "torch":
            raise ValueError(f'group={group!r}: the only group with a name is "torch"')
        if not dist.is_initialized():
            raise BaguaError('group="torch", but torch.distributed is not initialised')
        return TorchPeers(dist.distributed_c10d._get_default_group())
    if isinstance(group, dist.ProcessGroup):
        return TorchPeers(group)
    if isinstance(group, neutral.Group):
        return BaguaPeers(Communicator(group))
    if group is None:
        if communication.is_initialized():
            group = communication._get_default_group()
        elif (default := neutral.default()) is not None:
            return BaguaPeers(Communicator(default))
        else:
            return _without_group()
    if not isinstance(group, ProcessGroup):
        raise TypeError(f"group must be a process group or 'torch', not {type(group).__name__}")
    communicator = group.get_global_communicator()
    if not isinstance(communicator, Communicator):
        raise ValueError(f"this rank is not a member of {group}")
    return BaguaPeers(communicator)


def _without_group() -> Peers:
    if dist.is_initialized():
        raise BaguaError(
            "torch.distributed is initialised, bagua is not: call bagua.torch_api.init_process_group(), "
            'or say group="torch"'
        )
    if env.get_world_size() > 1:
        raise BaguaError("there is no process group yet: call bagua.torch_api.init_process_group() first")
    return Alone()
