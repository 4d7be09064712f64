"""The base of every aggregation: replaces the tensors of a model by what all ranks make of them.

The four variants (gradients or weights, one tensor per parameter or one for the model) are written here once; a
subclass combines a flat tensor in ``_agg``.

A parameter without a gradient counts as zero where another rank has one, and stays ``None`` where no rank has. Whether
a rank has one is sent behind the values, one element per parameter, because a collective of its own would cost a
latency.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .tensor_packing import flatten

Denominator = torch.Tensor | float | None
Closure = Callable[..., None]

# One parameter, and the value of it that is communicated; None for a gradient that this rank does not have.
Entry = tuple[torch.nn.Parameter, torch.Tensor | None]


def divisor(denom: Denominator) -> float:
    """A denominator as a number. ValueError unless it is one element, finite and not zero."""
    value = math.nan
    if isinstance(denom, torch.Tensor):
        if denom.numel() == 1:
            value = float(denom.item())
    elif denom is not None:
        value = float(denom)
    if not math.isfinite(value) or value == 0.0:
        raise ValueError(f"the denominator must be one finite element that is not zero, not {denom!r}")
    return value


class Aggregation(ABC):
    """Base of all aggregations. ``use_cuda`` communicates from CUDA memory where tensors and ranks allow it.

    A subclass supplies :meth:`_agg`, and where it can refuse an operation, :meth:`_check`.
    """

    def __init__(self, use_cuda: bool = False) -> None:
        self.use_cuda = use_cuda

    @abstractmethod
    def _agg(self, data: Any, op: str, denom: Denominator = None) -> Any:
        """What all ranks make of ``data``, a flat tensor: that tensor itself, changed, or a new one of its shape."""

    def _check(self, op: str, denom: Denominator) -> None:  # noqa: B027
        """Refuses what cannot be done. Called before anything is communicated."""

    def _place(self, device: torch.device) -> torch.device:
        """Where a tensor from ``device`` must lie to be communicated."""
        return device if self.use_cuda else torch.device("cpu")

    def _agg_marked(self, data: torch.Tensor, marks: int, op: str, denom: Denominator) -> torch.Tensor:
        """As :meth:`_agg` for a tensor whose last ``marks`` elements are marks: what is zero everywhere must stay
        zero, what is not zero somewhere must become something else than zero.
        """
        result: torch.Tensor = self._agg(data, op, denom)
        return result

    def agg_grad(self, by_layer: bool = False) -> Closure:
        """A function ``(model, op, denom=None)`` that aggregates gradients in place, and returns ``None``.

        ``by_layer`` communicates each parameter on its own, instead of all that share a dtype at once.
        """
        return self._agg_gradients_by_layer if by_layer else self._agg_gradients_by_model

    def agg_model(self, by_layer: bool = False) -> Closure:
        """A function ``(model, op, denom=None)`` that aggregates weights in place, and returns ``None``. Buffers stay
        as they are.
        """
        return self._agg_weights_by_layer if by_layer else self._agg_weights_by_model

    def _agg_gradients_by_layer(self, model: torch.nn.Module, op: str, denom: Denominator = None) -> None:
        """Each gradient in a communication of its own."""
        self._aggregate([[entry] for entry in _gradients(model)], op, denom, marked=True)

    def _agg_gradients_by_model(self, model: torch.nn.Module, op: str, denom: Denominator = None) -> None:
        """All gradients of one dtype in one communication."""
        self._aggregate(_by_dtype(_gradients(model)), op, denom, marked=True)

    def _agg_weights_by_layer(self, model: torch.nn.Module, op: str, denom: Denominator = None) -> None:
        """Each parameter in a communication of its own."""
        self._aggregate([[entry] for entry in _weights(model)], op, denom, marked=False)

    def _agg_weights_by_model(self, model: torch.nn.Module, op: str, denom: Denominator = None) -> None:
        """All parameters of one dtype in one communication."""
        self._aggregate(_by_dtype(_weights(model)), op, denom, marked=False)

    @torch.no_grad()
    def _aggregate(self, parts: Sequence[Sequence[Entry]], op: str, denom: Denominator, marked: bool) -> None:
        self._check(op, denom)
        for part in parts:
            self._aggregate_part(part, op, denom, marked)

    def _aggregate_part(self, part: Sequence[Entry], op: str, denom: Denominator, marked: bool) -> None:
        device = self._place(part[0][0].device)
        values = [torch.zeros_like(parameter) if value is None else value for parameter, value in part]
        if marked:
            # For min, the smallest number must mean "present".
            present = -1.0 if op == "min" else 1.0
            marks = [0.0 if value is None else present for _, value in part]
            values.append(torch.tensor(marks, dtype=values[0].dtype))
        count = len(part) if marked else 0
        result = self._agg_marked(flatten(values, device), count, op, denom)
        # One transfer instead of one per parameter, where the marks lie in CUDA memory.
        present_anywhere = (result[result.numel() - count :] != 0).tolist() if marked else [True] * len(part)
        offset = 0
        for (parameter, _), has_value in zip(part, present_anywhere, strict=True):
            piece = result[offset : offset + parameter.numel()].view(parameter.shape)
            offset += parameter.numel()
            if not marked:
                # Through detach and not .data: autograd learns that what it may have saved has changed.
                parameter.detach().copy_(piece)
            elif has_value:
                put_gradient(parameter, piece)


def put_gradient(parameter: torch.nn.Parameter, value: torch.Tensor) -> None:
    """Writes a gradient in place, or makes one where there is none."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    parameter.grad.detach().copy_(value.reshape(parameter.shape))


def gradient_of(parameter: torch.nn.Parameter, index: int) -> torch.Tensor | None:
    """A parameter's dense gradient, or None. NotImplementedError for a sparse one."""
    gradient = parameter.grad
    if gradient is not None and gradient.layout != torch.strided:
        raise NotImplementedError(
            f"parameter {index} has a {gradient.layout} gradient: only dense gradients can be aggregated"
        )
    return None if gradient is None else gradient.detach()


def _gradients(model: torch.nn.Module) -> list[Entry]:
    return [(parameter, gradient_of(parameter, index)) for index, parameter in enumerate(model.parameters())]


def _weights(model: torch.nn.Module) -> list[Entry]:
    return [(parameter, parameter.detach()) for parameter in model.parameters()]


def _by_dtype(entries: Sequence[Entry]) -> list[list[Entry]]:
    """Groups of one dtype, in the order in which the dtypes first appear, which is the same on all ranks."""
    found: dict[torch.dtype, list[Entry]] = {}
    for parameter, value in entries:
        found.setdefault(parameter.dtype if value is None else value.dtype, []).append((parameter, value))
    return list(found.values())
