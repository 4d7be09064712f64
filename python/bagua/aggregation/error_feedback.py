"""The base of compressing aggregations: gradients of a model, with an error memory for each parameter.

The part of a gradient that a step does not send stays in the memory and is added to the next gradient ("error
feedback"): Stich, Cordonnier and Jaggi, "Sparsified SGD with Memory", NeurIPS 2018; Karimireddy et al., "Error Feedback
Fixes SignSGD and other Gradient Compression Schemes", ICML 2019.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, NoReturn

import torch

from bagua.errors import BaguaError
from bagua.linalg import wide
from bagua.torch_api.per_rank_state import require_own

from .aggregation import Aggregation, Closure, Denominator, gradient_of, put_gradient
from .backends import Group, Peers, find

Gradients = Sequence[torch.Tensor | None]


class CompressingAggregation(Aggregation):
    """Base of aggregations that compress the gradients of one model. They raise NotImplementedError for weights.

    ``memories`` has one tensor per parameter, in the parameter's shape: the values that have not been sent yet.
    """

    def __init__(self, model: torch.nn.Module, use_cuda: bool = False, *, group: Group = None) -> None:
        super().__init__(use_cuda)
        self.group = group
        self.parameters = list(model.parameters())
        for index, parameter in enumerate(self.parameters):
            if not parameter.is_floating_point():
                raise TypeError(f"parameter {index} has dtype {parameter.dtype}: only real gradients can be compressed")
        self.memories = [
            torch.zeros(parameter.shape, dtype=wide(parameter.dtype), device=parameter.device)
            for parameter in self.parameters
        ]

    def _peers(self) -> Peers:
        return find(self.group)

    def _rank(self) -> dict[str, Any]:
        """Returns the rank and world size that the memories belong to; an empty dict while there is no group."""
        try:
            peers = self._peers()
        except BaguaError:
            return {}
        return {"rank": peers.rank, "world_size": peers.size}

    @abstractmethod
    def _combine(self, chosen: Sequence[int], gradients: Gradients, op: str, denom: Denominator) -> None:
        """Aggregates the gradients of some parameters (by index), and replaces them in the list ``gradients``."""

    def _begin_step(self, gradients: Gradients) -> None:
        """Prepares for a step. Called once, before all parameters are aggregated."""

    def agg_model(self, by_layer: bool = False) -> Closure:
        """Raises NotImplementedError, because weights that are sent only in part would be lost in part."""
        self._refuse()

    def _agg_weights_by_layer(self, model: torch.nn.Module, op: str, denom: Denominator = None) -> None:
        self._refuse()

    def _agg_weights_by_model(self, model: torch.nn.Module, op: str, denom: Denominator = None) -> None:
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise NotImplementedError(f"{type(self).__name__} aggregates gradients, not weights: use agg_grad()")

    def _agg(self, data: Any, op: str, denom: Denominator = None) -> Any:
        """Returns the aggregated gradients of a list with a tensor or ``None`` for each parameter."""
        return self._step(data, op, denom, by_layer=False)

    def _agg_gradients_by_model(self, model: torch.nn.Module, op: str, denom: Denominator = None) -> None:
        self._aggregate_model(model, op, denom, by_layer=False)

    def _agg_gradients_by_layer(self, model: torch.nn.Module, op: str, denom: Denominator = None) -> None:
        self._aggregate_model(model, op, denom, by_layer=True)

    def _aggregate_model(self, model: torch.nn.Module, op: str, denom: Denominator, by_layer: bool) -> None:
        parameters = list(model.parameters())
        found, expected = [p.shape for p in parameters], [p.shape for p in self.parameters]
        if found != expected:
            raise ValueError(f"the model's parameters have shapes {found}, the aggregation was made for {expected}")
        gradients = [gradient_of(parameter, index) for index, parameter in enumerate(parameters)]
        results = self._step(gradients, op, denom, by_layer)
        with torch.no_grad():
            for parameter, result in zip(parameters, results, strict=True):
                if result is not None:
                    put_gradient(parameter, result)

    @torch.no_grad()
    def _step(self, gradients: Gradients, op: str, denom: Denominator, by_layer: bool) -> list[torch.Tensor | None]:
        self._check(op, denom)
        if len(gradients) != len(self.parameters):
            raise ValueError(f"{len(gradients)} gradients for {len(self.parameters)} parameters")
        results = list(gradients)
        self._begin_step(results)
        everything = range(len(results))
        for chosen in [[index] for index in everything] if by_layer else [list(everything)]:
            if chosen:
                self._combine(chosen, results, op, denom)
        return results

    def _with_memory(self, index: int, gradient: torch.Tensor | None) -> torch.Tensor:
        memory = self.memories[index]
        return memory.clone() if gradient is None else gradient.to(memory.dtype) + memory

    def state_dict(self) -> dict[str, Any]:
        """Returns the state for resuming bit for bit. It differs between ranks: save it on each rank."""
        return {"memories": [memory.clone() for memory in self.memories], **self._rank()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores the state that :meth:`state_dict` returned on this rank.

        Raises ValueError if it is the state of another model, another rank, or another number of ranks.
        """
        require_own(state, self._rank(), ["memories"], "leave it out: a new aggregation has nothing that was not sent")
        memories = state["memories"]
        found, expected = [tuple(m.shape) for m in memories], [tuple(m.shape) for m in self.memories]
        if found != expected:
            raise ValueError(f"the state has memories of shapes {found}, this aggregation has {expected}")
        for memory, saved in zip(self.memories, memories, strict=True):
            memory.copy_(saved)
