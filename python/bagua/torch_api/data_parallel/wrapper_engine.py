"""The engine of DistributedDataParallel, with uneven inputs (torch's Join) and communication hooks."""

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
    """The communication of a :class:`DistributedDataParallel`."""

    def __init__(
        self,
        *args: Any,
        owner: weakref.ref[Joinable],
        comm_hook: tuple[Any, CommHook] | None = None,
        cap: int | None = None,
        static_graph: bool = False,
        **options: Any,
    ) -> None:
        # The wrapper, which Join configures for uneven inputs.
        self._owner = owner
        self._comm_hook: tuple[Any, CommHook] | None = None
        # Size of a bucket in bytes, if the user gave one.
        self._cap = cap
        self._static_graph = static_graph
        # Number of ranks that still have inputs, with uneven inputs.
        self._active = 0
        self.divide_by_initial_world_size = True
        # True if the last forward with gradients was outside no_sync.
        self._armed = True
        self._in_forward = False
        # True if gradients were exchanged inside the running forward.
        self._exchanged_in_forward = False
        super().__init__(*args, **options)
        if comm_hook is not None:
            self.register_comm_hook(*comm_hook)

    def options(self) -> dict[str, Any]:
        """Like :meth:`ModelEngine.options`."""
        own = {"owner": self._owner, "cap": self._cap, "static_graph": self._static_graph}
        return {**super().options(), **own, "comm_hook": self._comm_hook}

    def _trains(self, module: torch.nn.Module) -> bool:
        return module.training and torch.is_grad_enabled()

    def before_forward(self, module: torch.nn.Module, inputs: Any) -> None:
        """Like :meth:`ModelEngine.before_forward`."""
        if torch.is_grad_enabled() and torch._C._current_graph_task_id() == -1:
            # As in torch, a backward communicates if its forward was outside no_sync.
            if self.require_backward_grad_sync:
                self._armed = True
            elif not self._in_step:
                self._armed = False
        super().before_forward(module, inputs)
        if torch._C._current_graph_task_id() == -1:
            self._in_forward, self._exchanged_in_forward = True, False

    def forward_returned(self) -> None:
        """Called after each forward that did not raise."""
        if torch._C._current_graph_task_id() != -1:
            return
        self._in_forward = False
        if self._exchanged_in_forward:
            self._exchanged_in_forward = False
            self._gradients_are_exchanged()

    def _gradients_are_exchanged(self) -> None:
        if self._in_forward:
            # With Lightning's manual optimization, backwards run inside a forward, whose rest may change buffers.
            self._exchanged_in_forward = True
        elif not self._joins():
            super()._gradients_are_exchanged()

    def _backward_communicates(self) -> bool:
        return self._armed

    def decide_now(self) -> None:
        """Makes the next backward communicate as no_sync says now, instead of at the forward.

        For a backward inside the forward of its step, as with Lightning's manual optimization.
        """
        self._armed = self.require_backward_grad_sync

    def join_hook(self, divide_by_initial_world_size: bool) -> JoinHook:
        """Returns the hook for a rank without inputs. Raises NotImplementedError except with gradient_allreduce."""
        self._require_all_reduce("join")
        self.divide_by_initial_world_size = divide_by_initial_world_size
        return _JoinHook(self)

    def _require_all_reduce(self, what: str) -> GradientAllReduceAlgorithmImpl:
        if not isinstance(self.bagua_algorithm, GradientAllReduceAlgorithmImpl):
            raise NotImplementedError(
                f"{what} works with gradient_allreduce only, not with {self.bagua_algorithm.name}"
            )
        return self.bagua_algorithm

    def _init_algorithm(self) -> None:
        super()._init_algorithm()
        if isinstance(self.exchange, GradientExchange):
            self.exchange.is_static = self._static_graph
            self.exchange.takes_given = self.do_flatten
            # The result of a hook is not scaled.
            if self._comm_hook is None:
                # A weak reference, because the engine would otherwise outlive its model until a garbage collection.
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
        """Returns True in training with uneven inputs.

        The buffers for the next forward are then sent before it, from the last rank that has inputs.
        """
        owner = self._owner()
        return owner is not None and bool(owner._join_config.enable)

    def _count(self, is_one: bool, syncs: bool = False) -> bool:
        """Counts the ranks with inputs, and makes the last one the sender. Returns True if a backward communicates."""
        said = self.backend.all_gather(torch.tensor([[is_one, syncs]], dtype=torch.uint8)).view(-1, 2)
        ones: list[int] = said[:, 0].tolist()
        self._active = sum(ones)
        self.root = max(rank for rank, one in enumerate(ones) if one)
        return bool(said[:, 1].any())

    def shadow(self) -> None:
        """Takes part in a forward and backward of the ranks that still have inputs. Collective."""
        syncs = self._count(False)
        if self.buffer_schedule.forward_begins(syncs=syncs):
            self.send_buffers()
        if syncs:
            assert isinstance(self.exchange, GradientExchange)
            self.exchange.shadow()

    def end_of_inputs(self, is_last: bool) -> None:
        """Copies the model of the last rank that had inputs to every rank. Collective."""
        self._count(is_last)
        ignored = {id(buffer) for buffer in self.module.buffers()} if not self.broadcast_buffers else set()
        self.broadcast([tensor for tensor in self._state() if id(tensor) not in ignored])

    def register_comm_hook(self, state: Any, hook: CommHook) -> None:
        """Makes the hook communicate from now on. Collective."""
        plain = self._require_all_reduce("a communication hook")
        check(hook)
        if self._comm_hook is not None:
            raise BaguaError(f"model {self.bagua_module_name!r} has a communication hook already")
        if self._in_step:
            raise BaguaError("register a communication hook before the forward, not between it and its backward")
        self._comm_hook = state, hook
        self._use(HookedAllReduce(plain, hook, state, self._cap, self.do_flatten), plain.name)
        self._begin_algorithm_anew()


class _JoinHook(JoinHook):
    """The Join hook of a rank without inputs."""

    def __init__(self, engine: WrapperEngine) -> None:
        self._engine = engine

    def main_hook(self) -> None:
        """Called once for each step that ranks with inputs make."""
        self._engine.shadow()

    def post_hook(self, is_last_joiner: bool) -> None:
        """Called when no rank has inputs any more."""
        self._engine.end_of_inputs(is_last_joiner)
