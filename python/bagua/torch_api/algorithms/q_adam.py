"""QAdam: averages gradients during a warm-up, and compressed first moments of Adam afterwards.

Source: 1-bit Adam (Tang et al., ICML 2021, arXiv:2102.02888). After the warm-up the second moment is frozen, so the
update is linear in the first moment, which can then be compressed. The codec is a parameter, as in the original Bagua's
QAdam (Gan et al., VLDB 2021, arXiv:2107.01499).

Steps 1 to W (``warmup_steps``) are Adam's on averaged gradients. With m and v as they are after step W, step t > W is::

    m = mean over ranks of (beta1 * m + (1 - beta1) * (g + weight_decay * p))      through the codec
    p = p - lr / (1 - beta1^t) * m / (sqrt(v / (1 - beta2^W)) + eps)

During backward, each rank computes what its first moment would become (the *candidate*), and the ranks average the
candidates. ``step()`` replaces m by the mean. Backwards that accumulate therefore all start from the same m, and a
backward without a step changes no state.

A limit of the method: if the gradient of an element is 0 in all warm-up steps, its v is 0, and m is divided by eps
alone. Such elements move far as soon as m is not 0, which a lossy codec can also cause. Choose a warm-up that is long
enough for every element to get a gradient.
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
from ..model_engine.algorithm_interface import Exchange, always
from ..model_engine.gradients import GradientExchange, Slot
from ..model_engine.sparse import exchange_gradients
from ..process_group import ProcessGroup
from ..tensor import BaguaTensor
from ._policy import ExchangePolicy
from .base import Algorithm, AlgorithmImpl, GlobalAlgorithmRegistry, WrappedModel, check_codec


class QAdamOptimizer(torch.optim.Optimizer):
    """Adam that freezes its second moment after ``warmup_steps`` steps. Also works alone, without ``with_bagua``.

    - ``params``: Real, dense parameters, or groups of them with their own ``lr``, ``betas``, ``eps`` and
      ``weight_decay``.
    - ``lr``: Learning rate.
    - ``warmup_steps``: Number of steps of the warm-up, in which it equals ``torch.optim.Adam(foreach=False)`` bit for
      bit.
    - ``betas``: Decay rates of both moments.
    - ``eps``: Added to the denominator.
    - ``weight_decay``: As in Adam, ``weight_decay * p`` is added to the gradient, also after the warm-up.
    - ``legacy``: Uses the original Bagua's arithmetic, for comparison. The gradient of step ``warmup_steps`` changes
      neither moment, ``weight_decay`` acts in the warm-up only, the bias correction of the second moment keeps
      changing, and after the warm-up the first moment uses ``beta1`` of the first group.

    A parameter without a gradient does not change.

    With the algorithm ``qadam``, after the warm-up ``param.grad`` is this rank's own gradient. Changing it between
    backward and ``step()``, for example by clipping, has no effect, except that a parameter whose gradient was removed
    (``zero_grad()``) is not stepped. ``step()`` raises BaguaError if there was no backward since the last step, or if a
    ``torch.amp.GradScaler`` is used, whose scale would be part of the exchanged moments.

    Raises ValueError for a number outside its range, and TypeError for complex parameters. ``step()`` raises BaguaError
    if the first gradient of a parameter comes after the warm-up, because it then has no second moment.
    """

    #: The reason that ``fuse_optimizer`` gives for refusing this optimizer.
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
        #: Number of steps of the warm-up.
        self.warmup_steps = warmup_steps
        self.legacy = legacy
        # Parameters whose moments an algorithm exchanges -> mean of the ranks' candidates, until a step uses it.
        self._averaged: dict[torch.Tensor, torch.Tensor | None] = {}
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group, as in :class:`torch.optim.Optimizer`. Raises ValueError for a number outside its range."""
        # Stored in the group, because a state_dict and its broadcast include the groups.
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
        """Number of calls of :meth:`step`. Part of the state."""
        return int(self.param_groups[0]["step"])

    @property
    def warmed_up(self) -> bool:
        """True if the warm-up is over."""
        return self.steps >= self.warmup_steps

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "warmup_steps": self.warmup_steps, "legacy": self.legacy}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        # Drops the averaged moments: they belong to the state that is replaced. load_state_dict also calls this method.
        self._averaged = dict.fromkeys(self.__dict__.get("_averaged", ()))

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Read by GradScaler. If True, GradScaler sets two attributes, by which :meth:`step` recognises it."""
        return self.warmed_up and bool(self._averaged)

    def _refuse_scaled(self) -> None:
        if "found_inf" in self.__dict__:
            for name in ("found_inf", "grad_scale"):
                self.__dict__.pop(name, None)
            raise BaguaError(
                "GradScaler cannot be used with qadam after its warm-up: backward exchanged moments of scaled "
                "gradients, which cannot be divided by the scale; train in bfloat16, or use GradScaler(enabled=False) "
                f"after {self.warmup_steps} steps"
            )

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Runs one step. Returns the result of ``closure``, which computes the gradients again."""
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
        self._averaged = dict.fromkeys(self._averaged)
        return loss

    def _check(self, param: torch.Tensor, warming: bool) -> None:
        if param.grad is not None and param.grad.layout != torch.strided:
            raise RuntimeError(f"QAdamOptimizer needs dense gradients, not {param.grad.layout}")
        if param in self._averaged and (warming or self._averaged[param] is None):
            raise BaguaError(
                "optimizer.step() with gradients that the other ranks have not seen: after its warm-up qadam needs a "
                "backward outside no_sync before each step, and after load_state_dict"
            )
        if not (warming or self.legacy or self.state.get(param, {}).get("exp_avg_sq_step")):
            raise BaguaError(
                f"a parameter of shape {list(param.shape)} got its first gradient after the {self.warmup_steps} "
                "warm-up steps of qadam and has no second moment: use a new QAdamOptimizer, or more warmup_steps"
            )

    def _state_of(self, param: torch.Tensor) -> dict[str, Any]:
        state: dict[str, Any] = self.state[param]
        if not state:
            # The first three as in torch's Adam. "exp_avg_sq_step" counts updates of the second moment.
            state["step"] = torch.tensor(0.0)
            state["exp_avg"] = torch.zeros_like(param, memory_format=torch.preserve_format)
            state["exp_avg_sq"] = torch.zeros_like(param, memory_format=torch.preserve_format)
            state["exp_avg_sq_step"] = 0
        return state

    def _update(self, group: Mapping[str, Any], param: torch.Tensor, warming: bool) -> None:
        # The same operations as in torch's single-tensor Adam, in the same order, for bitwise equality.
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
        """Writes to ``out`` what the first moment becomes with a gradient. ``out`` may be the moment itself."""
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
    """Averages the first moments of one model's parameters: this rank's candidates during backward, then the mean.

    Gradients stay this rank's own. If only other ranks have a gradient of a parameter, this rank gets zeros, so that
    all ranks step the parameter.
    """

    def __init__(self, bagua_ddp: WrappedModel, optimizer: QAdamOptimizer, first_round: int) -> None:
        super().__init__(bagua_ddp)
        self._optimizer = optimizer
        self._first_round = first_round
        # Parameter name -> candidate for its first moment. Never visible to the user.
        self._candidates: dict[str, torch.Tensor] = {}
        numbers = {id(p): number for number, group in enumerate(optimizer.param_groups) for p in group["params"]}
        # Parameter name -> index of its group. Not the group itself, because load_state_dict replaces groups.
        self._group_of = {name: numbers[id(param)] for name, param in self._parameters}

    def register(self) -> list[torch.Tensor]:
        """Registers the parameters in reverse order. The communicated tensor of each is its candidate."""
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
        """Starts counting rounds at ``first_round``. A bucket moves the memory of the tensors in it, but the tensor
        objects stay the same.
        """
        for slot in self._slots.values():
            slot.number = self._backend.number(slot.name)
        for bucket in buckets:
            bucket.backend_bucket.set_step(self._first_round)

    def _forget(self) -> None:
        for slot in self._slots.values():
            self._optimizer._averaged[slot.param] = None

    def end(self) -> None:
        """Makes the optimizer use the gradients that it finds."""
        for slot in self._slots.values():
            self._optimizer._averaged.pop(slot.param, None)

    def accumulated(self, name: str) -> None:
        """Discards the mean, which lacks a gradient that was accumulated since."""
        super().accumulated(name)
        self._optimizer._averaged[self._slots[name].param] = None

    def _prepare(self, slot: Slot, grad: torch.Tensor) -> torch.Tensor | None:
        self._set_candidate(slot, grad)
        self._votes.scale([self._candidates[slot.name]])
        return None

    def _set_candidate(self, slot: Slot, grad: torch.Tensor) -> None:
        self._optimizer._averaged[slot.param] = None
        group, candidate = self._optimizer.param_groups[self._group_of[slot.name]], self._candidates[slot.name]
        with torch.no_grad():
            self._optimizer._candidate(group, slot.param, grad.detach().to(candidate.dtype), candidate)

    def _settle(self) -> None:
        """Does nothing, because gradients stay this rank's own."""

    def _results(self, nowhere: set[str]) -> list[torch.Tensor]:
        return [candidate for name, candidate in self._candidates.items() if name not in nowhere]

    def finish(self) -> None:
        """Waits until all candidates are averaged. Raises communication errors out of ``backward()``."""
        try:
            super().finish()
        except BaseException:
            self._forget()
            raise

    def abandon(self) -> None:
        """Forgets a backward that never completed."""
        super().abandon()
        self._forget()

    def _wait_and_agree(self, unused: Sequence[Slot]) -> set[str]:
        # A gradient that an earlier backward left unused is part of this rank's candidate again. Ranks without a
        # gradient contribute zeros. If no rank has one, m does not change.
        without = {slot.name for slot in unused if slot.param.grad is None}
        for slot in unused:
            if slot.param.grad is None:
                slot.param.grad = torch.zeros_like(slot.param, requires_grad=False)
            self._send(slot)
        nowhere = self._wait_and_compare(without)
        for name in nowhere:
            self._slots[name].param.grad = None
        return nowhere

    def _completed(self, nowhere: set[str], divisor: float) -> None:
        if divisor == 0:
            # All ranks have skipped this step. The gradient is 0, but the moment is not.
            for slot in self._slots.values():
                self._set_candidate(slot, torch.zeros_like(slot.param, requires_grad=False))
        for slot in self._slots.values():
            self._optimizer._averaged[slot.param] = None if slot.name in nowhere else self._candidates[slot.name]


def _unchangeable(param: torch.Tensor, tensor: torch.Tensor) -> None:
    raise ValueError("the exchanged moment of a parameter cannot be replaced")


class QAdamAlgorithmImpl(AlgorithmImpl):
    """Averages gradients in the warm-up, and first moments through a codec afterwards."""

    hierarchical: bool
    compression: Compression

    q_adam_optimizer: QAdamOptimizer
    algorithm: QAdamAlgorithm

    def __init__(self, process_group: ProcessGroup, *options: Any, **named: Any) -> None:
        super().__init__(process_group, *options, **named)
        self.optimizer = self.q_adam_optimizer
        # Number of the next exchange of moments when buckets are made, for codecs that draw random numbers.
        self._round = 0
        self._moments: MomentExchange | None = None

    def _policy(self) -> ExchangePolicy:
        return ExchangePolicy(
            make_exchange=self._make_exchange,
            compared_step=self._compared_step,
            check_model=self._check_model,
            close=self._end_moments,
            pads_buckets=True,
            votes_divide=True,
        )

    def _check_model(self, bagua_ddp: WrappedModel) -> None:
        """Raises ValueError unless the optimizer has all parameters and was given to ``with_bagua``, and TypeError for
        dtypes that the codec cannot encode.
        """
        known = {id(param) for group in self.optimizer.param_groups for param in group["params"]}
        parameters = bagua_ddp.bagua_build_params()
        missing = [name for name, param in parameters if id(param) not in known]
        if missing:
            raise ValueError(f"q_adam_optimizer does not have the parameters {missing} of the model")
        if not any(optimizer is self.optimizer for optimizer in bagua_ddp.bagua_optimizers):
            raise ValueError("with_bagua needs the algorithm's q_adam_optimizer among its optimizers")
        # Checked now, because the codec is first used after the warm-up.
        check_codec(self.compression, bagua_ddp)
        self.algorithm.check_free(bagua_ddp.module)

    def need_reset(self) -> bool:
        """Returns True when the warm-up has just ended, or when a loaded state begins it again."""
        return self.optimizer.warmed_up == (self._moments is None)

    def _compared_step(self) -> int:
        """Returns the optimizer's step, which decides whether the warm-up is over."""
        return self.optimizer.steps + 1

    def _make_exchange(self, bagua_ddp: WrappedModel) -> Exchange:
        """Exchanges gradients in the warm-up, and moments afterwards."""
        self.algorithm.serve(bagua_ddp.module)
        self._end_moments()
        if not self.optimizer.warmed_up:
            return exchange_gradients(bagua_ddp)
        self._moments = MomentExchange(bagua_ddp, self.optimizer, self._round)
        return self._moments

    def _end_moments(self) -> None:
        """Disconnects the optimizer, which then steps without communication."""
        if self._moments is not None:
            self._moments.end()
            self._moments = None

    def init_operations(self, bagua_ddp: WrappedModel, bucket: BaguaBucket) -> None:
        """Appends an all_reduce, after the warm-up through the codec."""
        bucket.clear_ops()
        if self._moments is None:
            bucket.append_centralized_synchronous_op(average=not self._only_adds, group=self.process_group)
            return
        bucket.append_centralized_synchronous_op(
            hierarchical=self.hierarchical,
            average=not self._only_adds,
            scattergather=True,
            compression=self.compression,
            group=self.process_group,
        )

    def state_dict(self) -> dict[str, Any]:
        """Like :meth:`AlgorithmImpl.state_dict`. "round" counts exchanges of moments. The optimizer has m and v."""
        state = super().state_dict()
        if self._moments is None:
            state["round"] = self._round
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Like :meth:`AlgorithmImpl.load_state_dict`."""
        super().load_state_dict(state)
        self._round = int(state["round"])


@dataclass(eq=False, repr=False)
class QAdamAlgorithm(Algorithm):
    """Trains one model with a :class:`QAdamOptimizer`, which must also be among the optimizers given to ``with_bagua``.

    - ``q_adam_optimizer``: The model's optimizer.
    - ``hierarchical``: After the warm-up, adds in full precision inside each host, and uses the codec only between
      hosts. On a single host nothing is compressed then.
    - ``compression``: A codec's name, a :class:`bagua.Codec`, or None.

    Raises TypeError for another optimizer, and ValueError for an unknown codec. An object serves one model;
    ``with_bagua`` raises ValueError for a second one.
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
        """Returns the QAdamOptimizer among the optimizers. Raises ValueError unless there is exactly one."""
        found = [optimizer for optimizer in optimizers if isinstance(optimizer, QAdamOptimizer)]
        if len(found) != 1:
            given = [type(optimizer).__name__ for optimizer in optimizers]
            raise ValueError(f"qadam needs one QAdamOptimizer among the optimizers; they are {given}")
        return {"q_adam_optimizer": found[0]}

    def check_free(self, module: torch.nn.Module) -> None:
        """Raises ValueError if this object serves another model."""
        served = None if self._model is None else self._model()
        if served is not None and served is not module:
            raise ValueError(
                f"this QAdamAlgorithm serves a {type(served).__name__} already: make one QAdamAlgorithm and one "
                "QAdamOptimizer for each model"
            )

    def serve(self, module: torch.nn.Module) -> None:
        """Reserves this object for a model. Called when the ranks have agreed."""
        self._model = weakref.ref(module)

    def describe(self) -> str:
        """Returns name and options, including options of the optimizer that must be equal on all ranks."""
        optimizer = self.q_adam_optimizer
        return f"{super().describe()}, warmup_steps={optimizer.warmup_steps}, legacy={optimizer.legacy}"


GlobalAlgorithmRegistry.register("qadam", QAdamAlgorithm, "Adam with compressed first moments after a warm-up")
