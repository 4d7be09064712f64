"""QAdam: Adam whose ranks average gradients in warm-up steps, and compressed first moments from then on.

Source: 1-bit Adam (Tang et al., ICML 2021, arXiv:2102.02888): after the warm-up the second moment stays as it is, so
that the update is linear in the first, which may then be compressed. The codec is a parameter, as in the original
Bagua's QAdam (Gan et al., VLDB 2021, arXiv:2107.01499).

Steps 1 to W (``warmup_steps``) are Adam's on averaged gradients. With m and v as they are after step W, step t > W is::

    m = mean over ranks of (beta1 * m + (1 - beta1) * (g + weight_decay * p))      through the codec
    p = p - lr / (1 - beta1^t) * m / (sqrt(v / (1 - beta2^W)) + eps)

The mean is computed during backward, of what the moment would become (here the *candidate*), and ``step()`` takes it
over. So backwards that accumulate all start from the same m, and a backward without a step changes no state.

A limit of the method: where an element's gradient was 0 in all warm-up steps v is 0, and eps alone divides its m. Such
elements move far as soon as m is not 0, which a lossy codec can cause too; the warm-up must be long enough to see each.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

import torch

from bagua.codecs import Compression, raw_codec
from bagua.errors import BaguaError

from ..bucket import BaguaBucket
from ..model_engine.exchange_interface import Exchange, always
from ..model_engine.gradients import GradientExchange, Slot
from ..process_group import ProcessGroup
from ..tensor import BaguaTensor
from .base import Algorithm, AlgorithmImpl, GlobalAlgorithmRegistry, WrappedModel, check_codec


class QAdamOptimizer(torch.optim.Optimizer):
    """Adam that keeps its second moment from step ``warmup_steps`` on. It also works alone, without ``with_bagua``.

    ``params``: real, dense parameters, or groups of them with an ``lr``, ``betas``, ``eps`` and ``weight_decay`` of
    their own. Up to and including step ``warmup_steps`` it equals ``torch.optim.Adam(foreach=False)`` bit for bit;
    ``weight_decay`` is Adam's: ``weight_decay * p`` is added to the gradient, also after the warm-up. A parameter
    without a gradient stays as it is.

    After the warm-up ``param.grad`` of a model with the algorithm ``qadam`` is this rank's own gradient. What changes
    it between backward and ``step()``, such as clipping, then changes nothing, except that without a gradient
    (``zero_grad()``) the parameter stays. A step without a backward since the last one is a BaguaError, as is a
    ``torch.amp.GradScaler``, whose scale would be in the exchanged moments. Without the algorithm neither is so.

    A parameter whose first gradient comes after the warm-up has no second moment: BaguaError.

    ``legacy`` is the original Bagua's arithmetic, for comparison: the gradient of step ``warmup_steps`` changes neither
    moment, ``weight_decay`` acts in the warm-up only, the bias correction of the second moment goes on changing, and
    after the warm-up the first moment follows the first group's ``beta1``.

    ValueError for a number out of its range, TypeError for complex parameters.
    """

    #: Why ``fuse_optimizer`` refuses it.
    cannot_be_fused = "the moments that the ranks exchange belong to single parameters"

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        warmup_steps: int = 100,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        legacy: bool = False,
    ) -> None:
        if not isinstance(warmup_steps, int) or isinstance(warmup_steps, bool) or warmup_steps < 1:
            raise ValueError(f"warmup_steps must be a positive int, not {warmup_steps!r}")
        #: Number of the first steps, which are Adam's.
        self.warmup_steps = warmup_steps
        self.legacy = legacy
        # Parameters whose moments an algorithm exchanges: the mean of the ranks' candidates, until a step takes it.
        self._averaged: dict[torch.Tensor, torch.Tensor | None] = {}
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group, see :class:`torch.optim.Optimizer`. ValueError for a number out of its range."""
        # In the group, because a state_dict and a broadcast of it carry the groups.
        param_group["step"] = self.steps if self.param_groups else 0
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        for name in ("lr", "eps", "weight_decay"):
            if not float(group[name]) >= 0:
                raise ValueError(f"{name} must not be negative: {group[name]!r}")
        if len(group["betas"]) != 2 or not all(0 <= float(beta) < 1 for beta in group["betas"]):
            raise ValueError(f"betas must be two numbers from 0 up to, but not including, 1: {group['betas']!r}")
        if any(param.is_complex() for param in group["params"]):
            raise TypeError("QAdamOptimizer has no update for complex parameters")

    @property
    def steps(self) -> int:
        """How often :meth:`step` was called; part of the state."""
        return int(self.param_groups[0]["step"])

    @property
    def warmed_up(self) -> bool:
        """True if the warm-up is over."""
        return self.steps >= self.warmup_steps

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "warmup_steps": self.warmup_steps, "legacy": self.legacy}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        # Candidates of another state's moments are of no use; load_state_dict comes through here too.
        self._averaged = dict.fromkeys(self.__dict__.get("_averaged", ()))

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """GradScaler reads this; with True it sets two attributes, by which :meth:`step` recognises the call."""
        return self.warmed_up and bool(self._averaged)

    def _refuse_scaled(self) -> None:
        if "found_inf" in self.__dict__:
            for name in ("found_inf", "grad_scale"):
                self.__dict__.pop(name, None)
            raise BaguaError(
                "GradScaler with qadam after its warm-up: backward exchanged moments of scaled gradients, which "
                "cannot be divided by the scale; train in bfloat16, or make GradScaler(enabled=False) after "
                f"{self.warmup_steps} steps"
            )

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step. Returns what ``closure`` did, which computes the gradients anew."""
        self._refuse_scaled()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        warming = not self.warmed_up
        work = [(group, param) for group in self.param_groups for param in group["params"] if param.grad is not None]
        for _, param in work:
            self._check(param, warming)
        for group in self.param_groups:
            group["step"] += 1
        for group, param in work:
            (self._update_legacy if self.legacy else self._update)(group, param, warming)
        # Used up, or dropped by zero_grad().
        self._averaged = dict.fromkeys(self._averaged)
        return loss

    def _check(self, param: torch.Tensor, warming: bool) -> None:
        """Before anything is changed."""
        if param.grad is not None and param.grad.layout != torch.strided:
            raise RuntimeError(f"QAdamOptimizer needs dense gradients, not {param.grad.layout}")
        if param in self._averaged and (warming or self._averaged[param] is None):
            raise BaguaError(
                "optimizer.step() with gradients that the other ranks have not seen: after its warm-up qadam needs a "
                "backward outside no_sync before each step, and after load_state_dict"
            )
        if not (warming or self.legacy or self.state.get(param, {}).get("exp_avg_sq_step")):
            raise BaguaError(
                f"a parameter of shape {list(param.shape)} has its first gradient after the {self.warmup_steps} "
                "warm-up steps of qadam, and so no second moment: begin with a new QAdamOptimizer, or more warmup_steps"
            )

    def _state_of(self, param: torch.Tensor) -> dict[str, Any]:
        state: dict[str, Any] = self.state[param]
        if not state:
            # As torch's Adam has them; "exp_avg_sq_step" counts the updates of the second moment.
            state["step"] = torch.tensor(0.0)
            state["exp_avg"] = torch.zeros_like(param, memory_format=torch.preserve_format)
            state["exp_avg_sq"] = torch.zeros_like(param, memory_format=torch.preserve_format)
            state["exp_avg_sq_step"] = 0
        return state

    def _update(self, group: Mapping[str, Any], param: torch.Tensor, warming: bool) -> None:
        # The operations of torch's single-tensor Adam in its order, for equal bits.
        state, (beta1, beta2) = self._state_of(param), group["betas"]
        m, v = state["exp_avg"], state["exp_avg_sq"]
        state["step"] += 1
        count = float(state["step"])
        if warming:
            assert param.grad is not None
            grad = param.grad
            if group["weight_decay"] != 0:
                grad = grad.add(param, alpha=group["weight_decay"])
            m.lerp_(grad, 1 - beta1)
            v.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
            state["exp_avg_sq_step"] += 1
        else:
            self._take_moment(group, param, m)
        bias1, bias2 = 1 - beta1**count, 1 - beta2 ** float(state["exp_avg_sq_step"])
        denominator = (v.sqrt() / bias2**0.5).add_(group["eps"])
        param.addcdiv_(m, denominator, value=-(float(group["lr"]) / bias1))

    def _update_legacy(self, group: Mapping[str, Any], param: torch.Tensor, warming: bool) -> None:
        state, (beta1, beta2) = self._state_of(param), group["betas"]
        m, v = state["exp_avg"], state["exp_avg_sq"]
        state["step"] += 1
        count = float(group["step"])
        if count < self.warmup_steps:
            assert param.grad is not None
            grad = param.grad.add(param, alpha=group["weight_decay"])
            m.mul_(beta1).add_(grad, alpha=1 - beta1)
            v.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        elif not warming:
            self._take_moment(group, param, m)
        denominator = (v.sqrt() / (1 - beta2**count) ** 0.5).add_(group["eps"])
        param.addcdiv_(m, denominator, value=-float(group["lr"]) / (1 - beta1**count))

    def _take_moment(self, group: Mapping[str, Any], param: torch.Tensor, m: torch.Tensor) -> None:
        averaged = self._averaged.get(param)
        if averaged is None:
            assert param.grad is not None
            self._candidate(group, param, param.grad, m)
        else:
            m.copy_(averaged)

    def _candidate(self, group: Mapping[str, Any], param: torch.Tensor, grad: torch.Tensor, out: torch.Tensor) -> None:
        """Writes to ``out`` what the first moment becomes with a gradient; ``out`` may be the moment itself."""
        m = self.state.get(param, {}).get("exp_avg")
        if m is None:
            m = torch.zeros_like(param)
        if self.legacy:
            beta1 = self.param_groups[0]["betas"][0]
            torch.mul(m, beta1, out=out).add_(grad, alpha=1 - beta1)
            return
        if group["weight_decay"] != 0:
            grad = grad.add(param, alpha=group["weight_decay"])
        torch.lerp(m, grad, 1 - group["betas"][0], out=out)


class MomentExchange(GradientExchange):
    """The first moments of one model's parameters: candidates of this rank during backward, then the ranks' mean.

    Only reads the gradients, which stay this rank's own. A parameter that got its gradient on other ranks only has one
    of zeros here, so that the optimizers of all ranks step it.
    """

    def __init__(self, bagua_ddp: WrappedModel, optimizer: QAdamOptimizer, first_round: int) -> None:
        super().__init__(bagua_ddp)
        self._optimizer = optimizer
        self._first_round = first_round
        # What the first moment of each parameter becomes; never given to a user.
        self._candidates: dict[str, torch.Tensor] = {}
        numbers = {id(p): number for number, group in enumerate(optimizer.param_groups) for p in group["params"]}
        # Number of each parameter's group; load_state_dict replaces the groups themselves.
        self._group_of = {name: numbers[id(param)] for name, param in self._parameters}

    def register(self) -> list[torch.Tensor]:
        """The parameters as Bagua tensors whose effective tensor is the candidate, the last of the model first."""
        self._slots = {}
        tensors = []
        for name, param in reversed(self._parameters):
            candidate = self._candidates[name] = torch.zeros_like(param, requires_grad=False)
            getter = always(candidate)
            tensors.append(BaguaTensor.ensure_bagua_tensor(param, name, self._module_name, getter, _unchangeable))
            self._slots[name] = Slot(name, param, True, candidate.stride(), candidate.dtype)
        self._forget()
        return tensors

    def bind(self, buckets: Sequence[BaguaBucket]) -> None:
        """Counts rounds from ``first_round`` on. A bucket moves a candidate's memory; it stays the same tensor."""
        for slot in self._slots.values():
            slot.number = self._backend.number(slot.name)
        for bucket in buckets:
            bucket.backend_bucket.set_step(self._first_round)

    def _forget(self) -> None:
        for slot in self._slots.values():
            self._optimizer._averaged[slot.param] = None

    def end(self) -> None:
        """From now on the optimizer steps with the gradients that it finds."""
        for slot in self._slots.values():
            self._optimizer._averaged.pop(slot.param, None)

    def accumulated(self, name: str) -> None:
        """A gradient that the mean does not have."""
        super().accumulated(name)
        self._optimizer._averaged[self._slots[name].param] = None

    def _prepare(self, slot: Slot, grad: torch.Tensor) -> torch.Tensor | None:
        self._optimizer._averaged[slot.param] = None
        group, candidate = self._optimizer.param_groups[self._group_of[slot.name]], self._candidates[slot.name]
        with torch.no_grad():
            self._optimizer._candidate(group, slot.param, grad.detach().to(candidate.dtype), candidate)
        return None

    def _settle(self) -> None:
        """Nothing: the gradients stay this rank's own."""

    def finish(self) -> None:
        """Waits until every candidate is averaged; what went wrong is raised here, out of ``backward()``."""
        try:
            super().finish()
        except BaseException:
            self._forget()
            raise

    def abandon(self) -> None:
        """Forgets a backward that never came to its end."""
        super().abandon()
        self._forget()

    def _wait_and_agree(self, unused: Sequence[Slot]) -> set[str]:
        # A gradient of an earlier backward that no step has used is part of this rank's candidate again: the ranks
        # that have none take part with zeros. Where no rank has one, m stays as it is.
        without = {slot.name for slot in unused if slot.param.grad is None}
        for slot in unused:
            if slot.param.grad is None:
                slot.param.grad = torch.zeros_like(slot.param, requires_grad=False)
            self._send(slot)
        nowhere = self._wait_and_compare(without)
        for name in nowhere:
            self._slots[name].param.grad = None
        return nowhere

    def _completed(self, nowhere: set[str]) -> None:
        for slot in self._slots.values():
            self._optimizer._averaged[slot.param] = None if slot.name in nowhere else self._candidates[slot.name]


def _unchangeable(param: torch.Tensor, tensor: torch.Tensor) -> None:
    raise ValueError("the exchanged moment of a parameter cannot be replaced")


class QAdamAlgorithmImpl(AlgorithmImpl):
    """Averages gradients in the warm-up, and moments through a codec from then on."""

    hierarchical: bool
    compression: Compression
    _pads_buckets = True

    q_adam_optimizer: QAdamOptimizer
    algorithm: QAdamAlgorithm

    def __init__(self, process_group: ProcessGroup, *options: Any, **named: Any) -> None:
        super().__init__(process_group, *options, **named)
        self.optimizer = self.q_adam_optimizer
        # The number of the next exchange of moments when the buckets are made, for codecs that draw.
        self._round = 0
        self._moments: MomentExchange | None = None

    def check(self, bagua_ddp: WrappedModel) -> None:
        """ValueError unless the optimizer has all parameters and was given to ``with_bagua``; TypeError for elements
        that the codec does not encode, with the name of their parameter.
        """
        known = {id(param) for group in self.optimizer.param_groups for param in group["params"]}
        parameters = bagua_ddp.bagua_build_params()
        missing = [name for name, param in parameters if id(param) not in known]
        if missing:
            raise ValueError(f"q_adam_optimizer does not have the parameters {missing} of the model")
        if not any(optimizer is self.optimizer for optimizer in bagua_ddp.bagua_optimizers):
            raise ValueError("with_bagua needs the algorithm's q_adam_optimizer among its optimizers")
        # The first use comes after the warm-up, which is late for the error.
        check_codec(self.compression, bagua_ddp)
        self.algorithm.check_free(bagua_ddp.module)

    def need_reset(self) -> bool:
        """True when the exchange is not the one for the optimizer's number of steps."""
        return self.optimizer.warmed_up == (self._moments is None)

    def compared_step(self, bagua_ddp: WrappedModel) -> int:
        """The optimizer's, which decides about the warm-up."""
        return self.optimizer.steps + 1

    def make_exchange(self, bagua_ddp: WrappedModel) -> Exchange:
        """Gradients, or moments after the warm-up."""
        self.algorithm.serve(bagua_ddp.module)
        self.end()
        if not self.optimizer.warmed_up:
            return super().make_exchange(bagua_ddp)
        self._moments = MomentExchange(bagua_ddp, self.optimizer, self._round)
        return self._moments

    def end(self) -> None:
        """The optimizer trains alone from now on."""
        if self._moments is not None:
            self._moments.end()
            self._moments = None

    def init_operations(self, bagua_ddp: WrappedModel, bucket: BaguaBucket) -> None:
        """All-reduces the bucket, after the warm-up through the codec."""
        bucket.clear_ops()
        if self._moments is None:
            bucket.append_centralized_synchronous_op(hierarchical=False, average=True, group=self.process_group)
            return
        bucket.append_centralized_synchronous_op(
            hierarchical=self.hierarchical,
            average=True,
            scattergather=True,
            compression=self.compression,
            group=self.process_group,
        )

    def state_dict(self) -> dict[str, Any]:
        """See :meth:`AlgorithmImpl.state_dict`; "round" counts the exchanges of moments. m and v are in the
        optimizer's state.
        """
        state = super().state_dict()
        if self._moments is None:
            state["round"] = self._round
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See :meth:`AlgorithmImpl.load_state_dict`."""
        super().load_state_dict(state)
        self._round = int(state["round"])


@dataclass(eq=False, repr=False)
class QAdamAlgorithm(Algorithm):
    """Trains one model with a :class:`QAdamOptimizer`, which is also among the optimizers of ``with_bagua``.

    ``hierarchical``: after the warm-up full precision inside hosts, the codec between them; on one host nothing is
    compressed then. ``compression``: a codec's name, a :class:`bagua.Codec`, or None. An object serves one model:
    ValueError of ``with_bagua`` for another one. TypeError for another optimizer, ValueError for an unknown codec.
    """

    needs_optimizers = True
    _implementation = QAdamAlgorithmImpl

    q_adam_optimizer: QAdamOptimizer
    hierarchical: bool = True
    _: KW_ONLY
    compression: Compression = "MinMaxUInt8"

    def __post_init__(self) -> None:
        given: object = self.q_adam_optimizer
        if not isinstance(given, QAdamOptimizer):
            raise TypeError(f"qadam needs a QAdamOptimizer, not a {type(given).__name__}")
        raw_codec(self.compression)
        self._model: weakref.ref[torch.nn.Module] | None = None

    @classmethod
    def options_from(cls, optimizers: Sequence[torch.optim.Optimizer]) -> dict[str, Any]:
        """See :meth:`Algorithm.options_from`: the QAdamOptimizer, of which there must be one."""
        found = [optimizer for optimizer in optimizers if isinstance(optimizer, QAdamOptimizer)]
        if len(found) != 1:
            given = [type(optimizer).__name__ for optimizer in optimizers]
            raise ValueError(f"qadam needs one QAdamOptimizer among the optimizers; they are {given}")
        return {"q_adam_optimizer": found[0]}

    def check_free(self, module: torch.nn.Module) -> None:
        """ValueError when it serves another model."""
        served = None if self._model is None else self._model()
        if served is not None and served is not module:
            raise ValueError(
                f"this QAdamAlgorithm serves a {type(served).__name__} already: an object serves one model, as its "
                "optimizer does; make another one for each model"
            )

    def serve(self, module: torch.nn.Module) -> None:
        """From now on it serves this model; called when the ranks have agreed."""
        self._model = weakref.ref(module)

    def describe(self) -> str:
        """Name and options, with those of the optimizer that must be equal on all ranks."""
        optimizer = self.q_adam_optimizer
        return f"{super().describe()}, warmup_steps={optimizer.warmup_steps}, legacy={optimizer.legacy}"


GlobalAlgorithmRegistry.register("qadam", QAdamAlgorithm, "Adam with compressed first moments after a warm-up")
