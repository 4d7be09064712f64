"""``rebuild()``: the surviving ranks of a failed job continue training, without a restart."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, MutableMapping
from dataclasses import dataclass
from typing import Any, Literal

import torch

from bagua import config, hints
from bagua import group as neutral
from bagua.errors import MismatchError
from bagua.process_state import forget_groups

from .. import communication, default_collectives
from ..algorithms.base import Algorithm
from ..model_engine import bucket_engine
from ..model_engine.engine import ModelEngine, Progress
from ..model_engine.in_place_ddp import end_with_group
from ..model_engine.state import model_state
from ..model_engine.sync_model_state import broadcast_optimizer, broadcast_tensors, is_sharded, restore_types
from ..process_group import Communicator, ProcessGroup
from ..process_group.state import group_state
from . import torch_init_process_group
from .state import membership_state

__all__ = ["Rebuilt", "rebuild"]

# Bytes that each rank sends to every other rank as a test before ``rebuild()`` returns.
_CARRIED = 16384

_wrapped: MutableMapping[torch.nn.Module, ModelEngine] = model_state.wrapped


@dataclass(frozen=True)
class Rebuilt:
    """The result of :func:`rebuild`."""

    rank: int
    """New rank of this process."""
    world_size: int
    """New number of ranks."""
    ranks: tuple[int, ...]
    """Former rank of each new rank."""
    lost: tuple[int, ...]
    """Former ranks that were lost."""
    steps: dict[str, int]
    """Completed steps of each model's first optimizer, by module name."""


def rebuild(timeout: float | None = None, *, quorum: Literal["majority", "any"] = "majority") -> Rebuilt:
    """Continues training with the surviving ranks, from the last completed step.

    Every surviving rank calls this function after PeerLostError or PeerRaisedError.

    1. The call waits for ranks that are alive and have not called yet.
    2. Models on the default group are wrapped again on the new group. All ranks get the parameters, buffers and
       optimizer state of the lowest rank with the most completed steps, bitwise.
    3. Gradients are dropped: repeat the step in flight with all its micro-batches.
    4. Models on other groups are unwrapped, with a RuntimeWarning, and all other groups are gone.
    5. RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE get the new values. torch.distributed is initialised again if
       ``init_process_group`` had initialised it.

    - ``timeout``: Seconds to wait; None means the group's timeout.
    - ``quorum``: As in :meth:`bagua.Group.shrink`.

    Raises BaguaTimeoutError, with the ranks that are alive and have not called, or BaguaError with "quorum" and the
    ranks that may still be alive. After these two the call can be repeated. Raises PeerLostError for this rank if the
    other ranks continued without it. If an algorithm cannot work with the new number of ranks, all ranks raise its
    error; its model is unwrapped, and the group works. Raises NotImplementedError if an optimizer is torch's
    ZeroRedundancyOptimizer.
    """
    default = communication._get_default_group()
    world: neutral.Group = default_collectives.default_communicator().group
    until = time.monotonic() + (world.timeout if timeout is None else timeout)
    if timeout is not None and not timeout > 0:
        raise ValueError(f"timeout is {timeout} s; it must be positive")
    for ddp in _wrapped.values():
        if any(map(is_sharded, ddp.bagua_optimizers)):
            raise NotImplementedError(
                f"rebuild: an optimizer of model {ddp.bagua_module_name!r} has a part of its state on each rank, and "
                "that of the lost rank is gone: start the job again from its last checkpoint"
            )
    # The error that this rank raised while the group failed. A lost rank explains it, unless rebuilding fails.
    own: Exception | None = None
    while True:
        try:
            world = world._shrink(max(until - time.monotonic(), 0.001), quorum)
            if membership_state.rebuilding is None:
                membership_state.rebuilding = _Plan(default)
            plan: _Plan = membership_state.rebuilding
            plan.take_over(world)
        except Exception as error:
            _chain(error, own)
            raise
        try:
            return plan.carry_out(world)
        except Exception as error:
            _chain(error, own)
            if torch_init_process_group.cause_of_failure(world) is None:
                raise
            own = error


def _chain(error: Exception, cause: Exception | None) -> None:
    """Makes ``cause``, if there is one, the first cause of ``error``."""
    first: BaseException = error
    while first.__cause__ is not None:
        first = first.__cause__
    if cause is not None and first is not cause:
        first.__cause__ = cause


@dataclass
class _Model:
    """A model to wrap again."""

    name: str
    holder: torch.nn.Module
    """The key in ``_wrapped``: the model or a wrapper around it."""
    kind: type[ModelEngine]
    module: torch.nn.Module
    optimizers: list[torch.optim.Optimizer]
    algorithm: Algorithm
    options: dict[str, Any]
    """Keyword arguments of the model's engine."""
    do_flatten: bool
    ignored: frozenset[str]
    """Names of parameters and buffers that are not communicated."""
    progress: Progress
    raised: set[str]
    """Flags that no exchange has had."""

    @staticmethod
    def snapshot_of(holder: torch.nn.Module, ddp: ModelEngine) -> _Model:
        return _Model(
            ddp.bagua_module_name,
            holder,
            type(ddp),
            ddp.module,
            ddp.bagua_optimizers,
            ddp.algorithm,
            ddp.options(),
            ddp.do_flatten,
            ddp.parameters_to_ignore,
            ddp.progress,
            ddp.votes.raised,
        )

    def end(self) -> None:
        """Ends the model's communication and drops its gradients."""
        ddp = _wrapped.pop(self.holder, None)
        if ddp is not None:
            ddp.close(at_exit=True)
        for param in self.module.parameters():
            param.grad = None

    def wrap(self, group: ProcessGroup) -> None:
        """Wraps the model again. Its state is the same on all ranks already."""
        ddp = _wrapped[self.holder] = self.kind(
            self.module,
            self.optimizers,
            self.algorithm,
            group,
            self.do_flatten,
            name=self.name,
            broadcast_state=False,
            **self.options,
        )
        ddp.resume(self.progress)
        ddp.votes.raised.update(self.raised)

    def state(self) -> Iterator[torch.Tensor]:
        """Yields the parameters and buffers that all ranks share."""
        for named in (self.module.named_parameters(), self.module.named_buffers()):
            yield from (tensor for name, tensor in named if name not in self.ignored)

    def own(self) -> list[torch.Tensor]:
        """Returns the parameters that are not communicated."""
        return [param for name, param in self.module.named_parameters() if name in self.ignored]

    def copy_of_state(self) -> Callable[[], None]:
        """Copies the shared state, and returns a function that restores it."""
        tensors = [(tensor.data, tensor.detach().clone()) for tensor in self.state()]
        # Loading a state replaces an optimizer's tensors, so the old ones keep their values.
        optimizers = [(optimizer, optimizer.state_dict()) for optimizer in self.optimizers]

        def restore() -> None:
            for tensor, values in tensors:
                tensor.copy_(values)
            for optimizer, state in optimizers:
                optimizer.load_state_dict(state)
                restore_types(optimizer, state)

        return restore


class _Plan:
    """The remaining work after the ranks agreed on a smaller group. Starts again if one more rank is lost."""

    def __init__(self, default: ProcessGroup) -> None:
        #: Sorted by name, so that all ranks have the same order.
        self.models: list[_Model] = []
        # Former rank of each rank, in the group that rebuild() was called for.
        self._ranks = list(default.ranks)
        self._former_size = len(default.ranks)
        for module, ddp in list(_wrapped.items()):
            if ddp.process_group is default:
                self.models.append(_Model.snapshot_of(module, ddp))
            else:
                end_with_group(module)
                text = f"model {ddp.bagua_module_name!r} is unwrapped: {ddp.process_group} is gone"
                hints.warn(text, RuntimeWarning)
        self.models.sort(key=lambda model: model.name)

    def take_over(self, world: neutral.Group) -> None:
        """Makes ``world`` the default group of this process."""
        former = world.former_ranks
        assert former is not None
        self._ranks = [self._ranks[rank] for rank in former]
        for model in self.models:
            model.end()
        bucket_engine.shut_down_all()
        forget_groups()
        communication.set_world(world)
        config.announce(
            RANK=str(world.rank),
            WORLD_SIZE=str(world.size),
            LOCAL_RANK=str(world.local_rank),
            LOCAL_WORLD_SIZE=str(world.local_world_size),
        )

    def carry_out(self, world: neutral.Group) -> Rebuilt:
        """Copies the source's state to all ranks and wraps the models."""
        communicator, group = group_state.world, group_state.default_group
        assert communicator is not None
        assert group is not None
        self._take_state(communicator, self._source(communicator))
        if group_state.initialised_torch_distributed:
            torch_init_process_group.begin_again(world, communicator)
        refusal: Exception | None = None
        for model in self.models:
            try:
                model.wrap(group)
            except Exception as error:
                # All ranks raise this error, or the group has failed, and the next call notices that.
                refusal = refusal or error
        try:
            # A barrier alone would only test small packets, but the collectives that follow send larger ones.
            communicator.alltoall_inplace(torch.zeros(communicator.nranks(), _CARRIED, dtype=torch.uint8))
            communicator.barrier()
        except Exception as error:
            _chain(error, refusal)
            raise
        membership_state.rebuilding = None
        if refusal is not None:
            raise refusal
        lost = tuple(rank for rank in range(self._former_size) if rank not in self._ranks)
        steps = {model.name: model.progress.steps for model in self.models}
        return Rebuilt(world.rank, world.size, tuple(self._ranks), lost, steps)

    def _source(self, communicator: Communicator) -> int:
        """Returns the lowest rank with the most completed steps over all models. Every rank adopts its progress."""
        everybody = communicator.allgather_object({model.name: model.progress for model in self.models})
        for rank, said in enumerate(everybody):
            if said.keys() != everybody[0].keys():
                raise MismatchError(
                    f"the ranks' models differ: rank 0 has {sorted(everybody[0])}, rank {rank} has {sorted(said)}"
                )
        # Every rank steps its models in the same order, so the rank that is ahead has the largest sum.
        done = [sum(progress.steps for progress in said.values()) for said in everybody]
        source = done.index(max(done))
        self._found = everybody[source]
        return source

    def _take_state(self, communicator: Communicator, source: int) -> None:
        """Copies the source's state to all ranks. If the source is lost meanwhile, all get their own state back."""
        rank = communicator.rank()

        def broadcast(room: torch.Tensor) -> None:
            communicator.broadcast(room, source)

        restore: list[Callable[[], None]] = []
        try:
            for model in self.models:
                if rank != source:
                    restore.append(model.copy_of_state())
                broadcast_tensors(broadcast, rank, model.state(), source)
                for optimizer in model.optimizers:
                    broadcast_optimizer(communicator, broadcast, optimizer, model.own(), source)
            communicator.barrier()
        except BaseException:
            for each in restore:
                each()
            raise
        for model in self.models:
            model.progress = self._found[model.name]
