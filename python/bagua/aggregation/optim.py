"""Optimizers that aggregate by themselves: each step communicates and updates.

Names, constructors and hooks are those of mlbench. A ``closure`` is evaluated before gradients are aggregated. A
``tracker`` gets a call of ``record_batch_agg()`` after aggregation and of ``record_batch_opt_step()`` after the update.
``group`` is as in :class:`bagua.aggregation.AllReduceAggregation`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
from torch.nn.utils import clip_grad_norm_

from .aggregation import Denominator
from .backends import Group, find
from .centralized import AVG_CUSTOM, AVG_WORLD, AllReduceAggregation
from .decentralized import DecentralizedAggregation
from .fp16 import DynamicLossScaler, FP16Optimizer
from .powersgd import PowerAggregation
from .sparsified import Method, SparsifiedAggregation

__all__ = [
    "CentralizedAdam",
    "CentralizedSGD",
    "CustomCentralizedOptimizer",
    "DecentralizedSGD",
    "DynamicLossScaler",
    "FP16Optimizer",
    "GenericCentralizedOptimizer",
    "PowerSGD",
    "SignSGD",
    "SparsifiedSGD",
]

LossClosure = Callable[[], Any] | None
_T = TypeVar("_T")


def _evaluate(closure: LossClosure) -> Any:
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def _required(name: str, value: _T | None) -> _T:
    if value is None:
        raise ValueError(f'"{name}" not set for optimizer')
    return value


class GenericCentralizedOptimizer:
    """Base of optimizers that all-reduce around a torch optimizer, which is in ``optimizer``.

    With ``agg_grad``, gradients are aggregated before each step. Without it, weights are aggregated at the start and
    after each step. Attributes that this class does not have are those of ``optimizer``.
    """

    def __init__(
        self,
        world_size: int | None,
        model: torch.nn.Module | None,
        use_cuda: bool = False,
        by_layer: bool = False,
        divide_before: bool = False,
        agg_grad: bool = True,
        *,
        group: Group = None,
    ) -> None:
        self.agg_mode = AVG_WORLD
        self.world_size = _required("world_size", world_size or None)
        self.model = _required("model", model)
        self.agg_grad = agg_grad
        self.optimizer: torch.optim.Optimizer | None = None
        aggregation = AllReduceAggregation(self.world_size, divide_before, use_cuda, group=group)
        if agg_grad:
            self.agg = aggregation.agg_grad(by_layer)
        else:
            self.agg = aggregation.agg_model(by_layer)
            self.agg(self.model, AVG_WORLD)

    def step(self, closure: LossClosure = None, tracker: Any = None) -> Any:
        """Aggregates gradients and updates, or updates and aggregates weights. Returns the result of the closure."""
        return self._step(closure, tracker, None)

    def _step(self, closure: LossClosure, tracker: Any, denom: Denominator) -> Any:
        loss = _evaluate(closure)
        if self.agg_grad:
            self._aggregate(tracker, denom)
        self._before_update()
        self._optimizer().step()
        if tracker:
            tracker.record_batch_opt_step()
        if not self.agg_grad:
            self._aggregate(tracker, denom)
        return loss

    def _before_update(self) -> None:
        """Processes the aggregated gradients just before the update."""

    def _aggregate(self, tracker: Any, denom: Denominator) -> None:
        self.agg(self.model, self.agg_mode, denom)
        if tracker:
            tracker.record_batch_agg()

    def _optimizer(self) -> torch.optim.Optimizer:
        if self.optimizer is None:
            raise ValueError("the optimizer has not been set")
        return self.optimizer

    def __getattr__(self, name: str) -> Any:
        # Python calls this for missing attributes. During __init__, `optimizer` itself may be missing.
        optimizer = self.__dict__.get("optimizer")
        if optimizer is None:
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}: its optimizer has not been set")
        return getattr(optimizer, name)


class CentralizedSGD(GenericCentralizedOptimizer):
    """torch.optim.SGD with averages over all ranks. Arguments from ``lr`` to ``nesterov`` are torch's."""

    def __init__(
        self,
        world_size: int | None = None,
        model: torch.nn.Module | None = None,
        lr: float | None = None,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        use_cuda: bool = False,
        by_layer: bool = False,
        agg_grad: bool = True,
        *,
        group: Group = None,
    ) -> None:
        lr = _required("lr", lr)
        super().__init__(world_size, model, use_cuda, by_layer, agg_grad=agg_grad, group=group)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr, momentum, dampening, weight_decay, nesterov)


class CentralizedAdam(GenericCentralizedOptimizer):
    """torch.optim.Adam with averages over all ranks. Arguments from ``lr`` to ``amsgrad`` are torch's."""

    def __init__(
        self,
        world_size: int | None = None,
        model: torch.nn.Module | None = None,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        use_cuda: bool = False,
        by_layer: bool = False,
        agg_grad: bool = True,
        *,
        group: Group = None,
    ) -> None:
        super().__init__(world_size, model, use_cuda, by_layer, agg_grad=agg_grad, group=group)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr, betas, eps, weight_decay, amsgrad)


class CustomCentralizedOptimizer(GenericCentralizedOptimizer):
    """Any optimizer with gradient clipping and averages over the world, or sums divided by the caller's denominator.

    ``grad_clip`` is the largest L2 norm of the aggregated gradients. Raises NotImplementedError unless
    ``average_world`` or ``average_custom`` is chosen.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        world_size: int,
        optimizer: torch.optim.Optimizer,
        use_cuda: bool = False,
        by_layer: bool = False,
        agg_grad: bool = True,
        grad_clip: float | None = math.inf,
        average_world: bool = False,
        average_custom: bool = False,
        divide_before: bool = False,
        *,
        group: Group = None,
    ) -> None:
        if not average_world and not average_custom:
            raise NotImplementedError("choose average_world or average_custom")
        super().__init__(world_size, model, use_cuda, by_layer, divide_before, agg_grad, group=group)
        self.agg_mode = AVG_WORLD if average_world else AVG_CUSTOM
        self.grad_clip = math.inf if grad_clip is None else grad_clip
        self.optimizer = optimizer

    def step(self, closure: LossClosure = None, tracker: Any = None, denom: Denominator = None) -> bool:
        """Runs one step. Returns True. ``denom`` is the denominator of ``average_custom``."""
        self._step(closure, tracker, denom)
        return True

    def _before_update(self) -> None:
        if math.isfinite(self.grad_clip):
            clip_grad_norm_(self.model.parameters(), self.grad_clip)


class PowerSGD(torch.optim.SGD):
    """torch.optim.SGD on gradients aggregated by :class:`bagua.aggregation.PowerAggregation`.

    ``world_size`` 1 takes the number of ranks from the group. With one rank, nothing is compressed. The aggregation's
    state is part of ``state_dict()``, which therefore differs between ranks.
    """

    def __init__(
        self,
        model: torch.nn.Module | None = None,
        lr: float | None = None,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        dampening: float = 0.0,
        nesterov: bool = False,
        average_world: bool = True,
        use_cuda: bool = False,
        by_layer: bool = False,
        reuse_query: bool = False,
        world_size: int = 1,
        rank: int = 1,
        *,
        group: Group = None,
    ) -> None:
        model, lr = _required("model", model), _required("lr", lr)
        if not average_world:
            raise NotImplementedError("only averages over the world are possible")
        super().__init__(model.parameters(), lr, momentum, dampening, weight_decay, nesterov)
        self.model = model
        self.agg_mode = "avg"
        self.aggregation = PowerAggregation(model, use_cuda, reuse_query, world_size, rank, group=group)
        self.agg = self.aggregation.agg_grad(by_layer)

    def step(self, closure: LossClosure = None, tracker: Any = None) -> Any:
        """Aggregates gradients and updates. Returns the result of the closure."""
        loss = _evaluate(closure)
        if self.aggregation.ranks > 1:
            self.agg(self.model, self.agg_mode)
        if tracker:
            tracker.record_batch_agg()
        super().step()
        if tracker:
            tracker.record_batch_opt_step()
        return loss

    def state_dict(self) -> dict[str, Any]:
        """Returns torch's state, with the aggregation's state as ``"aggregation"``."""
        return super().state_dict() | {"aggregation": self.aggregation.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores the state that :meth:`state_dict` returned on this rank."""
        rest = dict(state_dict)
        self.aggregation.load_state_dict(rest.pop("aggregation"))
        super().load_state_dict(rest)


class DecentralizedSGD(torch.optim.SGD):
    """torch.optim.SGD that averages weights with the neighbours after each step.

    Momentum is not averaged. See :class:`bagua.aggregation.DecentralizedAggregation`.
    """

    def __init__(
        self,
        rank: int | None = None,
        neighbors: Iterable[int] | None = None,
        model: torch.nn.Module | None = None,
        lr: float | None = None,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        average_world: bool = True,
        use_cuda: bool = False,
        by_layer: bool = False,
        *,
        group: Group = None,
    ) -> None:
        # Rank 0 and an empty list of neighbours are valid.
        rank, neighbors = _required("rank", rank), _required("neighbors", neighbors)
        model, lr = _required("model", model), _required("lr", lr)
        if not average_world:
            raise NotImplementedError("only averages over the neighbourhood are possible")
        super().__init__(model.parameters(), lr, momentum, dampening, weight_decay, nesterov)
        self.model = model
        self.agg_mode = AVG_WORLD
        self.agg = DecentralizedAggregation(rank, list(neighbors), use_cuda, group=group).agg_model(by_layer)

    def step(self, closure: LossClosure = None, tracker: Any = None) -> Any:
        """Updates, then averages weights. Returns the result of the closure."""
        loss = super().step(closure)
        if tracker:
            tracker.record_batch_opt_step()
        self.agg(self.model, self.agg_mode)
        if tracker:
            tracker.record_batch_agg()
        return loss


class SparsifiedSGD(torch.optim.Optimizer):
    """SGD with memory (Stich, Cordonnier and Jaggi, NeurIPS 2018).

    The learning rate times the gradient is sparsified and remembered, so a change of the learning rate does not rescale
    values that are still to be sent.

    Each rank sends ``sparse_grad_size`` elements of every parameter (an int is a count, a float a fraction): a
    contiguous block, random elements with ``random_sparse``, or those of ``method``. With ``average_world``, the sum
    over ranks is divided by their number. Weight decay is not sparsified: every rank applies lr * weight_decay * w. The
    caller must make the initial weights equal.

    :meth:`update_estimated_weights` keeps a weighted mean of all iterates, in which later iterates weigh more.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        weight_decay: float = 0.0,
        sparse_grad_size: int | float = 10,
        random_sparse: bool = False,
        average_world: bool = True,
        *,
        method: Method | None = None,
        use_cuda: bool = False,
        group: Group = None,
    ) -> None:
        if lr < 0.0 or weight_decay < 0.0:
            raise ValueError(f"lr={lr} and weight_decay={weight_decay} must not be negative")
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})
        self.agg_mode = AVG_WORLD if average_world else "sum"
        self._parameters = [parameter for group_ in self.param_groups for parameter in group_["params"]]
        self.aggregation = SparsifiedAggregation(
            torch.nn.ParameterList(self._parameters),
            use_cuda,
            k=sparse_grad_size,
            method=method or ("random_k" if random_sparse else "block"),
            group=group,
        )
        self._estimates = [parameter.detach().clone() for parameter in self._parameters]

    @torch.no_grad()
    def step(self, closure: LossClosure = None) -> Any:
        """Aggregates sparsified updates and applies them. Returns the result of the closure."""
        loss = _evaluate(closure)
        rates = [group["lr"] for group in self.param_groups for _ in group["params"]]
        decays = [group["lr"] * group["weight_decay"] for group in self.param_groups for _ in group["params"]]
        updates = [
            None if parameter.grad is None else rate * parameter.grad
            for parameter, rate in zip(self._parameters, rates, strict=True)
        ]
        results = self.aggregation._agg(updates, self.agg_mode)
        for parameter, result, decay in zip(self._parameters, results, decays, strict=True):
            if result is not None:
                parameter.mul_(1.0 - decay).sub_(result)
        return loss

    @torch.no_grad()
    def update_estimated_weights(self, iteration: int, sparse_vector_size: int) -> None:
        """Adds the current weights to the mean, with the weights (t + tau)^2 of the paper's theorem 2.4.

        ``iteration`` is t, from 0. tau is the parameter's size divided by ``sparse_vector_size``.
        """
        t = float(iteration)
        for estimate, parameter in zip(self._estimates, self._parameters, strict=True):
            tau = parameter.numel() / sparse_vector_size
            # (t + tau)^2 over the sum of (i + tau)^2 for i from 0 to t.
            share = 6 * (t + tau) ** 2 / ((1 + t) * (6 * tau**2 + t + 6 * tau * t + 2 * t**2))
            estimate.lerp_(parameter.detach(), share)

    def get_estimated_weights(self) -> list[torch.Tensor]:
        """Returns the weighted mean, one tensor per parameter."""
        return self._estimates

    def state_dict(self) -> dict[str, Any]:
        """Returns torch's state, with the aggregation's state as ``"aggregation"``, which differs between ranks."""
        return super().state_dict() | {"aggregation": self.aggregation.state_dict(), "estimates": self._estimates}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores the state that :meth:`state_dict` returned on this rank."""
        rest = dict(state_dict)
        self.aggregation.load_state_dict(rest.pop("aggregation"))
        self._estimates = [estimate.clone() for estimate in rest.pop("estimates")]
        super().load_state_dict(rest)


class SignSGD(torch.optim.SGD):
    """SGD that uses only the sign of the gradient, or of its momentum: each weight moves by lr.

    If ``world_size`` is above 1, the ranks vote and the majority's sign is used; a tie does not move the weight.
    Bernstein et al., "signSGD: Compressed Optimisation for Non-Convex Problems", ICML 2018. A vote is one byte.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        world_size: int = 1,
        group: Group = None,
    ) -> None:
        super().__init__(params, lr, momentum, dampening, weight_decay, nesterov)
        self.world_size = world_size
        self.group = group

    @torch.no_grad()
    def step(self, closure: LossClosure = None) -> Any:
        """Votes on the signs and updates. Returns the result of the closure."""
        loss = _evaluate(closure)
        parameters = [(parameter, group) for group in self.param_groups for parameter in group["params"]]
        signs = [
            torch.zeros_like(parameter) if parameter.grad is None else self._direction(parameter, group).sign()
            for parameter, group in parameters
        ]
        peers = find(self.group, self.world_size)
        if peers.size > 1 and signs:
            # The sum of all votes must fit in the dtype.
            kind = torch.int8 if peers.size <= 127 else torch.int32
            place = peers.place(signs[0].device, False)
            votes = torch.cat([sign.reshape(-1).to(place, kind) for sign in signs])
            peers.all_reduce(votes, "sum")
            pieces = torch.split(votes.sign(), [sign.numel() for sign in signs])
            signs = [piece.view(sign.shape).to(sign) for piece, sign in zip(pieces, signs, strict=True)]
        for (parameter, group), sign in zip(parameters, signs, strict=True):
            parameter.sub_(sign * group["lr"])
        return loss

    def _direction(self, parameter: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
        assert parameter.grad is not None
        direction = parameter.grad.add(parameter, alpha=group["weight_decay"])
        if not group["momentum"]:
            return direction
        state = self.state[parameter]
        buffer: torch.Tensor | None = state.get("momentum_buffer")
        if buffer is None:
            buffer = state["momentum_buffer"] = direction.clone()
        else:
            buffer.mul_(group["momentum"]).add_(direction, alpha=1 - group["dampening"])
        return direction.add(buffer, alpha=group["momentum"]) if group["nesterov"] else buffer
