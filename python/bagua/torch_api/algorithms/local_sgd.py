"""Local SGD and DiLoCo: every rank steps alone, and every k-th step the ranks average what they changed.

Sources: Stich, ICLR 2019 (arXiv:1805.09767) for local SGD; Douillard et al., 2023 (arXiv:2311.08105) for DiLoCo, whose
outer optimizer is SGD with Nesterov momentum. With x the weights of one rank, a round at the end of every k-th step is

    D      = mean over the ranks of (anchor - x), through the codec if there is one
    b      = outer_momentum * b + D
    x      = anchor - outer_lr * (D + outer_momentum * b if nesterov else b)
    anchor = x

Local SGD has outer_lr 1 and no b. x is then equal to the bit on all ranks.

**Rounding.** x, anchor and D have the parameter's dtype: anchor - x is rounded once, and so is the mean. b and the two
formulas that follow have the parameter's dtype too, for float16 and bfloat16 float32; outer_lr and outer_momentum are
rounded to it, each multiplication, addition and subtraction is rounded by itself, and x is rounded once more to the
parameter's dtype.

**When.** A round is due when the backward of a k-th step ends, and happens after the last ``step()`` of the optimizers
that hold parameters of the model. An optimizer whose gradients are not finite is not waited for, since GradScaler skips
it: where no other is left, this rank's part of the round starts at once, without a wait, and its weights change before
the next step begins. So no rank waits for another's next forward. An optimizer that is not called for another reason
delays the round until the next step begins.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch

from bagua.codecs import Compression, raw_codec

from ..bucket import BaguaBucket
from ..model_engine.bucket_engine import BucketEngine
from ..model_engine.exchange_interface import Exchange, Parameters, always
from ..model_engine.steps import AwaitedSteps
from ..process_group import ProcessGroup, ReduceOp
from ..tensor import BaguaTensor
from .base import Algorithm, AlgorithmImpl, GlobalAlgorithmRegistry, WrappedModel


class OuterExchange(Exchange):
    """What the ranks changed since the last round, in buckets of its own; a round is at the end of a step.

    All dictionaries are by parameter name; their tensors have the parameters' shapes.
    """

    def __init__(
        self,
        backend: BucketEngine,
        module_name: str,
        parameters: Parameters,
        outer_lr: float,
        outer_momentum: float,
        nesterov: bool,
    ) -> None:
        self._backend = backend
        self._module_name = module_name
        self._parameters = list(parameters)
        self._outer_lr = outer_lr
        self._outer_momentum = outer_momentum
        self._nesterov = nesterov
        #: The weights after the last round; at first those that all ranks begin with. Equal on all ranks.
        self.anchors = {name: param.detach().clone() for name, param in parameters}
        #: b, where outer_momentum is not 0. Equal on all ranks.
        self.momenta = {
            name: torch.zeros_like(anchor, dtype=_wide(anchor.dtype))
            for name, anchor in self.anchors.items()
            if outer_momentum
        }
        #: anchor - x before the exchange, D after it.
        self._differences: dict[str, torch.Tensor] = {}

    def register(self) -> list[torch.Tensor]:
        """The parameters as Bagua tensors whose effective tensor is the difference, the last of the model first."""
        tensors = []
        for name, param in reversed(self._parameters):
            difference = self._differences[name] = torch.zeros_like(self.anchors[name])
            tensors.append(BaguaTensor.ensure_bagua_tensor(param, name, self._module_name, always(difference)))
        return tensors

    def start_round(self) -> None:
        """Sends this rank's differences. Does not wait."""
        with torch.no_grad():
            for name, param in self._parameters:
                torch.sub(self.anchors[name], param, out=self._differences[name])
        for name, _ in self._parameters:
            self._backend.mark_ready(self._backend.number(name))

    def finish_round(self) -> None:
        """Waits for the means, and moves anchors and parameters."""
        self._backend.wait_pending_comm_ops()
        with torch.no_grad():
            for name, param in self._parameters:
                anchor = self.anchors[name]
                mean = move = self._differences[name].to(_wide(anchor.dtype))
                if self._outer_momentum:
                    momentum = self.momenta[name]
                    momentum.mul_(self._outer_momentum).add_(mean)
                    move = momentum.mul(self._outer_momentum).add_(mean) if self._nesterov else momentum
                # Not sub(alpha=): it may round the product and the difference together.
                anchor.copy_(anchor.to(move.dtype).sub_(move.mul(self._outer_lr)))
                param.copy_(anchor)


def _wide(dtype: torch.dtype) -> torch.dtype:
    """The type to compute in."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


class LocalSGDAlgorithmImpl(AlgorithmImpl):
    """Rounds every k-th step, for both algorithms."""

    communication_interval: int
    hierarchical: bool
    compression: Compression
    error_feedback: bool
    # Local SGD's, which are no options of it.
    outer_lr = 1.0
    outer_momentum = 0.0
    nesterov = False
    _pads_buckets = True

    def __init__(self, process_group: ProcessGroup, *options: Any, **named: Any) -> None:
        super().__init__(process_group, *options, **named)
        # A round is due, and this rank has not sent its part.
        self._due = False
        # Which optimizers are to step before this rank sends its part; as old as the exchange.
        self._steps: AwaitedSteps | None = None
        # The wait for rank 0's buffers, from when this rank sent its part until the weights have changed.
        self._receive_buffers: Callable[[], None] | None = None
        # Number of the last step that had a round: a second backward of the same step brings no second one.
        self._last_round = -1

    def communicates(self, step: int) -> bool:
        """Whether a round is at the end of this step."""
        return (step + 1) % self.communication_interval == 0

    def buffers_due(self, step: int) -> bool:
        """Never: rank 0's buffers travel after a round."""
        return False

    def sparse_op(self) -> ReduceOp:
        """Sparse gradients stay on their rank; the weights that they changed are averaged like all others."""
        return ReduceOp.AVG

    def make_exchange(self, bagua_ddp: WrappedModel) -> OuterExchange:
        """The differences to the weights of the last round, which are now those that all ranks begin with."""
        name, parameters = bagua_ddp.bagua_module_name, bagua_ddp.bagua_build_params()
        self._steps = AwaitedSteps(name, [param for _, param in parameters], bagua_ddp.bagua_optimizers)
        return OuterExchange(
            bagua_ddp.backend,
            name,
            parameters,
            self.outer_lr,
            self.outer_momentum,
            self.nesterov,
        )

    def init_operations(self, bagua_ddp: WrappedModel, bucket: BaguaBucket) -> None:
        """Averages the bucket, through the codec if there is one."""
        bucket.clear_ops()
        bucket.append_centralized_synchronous_op(
            hierarchical=self.hierarchical,
            average=True,
            scattergather=True,
            compression=self.compression,
            group=self.process_group,
            error_feedback=self.error_feedback,
        )

    def init_post_backward_hook(self, bagua_ddp: WrappedModel) -> Callable[[], None]:
        """A round becomes due. Where each optimizer will skip its step, this rank sends its part now."""

        def hook() -> None:
            ddp = self.bagua_ddp
            becomes_due = self.communicates(ddp.step) and ddp.step != self._last_round
            assert self._steps is not None
            none_follows = self._steps.backward_ended(looks_at_gradients=becomes_due)
            self._due = self._due or becomes_due
            if none_follows:
                self._start(ddp)

        return hook

    def init_post_optimizer_step_hook(self, bagua_ddp: WrappedModel) -> Callable[[torch.optim.Optimizer], None]:
        """The round, after the last optimizer's step."""

        def hook(optimizer: torch.optim.Optimizer) -> None:
            assert self._steps is not None
            if self._steps.is_last(optimizer) and self._due:
                self.before_step(self.bagua_ddp)
                self._steps.communicated()

        return hook

    def before_optimizer_step(self, bagua_ddp: WrappedModel, optimizer: torch.optim.Optimizer) -> None:
        """Ends a round that this rank has sent its part of: the optimizer steps in spite of its gradients."""
        assert self._steps is not None
        if self._steps.begins(optimizer) and self._receive_buffers is not None:
            self._finish(bagua_ddp)

    def before_step(self, bagua_ddp: WrappedModel) -> None:
        """The round of the last step, where it was not done yet."""
        if self._due:
            self._start(bagua_ddp)
        if self._receive_buffers is not None:
            self._finish(bagua_ddp)

    def drop(self, bagua_ddp: WrappedModel) -> bool:
        """Whether a round was due."""
        if self._receive_buffers is not None:
            receive_buffers, self._receive_buffers = self._receive_buffers, None
            bagua_ddp.backend.wait_pending_comm_ops()
            receive_buffers()
        return self._due

    def _start(self, ddp: WrappedModel) -> None:
        # First: after a failure the group is of no more use, and the state can still be saved.
        self._due = False
        self._last_round = ddp.step
        _exchange(ddp).start_round()
        self._receive_buffers = ddp.start_buffers()

    def _finish(self, ddp: WrappedModel) -> None:
        receive_buffers, self._receive_buffers = self._receive_buffers, None
        _exchange(ddp).finish_round()
        if receive_buffers is not None:
            receive_buffers()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """As :meth:`AlgorithmImpl.load_state_dict`, after the round of the last step, where it was not done yet."""
        super().load_state_dict(state)
        self._last_round = self.bagua_ddp.step

    def _tensors_of_state(self) -> dict[str, dict[str, torch.Tensor]]:
        exchange = _exchange(self.bagua_ddp)
        tensors = {**super()._tensors_of_state(), "anchor": exchange.anchors}
        if self.outer_momentum:
            tensors["outer_momentum"] = exchange.momenta
        return tensors


def _exchange(ddp: WrappedModel) -> OuterExchange:
    exchange = ddp.exchange
    assert isinstance(exchange, OuterExchange)
    return exchange


class LocalSGDAlgorithm(Algorithm):
    """Every rank steps alone; the weights are averaged at the end of every ``communication_interval``-th step.

    ``hierarchical``: inside hosts first, the codec between hosts only. ``compression``: a codec's name, a
    :class:`bagua.Codec` or None, for what the ranks changed since the last average. ``error_feedback`` adds what
    encoding lost to the next average. ValueError for an interval below 1, an unknown codec, and error feedback without
    a codec; TypeError for what is no codec or no whole number.

    Between a step that one rank alone skips for another reason than an overflow and its next forward, nothing else may
    be communicated: the others wait for it in their ``optimizer.step()``.
    """

    needs_optimizers = True
    _implementation = LocalSGDAlgorithmImpl

    def __init__(
        self,
        communication_interval: int = 8,
        *,
        hierarchical: bool = True,
        compression: Compression = None,
        error_feedback: bool = False,
    ) -> None:
        _check(communication_interval, compression, error_feedback)
        self.communication_interval = communication_interval
        self.hierarchical = hierarchical
        self.compression = compression
        self.error_feedback = error_feedback


class DiLoCoAlgorithm(Algorithm):
    """Every rank steps alone; at the end of every ``communication_interval``-th step an outer SGD steps.

    Its gradient is the average of what the ranks changed, its learning rate ``outer_lr``, its momentum
    ``outer_momentum``, in Nesterov's form with ``nesterov``. The other options and errors are those of
    :class:`LocalSGDAlgorithm`; also ValueError for an ``outer_lr`` that is not above 0 and finite, and an
    ``outer_momentum`` outside of [0, 1).
    """

    needs_optimizers = True
    _implementation = LocalSGDAlgorithmImpl

    def __init__(
        self,
        communication_interval: int = 100,
        *,
        outer_lr: float = 0.7,
        outer_momentum: float = 0.9,
        nesterov: bool = True,
        hierarchical: bool = True,
        compression: Compression = None,
        error_feedback: bool = False,
    ) -> None:
        _check(communication_interval, compression, error_feedback)
        if not 0 < outer_lr < float("inf"):
            raise ValueError(f"outer_lr={outer_lr} is not above 0 and finite")
        if not 0 <= outer_momentum < 1:
            raise ValueError(f"outer_momentum={outer_momentum} is not in [0, 1)")
        self.communication_interval = communication_interval
        self.outer_lr = outer_lr
        self.outer_momentum = outer_momentum
        self.nesterov = nesterov
        self.hierarchical = hierarchical
        self.compression = compression
        self.error_feedback = error_feedback


def _check(communication_interval: int, compression: Compression, error_feedback: bool) -> None:
    if operator.index(communication_interval) < 1:
        raise ValueError(f"communication_interval={communication_interval} is below 1")
    raw_codec(compression)
    if error_feedback and compression is None:
        raise ValueError("error_feedback without compression has nothing to feed back")


GlobalAlgorithmRegistry.register("local_sgd", LocalSGDAlgorithm, "weights averaged every k-th step (local SGD)")
GlobalAlgorithmRegistry.register("diloco", DiLoCoAlgorithm, "local steps with an outer momentum (DiLoCo)")
