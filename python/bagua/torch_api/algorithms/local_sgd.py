"""Local SGD and DiLoCo: ranks step alone, and average their changes every k-th step.

Sources: Stich, ICLR 2019 (arXiv:1805.09767) for local SGD; Douillard et al., 2023 (arXiv:2311.08105) for DiLoCo, whose
outer optimizer is SGD with Nesterov momentum. With x the weights of one rank, a round at the end of every k-th step is

    D      = mean over the ranks of (anchor - x), through the codec if there is one
    b      = outer_momentum * b + D
    x      = anchor - outer_lr * (D + outer_momentum * b if nesterov else b)
    anchor = x

Local SGD has outer_lr 1 and no b. After a round, x is bitwise equal on all ranks.

**Rounding.** x, anchor and D have the parameter's dtype: anchor - x is rounded once, and so is the mean. b and the
formulas for b and x use the parameter's dtype, or float32 for float16 and bfloat16. outer_lr and outer_momentum are
rounded to that dtype, each multiplication, addition and subtraction is rounded on its own, and x is rounded once more
to the parameter's dtype.

**When a round happens.** A round is due when the backward of a k-th step ends. It runs after the last ``step()`` of the
optimizers that hold parameters of the model. GradScaler skips an optimizer whose gradients are not finite, so the round
does not wait for that optimizer. If no other optimizer is left, this rank sends its part at once, does not wait, and
changes its weights before the next step begins. In this way no rank waits for another rank's next forward. An optimizer
that is not called for another reason delays the round until the next step begins.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass

import torch

from bagua.codecs import Compression, raw_codec

from ..bucket import BaguaBucket
from ..model_engine.algorithm_interface import always
from ..model_engine.optimizer_steps import BetweenSteps
from ..model_engine.votes import divide
from ..process_group import ReduceOp
from ..tensor import BaguaTensor
from ._policy import ExchangePolicy
from .base import Algorithm, AlgorithmImpl, GlobalAlgorithmRegistry, WrappedModel


class OuterExchange(BetweenSteps):
    """The changes of the weights since the last round, in buckets. A round happens at the end of a step.

    All dictionaries map parameter names to tensors of the parameters' shapes.
    """

    def __init__(self, bagua_ddp: WrappedModel, algorithm: LocalSGDAlgorithmImpl) -> None:
        super().__init__(bagua_ddp)
        self._algorithm = algorithm
        # Waits for rank 0's buffers. Set from when this rank has sent its part until the weights have changed.
        self._receive_buffers: Callable[[], None] | None = None
        #: The weights after the last round, at first the initial weights. Equal on all ranks.
        self.anchors = {name: param.detach().clone() for name, param in self._parameters}
        #: b, if outer_momentum is not 0. Equal on all ranks.
        self.momenta = {
            name: torch.zeros_like(anchor, dtype=_wide(anchor.dtype))
            for name, anchor in self.anchors.items()
            if algorithm.outer_momentum
        }
        #: anchor - x before the exchange, D after it.
        self._differences: dict[str, torch.Tensor] = {}

    def register(self) -> list[torch.Tensor]:
        """Registers the parameters in reverse order. The communicated tensor of each is its difference."""
        tensors = []
        for name, param in reversed(self._parameters):
            difference = self._differences[name] = torch.zeros_like(self.anchors[name])
            tensors.append(BaguaTensor.ensure_bagua_tensor(param, name, self._module_name, always(difference)))
        return tensors

    def abandon(self) -> None:
        """Cancels this rank's round, because the backward of its step never completed."""
        self._open = False

    def _send(self, *, waits: bool) -> None:
        """Sends this rank's differences, and on rank 0 the buffers."""
        with torch.no_grad():
            for name, param in self._parameters:
                torch.sub(self.anchors[name], param, out=self._differences[name])
            self._votes.write()
            self._votes.scale(list(self._differences.values()))
        for name, _ in self._parameters:
            self._backend.mark_ready(self._backend.number(name))
        self._receive_buffers = self._algorithm.bagua_ddp.start_buffers()

    def _take_over(self) -> None:
        """Updates anchors and parameters from the mean differences."""
        algorithm = self._algorithm
        try:
            divisor = self._votes.read()
        except ValueError:
            self._forget()
            raise
        if divisor == 0:
            # All ranks have skipped this round. The next round averages the changes of both.
            self._forget()
            return
        with torch.no_grad():
            divide(list(self._differences.values()), divisor)
            for name, param in self._parameters:
                anchor = self.anchors[name]
                mean = move = self._differences[name].to(_wide(anchor.dtype))
                if algorithm.outer_momentum:
                    momentum = self.momenta[name]
                    momentum.mul_(algorithm.outer_momentum).add_(mean)
                    move = momentum.mul(algorithm.outer_momentum).add_(mean) if algorithm.nesterov else momentum
                # sub(alpha=) may round product and difference together.
                anchor.copy_(anchor.to(move.dtype).sub_(move.mul(algorithm.outer_lr)))
                param.copy_(anchor)
                # A NaN in an anchor would spoil the next round even after finite weights are loaded.
                anchor.nan_to_num_(0.0, 0.0, 0.0)
        self._forget()

    def _forget(self) -> None:
        """Completes the exchange of buffers that :meth:`_send` started, because the other ranks take part in it."""
        receive_buffers, self._receive_buffers = self._receive_buffers, None
        if receive_buffers is not None:
            receive_buffers()


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


class LocalSGDAlgorithmImpl(AlgorithmImpl):
    """Runs a round every k-th step, for both local SGD and DiLoCo."""

    communication_interval: int
    hierarchical: bool
    compression: Compression
    error_feedback: bool
    # With these values, an outer step sets the weights to their mean, which is local SGD. DiLoCo has options for them.
    outer_lr = 1.0
    outer_momentum = 0.0
    nesterov = False

    def _policy(self) -> ExchangePolicy:
        return ExchangePolicy(
            make_exchange=lambda bagua_ddp: OuterExchange(bagua_ddp, self),
            communicates=lambda step: (step + 1) % self.communication_interval == 0,
            # Rank 0's buffers are sent after a round instead.
            sends_buffers=False,
            # A round computes with the anchors (the weights after the last round), unless the result is a plain mean.
            has_weight_state=bool(self.outer_momentum or self.outer_lr != 1.0 or self.compression is not None),
            fixes_initial_weights=True,
            pads_buckets=True,
            # Accepts models with sparse gradients, which stay on their rank. The changed weights are averaged.
            sparse_op=ReduceOp.AVG,
            votes_divide=True,
        )

    def init_operations(self, bagua_ddp: WrappedModel, bucket: BaguaBucket) -> None:
        """Appends an average, through the codec if there is one."""
        bucket.clear_ops()
        bucket.append_centralized_synchronous_op(
            hierarchical=self.hierarchical,
            average=not self._only_adds,
            scattergather=True,
            compression=self.compression,
            group=self.process_group,
            error_feedback=self.error_feedback,
        )

    def _tensors_of_state(self) -> dict[str, dict[str, torch.Tensor]]:
        exchange = self.bagua_ddp.exchange
        assert isinstance(exchange, OuterExchange)
        tensors = {**super()._tensors_of_state(), "anchor": exchange.anchors}
        if self.outer_momentum:
            tensors["outer_momentum"] = exchange.momenta
        return tensors


@dataclass(eq=False, repr=False)
class LocalSGDAlgorithm(Algorithm):
    """Every rank steps alone. The weights are averaged at the end of every ``communication_interval``-th step.

    - ``communication_interval``: Number of steps from one average to the next.
    - ``hierarchical``: Averages inside each host first, and uses the codec only between hosts.
    - ``compression``: A codec's name, a :class:`bagua.Codec`, or None. The codec encodes the change since the last
      average.
    - ``error_feedback``: Adds what encoding lost to the next average.

    Raises ValueError for an interval below 1, an unknown codec, or error feedback without a codec. Raises TypeError for
    an interval or codec of another type.

    If one rank alone skips an optimizer step for a reason other than an overflow, do not communicate anything else
    before its next forward: the other ranks wait for that rank in ``optimizer.step()``.
    """

    needs_optimizers = True
    _implementation = LocalSGDAlgorithmImpl

    communication_interval: int = 8
    _: KW_ONLY
    hierarchical: bool = True
    compression: Compression = None
    error_feedback: bool = False

    def __post_init__(self) -> None:
        _check(self.communication_interval, self.compression, self.error_feedback)


@dataclass(eq=False, repr=False)
class DiLoCoAlgorithm(Algorithm):
    """Every rank steps alone. An outer SGD steps at the end of every ``communication_interval``-th step.

    - ``communication_interval``: Number of steps from one outer step to the next.
    - ``outer_lr``: Learning rate of the outer SGD, whose gradient is the mean change of the ranks' weights.
    - ``outer_momentum``: Momentum of the outer SGD, at least 0 and less than 1.
    - ``nesterov``: Uses Nesterov's form of the momentum.
    - ``hierarchical``, ``compression``, ``error_feedback``: As in :class:`LocalSGDAlgorithm`.

    Raises the errors of :class:`LocalSGDAlgorithm`, and ValueError for an ``outer_lr`` that is not positive and finite
    or an ``outer_momentum`` outside [0, 1).
    """

    needs_optimizers = True
    _implementation = LocalSGDAlgorithmImpl

    communication_interval: int = 100
    _: KW_ONLY
    outer_lr: float = 0.7
    outer_momentum: float = 0.9
    nesterov: bool = True
    hierarchical: bool = True
    compression: Compression = None
    error_feedback: bool = False

    def __post_init__(self) -> None:
        _check(self.communication_interval, self.compression, self.error_feedback)
        if not 0 < self.outer_lr < float("inf"):
            raise ValueError(f"outer_lr must be positive and finite, not {self.outer_lr}")
        if not 0 <= self.outer_momentum < 1:
            raise ValueError(f"outer_momentum must be in [0, 1), not {self.outer_momentum}")


def _check(communication_interval: int, compression: Compression, error_feedback: bool) -> None:
    if operator.index(communication_interval) < 1:
        raise ValueError(f"communication_interval must be at least 1, not {communication_interval}")
    raw_codec(compression)
    if error_feedback and compression is None:
        raise ValueError("error_feedback=True needs a compression; it is None")


GlobalAlgorithmRegistry.register("local_sgd", LocalSGDAlgorithm, "weights averaged every k-th step (local SGD)")
GlobalAlgorithmRegistry.register("diloco", DiLoCoAlgorithm, "local steps with an outer momentum (DiLoCo)")
