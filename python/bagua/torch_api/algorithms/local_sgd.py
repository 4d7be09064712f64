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
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass

import torch

from bagua.codecs import Compression, raw_codec

from ..bucket import BaguaBucket
from ..model_engine.exchange_interface import always
from ..model_engine.steps import BetweenSteps
from ..process_group import ReduceOp
from ..tensor import BaguaTensor
from .base import Algorithm, AlgorithmImpl, GlobalAlgorithmRegistry, WrappedModel


class OuterExchange(BetweenSteps):
    """What the ranks changed since the last round, in buckets of its own; a round is at the end of a step.

    All dictionaries are by parameter name; their tensors have the parameters' shapes.
    """

    def __init__(self, bagua_ddp: WrappedModel, algorithm: LocalSGDAlgorithmImpl) -> None:
        super().__init__(bagua_ddp)
        self._algorithm = algorithm
        # The wait for rank 0's buffers, from when this rank sent its part until the weights have changed.
        self._receive_buffers: Callable[[], None] | None = None
        #: The weights after the last round; at first those that all ranks begin with. Equal on all ranks.
        self.anchors = {name: param.detach().clone() for name, param in self._parameters}
        #: b, where outer_momentum is not 0. Equal on all ranks.
        self.momenta = {
            name: torch.zeros_like(anchor, dtype=_wide(anchor.dtype))
            for name, anchor in self.anchors.items()
            if algorithm.outer_momentum
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

    def abandon(self) -> None:
        """A step whose backward never came has no round on this rank."""
        self._open = False

    def _send(self, *, waits: bool) -> None:
        """This rank's differences, and on rank 0 the buffers."""
        with torch.no_grad():
            for name, param in self._parameters:
                torch.sub(self.anchors[name], param, out=self._differences[name])
        for name, _ in self._parameters:
            self._backend.mark_ready(self._backend.number(name))
        self._receive_buffers = self._algorithm.bagua_ddp.start_buffers()

    def _take_over(self) -> None:
        """Moves anchors and parameters by the means."""
        algorithm = self._algorithm
        with torch.no_grad():
            for name, param in self._parameters:
                anchor = self.anchors[name]
                mean = move = self._differences[name].to(_wide(anchor.dtype))
                if algorithm.outer_momentum:
                    momentum = self.momenta[name]
                    momentum.mul_(algorithm.outer_momentum).add_(mean)
                    move = momentum.mul(algorithm.outer_momentum).add_(mean) if algorithm.nesterov else momentum
                # Not sub(alpha=): it may round the product and the difference together.
                anchor.copy_(anchor.to(move.dtype).sub_(move.mul(algorithm.outer_lr)))
                param.copy_(anchor)
                # Or weights that are loaded in place of those that are not finite would not be, after the next round.
                anchor.nan_to_num_(0.0, 0.0, 0.0)
        self._forget()

    def _forget(self) -> None:
        """The other ranks have sent or awaited the buffers."""
        receive_buffers, self._receive_buffers = self._receive_buffers, None
        if receive_buffers is not None:
            receive_buffers()


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
    begins_equal = True
    _pads_buckets = True

    @property
    def keeps_weights(self) -> bool:  # type: ignore[override]
        """The anchors. The mean of the weights does not depend on them, unless it is encoded."""
        return bool(self.outer_momentum or self.outer_lr != 1.0 or self.compression is not None)

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
        return OuterExchange(bagua_ddp, self)

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

    def _tensors_of_state(self) -> dict[str, dict[str, torch.Tensor]]:
        exchange = self.bagua_ddp.exchange
        assert isinstance(exchange, OuterExchange)
        tensors = {**super()._tensors_of_state(), "anchor": exchange.anchors}
        if self.outer_momentum:
            tensors["outer_momentum"] = exchange.momenta
        return tensors


@dataclass(eq=False, repr=False)
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

    communication_interval: int = 8
    _: KW_ONLY
    hierarchical: bool = True
    compression: Compression = None
    error_feedback: bool = False

    def __post_init__(self) -> None:
        _check(self.communication_interval, self.compression, self.error_feedback)


@dataclass(eq=False, repr=False)
class DiLoCoAlgorithm(Algorithm):
    """Every rank steps alone; at the end of every ``communication_interval``-th step an outer SGD steps.

    Its gradient is the average of what the ranks changed, its learning rate ``outer_lr``, its momentum
    ``outer_momentum``, in Nesterov's form with ``nesterov``. The other options and errors are those of
    :class:`LocalSGDAlgorithm`; also ValueError for an ``outer_lr`` that is not above 0 and finite, and an
    ``outer_momentum`` outside of [0, 1).
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
            raise ValueError(f"outer_lr={self.outer_lr} is not above 0 and finite")
        if not 0 <= self.outer_momentum < 1:
            raise ValueError(f"outer_momentum={self.outer_momentum} is not in [0, 1)")


def _check(communication_interval: int, compression: Compression, error_feedback: bool) -> None:
    if operator.index(communication_interval) < 1:
        raise ValueError(f"communication_interval={communication_interval} is below 1")
    raw_codec(compression)
    if error_feedback and compression is None:
        raise ValueError("error_feedback without compression has nothing to feed back")


GlobalAlgorithmRegistry.register("local_sgd", LocalSGDAlgorithm, "weights averaged every k-th step (local SGD)")
GlobalAlgorithmRegistry.register("diloco", DiLoCoAlgorithm, "local steps with an outer momentum (DiLoCo)")
