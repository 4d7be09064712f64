"""The engine of a wrapper: with uneven inputs (torch's Join) and communication hooks."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.distributed.algorithms.join import Join, Joinable, JoinHook

from bagua.errors import BaguaError

from ..algorithms.gradient_allreduce import GradientAllReduceAlgorithmImpl
from ..model_engine.engine import ModelEngine
from ..model_engine.gradients import GradientExchange
from .comm_hooks import CommHook, HookedAllReduce, check

__all__ = ["WrapperEngine"]


class WrapperEngine(ModelEngine):
    """What communicates for a :class:`DistributedDataParallel`."""

    def __init__(
        self,
        *args: Any,
        owner: weakref.ref[Joinable],
        comm_hook: tuple[Any, CommHook] | None = None,
        cap: int | None = None,
        static_graph: bool = False,
        **options: Any,
    ) -> None:
        # The wrapper, which torch's Join configures for uneven inputs.
        self._owner = owner
        self._comm_hook: tuple[Any, CommHook] | None = None
        # Bytes of a bucket as the user gave them.
        self._cap = cap
        self._static_graph = static_graph
        # Ranks that still have inputs, in training with uneven ones.
        self._active = 0
        self.divide_by_initial_world_size = True
        # Whether the last forward with gradients was to be communicated.
        self._armed = True
        # A forward runs.
        self._in_forward = False
        # Gradients were exchanged inside it.
        self._exchanged_in_forward = False
        super().__init__(*args, **options)
        if comm_hook is not None:
            self.register_comm_hook(*comm_hook)

    def options(self) -> dict[str, Any]:
        """See :meth:`ModelEngine.options`."""
        own = {"owner": self._owner, "cap": self._cap, "static_graph": self._static_graph}
        return {**super().options(), **own, "comm_hook": self._comm_hook}

    def _trains(self, module: torch.nn.Module) -> bool:
        return module.training and torch.is_grad_enabled()

    def before_forward(self, module: torch.nn.Module, inputs: Any) -> None:
        """See :meth:`ModelEngine.before_forward`."""
        if torch.is_grad_enabled() and torch._C._current_graph_task_id() == -1:
            # As with torch: a backward communicates when its forward was outside no_sync.
            if self.require_backward_grad_sync:
                self._armed = True
            elif not self._in_step:
                self._armed = False
        super().before_forward(module, inputs)
        if torch._C._current_graph_task_id() == -1:
            self._in_forward, self._exchanged_in_forward = True, False

    def forward_returned(self) -> None:
        """After each forward that did not raise."""
        if torch._C._current_graph_task_id() != -1:
            return
        self._in_forward = False
        if self._exchanged_in_forward:
            self._exchanged_in_forward = False
            self._gradients_are_exchanged()

    def _gradients_are_exchanged(self) -> None:
        if self._in_forward:
            # With Lightning's manual optimization backwards run inside a forward, whose rest may change buffers.
            self._exchanged_in_forward = True
        elif not self._joins():
            super()._gradients_are_exchanged()

    def _backward_communicates(self) -> bool:
        return self._armed

    def decide_now(self) -> None:
        """Whether the next backward communicates is what no_sync says now, not what it said at the forward: for a
        backward inside the forward of its step, as with Lightning's manual optimization.
        """
        self._armed = self.require_backward_grad_sync

    # --- uneven inputs ------------------------------------------------------------------------------------------------

    def join_hook(self, divide_by_initial_world_size: bool) -> JoinHook:
        """What a rank does that has no inputs any more. NotImplementedError for an algorithm that cannot."""
        self._require_all_reduce("join")
        self.divide_by_initial_world_size = divide_by_initial_world_size
        return _JoinHook(self)

    def _require_all_reduce(self, what: str) -> GradientAllReduceAlgorithmImpl:
        if not isinstance(self.bagua_algorithm, GradientAllReduceAlgorithmImpl):
            raise NotImplementedError(f"{what} with {self.bagua_algorithm.name}: only gradient_allreduce has it")
        return self.bagua_algorithm

    def _init_algorithm(self) -> None:
        super()._init_algorithm()
        if isinstance(self.exchange, GradientExchange):
            self.exchange.is_static = self._static_graph
            self.exchange.takes_given = self.do_flatten
            # A hook's result stays as it is.
            if self._comm_hook is None:
                # Weakly, or the engine would outlive its model until a collection of garbage.
                this = weakref.ref(self)
                self.exchange.factor = lambda: 1.0 if (engine := this()) is None else engine._factor()

    def _factor(self) -> float:
        if self.divide_by_initial_world_size or not self._active:
            return 1.0
        return self.backend.size / self._active

    def _forward_is_announced(self) -> None:
        self.root = self._active = 0
        owner = self._owner()
        if owner is None or not self._joins():
            return
        work = Join.notify_join_context(owner)
        if work is not None:
            work.wait()
        self._count(True, self.require_backward_grad_sync)

    def _joins(self) -> bool:
        """True in training with uneven inputs. Buffers are then those of the last rank that has inputs for the next
        forward, so that they are sent before it.
        """
        owner = self._owner()
        return owner is not None and bool(owner._join_config.enable)

    def _count(self, is_one: bool, syncs: bool = False) -> bool:
        """How many ranks have inputs; the last of them sends what all ranks get. Whether a backward communicates."""
        said = self.backend.all_gather(torch.tensor([[is_one, syncs]], dtype=torch.uint8)).view(-1, 2)
        ones: list[int] = said[:, 0].tolist()
        self._active = sum(ones)
        self.root = max(rank for rank, one in enumerate(ones) if one)
        return bool(said[:, 1].any())

    def shadow(self) -> None:
        """Takes part in a forward of the ranks that still have inputs, and in its backward. Collective."""
        syncs = self._count(False)
        if self.buffer_schedule.forward_begins(syncs=syncs):
            self.send_buffers()
        if syncs:
            assert isinstance(self.exchange, GradientExchange)
            self.exchange.shadow()

    def end_of_inputs(self, is_last: bool) -> None:
        """Every rank gets the model of the last one that had inputs. Collective."""
        self._count(is_last)
        ignored = {id(buffer) for buffer in self.module.buffers()} if not self.broadcast_buffers else set()
        self.broadcast([tensor for tensor in self._state() if id(tensor) not in ignored])

    # --- hooks --------------------------------------------------------------------------------------------------------

    def register_comm_hook(self, state: Any, hook: CommHook) -> None:
        """The hook communicates from now on. Collective."""
        plain = self._require_all_reduce("a communication hook")
        check(hook)
        if self._comm_hook is not None:
            raise BaguaError(f"model {self.bagua_module_name!r} has a communication hook already")
        if self._in_step:
            raise BaguaError("a communication hook is registered before the forward, not between it and its backward")
        self._comm_hook = state, hook
        self.bagua_algorithm = HookedAllReduce(plain, hook, state, self._cap, self.do_flatten)
        self.bagua_algorithm.attach(self, plain.name)
        self._begin_algorithm_anew()


class _JoinHook(JoinHook):
    """A rank without inputs."""

    def __init__(self, engine: WrapperEngine) -> None:
        self._engine = engine

    def main_hook(self) -> None:
        """Called for each step of the others."""
        self._engine.shadow()

    def post_hook(self, is_last_joiner: bool) -> None:
        """Called when no rank has inputs."""
        self._engine.end_of_inputs(is_last_joiner)
