"""The base of every aggregation: replaces a model's tensors by a combination of all ranks' tensors.

The four variants (gradients or weights; one message per parameter or one per dtype) are written here once. A subclass
combines a flat tensor in ``_agg``.

A parameter without a gradient counts as zero if another rank has one, and stays ``None`` if no rank has. One further
element per parameter, behind the values, says whether this rank has a gradient. Sending it separately would cost
another round trip.
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

# A parameter, and its gradient or weight to communicate; None for a gradient that this rank does not have.
Entry = tuple[torch.nn.Parameter, torch.Tensor | None]


def divisor(denom: Denominator) -> float:
    """Returns a denominator as a number. Raises ValueError unless it is a single finite element other than zero."""
    value = math.nan
    if isinstance(denom, torch.Tensor):
        if denom.numel() == 1:
            value = float(denom.item())
    elif denom is not None:
        value = float(denom)
    if not math.isfinite(value) or value == 0.0:
        raise ValueError(f"the denominator must be a single finite number other than zero; got {denom!r}")
    return value


class Aggregation(ABC):
    """Base of all aggregations. With ``use_cuda``, tensors are sent from CUDA memory if the tensors and the group
    support it.

    A subclass supplies :meth:`_agg`, and :meth:`_check` if it can refuse an operation.
    """

    def __init__(self, use_cuda: bool = False) -> None:
        self.use_cuda = use_cuda

    @abstractmethod
    def _agg(self, data: Any, op: str, denom: Denominator = None) -> Any:
        """Returns the combination of all ranks' ``data``, a flat tensor: that tensor, changed, or a new one."""

    def _check(self, op: str, denom: Denominator) -> None:  # noqa: B027
        """Raises an error for arguments that cannot be used, before anything is communicated."""

    def _place(self, device: torch.device) -> torch.device:
        """Returns the device on which a tensor that is on ``device`` is communicated."""
        return device if self.use_cuda else torch.device("cpu")

    def _agg_marked(self, data: torch.Tensor, marks: int, op: str, denom: Denominator) -> torch.Tensor:
        """Runs :meth:`_agg` on a tensor that ends with ``marks`` elements that must stay zero if they are zero on all
        ranks, and must not become zero if they are not.
        """
        result: torch.Tensor = self._agg(data, op, denom)
        return result

    def agg_grad(self, by_layer: bool = False) -> Closure:
        """Returns a function ``(model, op, denom=None)`` that aggregates the model's gradients in place.

        With ``by_layer``, each parameter is communicated separately, instead of all parameters of a dtype at once.
        """
        return self._agg_gradients_by_layer if by_layer else self._agg_gradients_by_model

    def agg_model(self, by_layer: bool = False) -> Closure:
        """Returns a function ``(model, op, denom=None)`` that aggregates the model's weights in place, but not its
        buffers.

        With ``by_layer``, each parameter is communicated separately, instead of all parameters of a dtype at once.
        """
        return self._agg_weights_by_layer if by_layer else self._agg_weights_by_model

    def _agg_gradients_by_layer(self, model: torch.nn.Module, op: str, denom: Denominator = None) -> None:
        self._aggregate([[entry] for entry in _gradients(model)], op, denom, marked=True)

    def _agg_gradients_by_model(self, model: torch.nn.Module, op: str, denom: Denominator = None) -> None:
        self._aggregate(_by_dtype(_gradients(model)), op, denom, marked=True)

    def _agg_weights_by_layer(self, model: torch.nn.Module, op: str, denom: Denominator = None) -> None:
        self._aggregate([[entry] for entry in _weights(model)], op, denom, marked=False)

    def _agg_weights_by_model(self, model: torch.nn.Module, op: str, denom: Denominator = None) -> None:
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
            # For min, "present" must be the smaller number.
            present = -1.0 if op == "min" else 1.0
            marks = [0.0 if value is None else present for _, value in part]
            values.append(torch.tensor(marks, dtype=values[0].dtype))
        count = len(part) if marked else 0
        result = self._agg_marked(flatten(values, device), count, op, denom)
        # If the marks are in CUDA memory, this copies them all at once instead of one by one.
        present_anywhere = (result[result.numel() - count :] != 0).tolist() if marked else [True] * len(part)
        offset = 0
        for (parameter, _), has_value in zip(part, present_anywhere, strict=True):
            piece = result[offset : offset + parameter.numel()].view(parameter.shape)
            offset += parameter.numel()
            if not marked:
                # detach and not .data, so that autograd notices that a saved tensor has changed.
                parameter.detach().copy_(piece)
            elif has_value:
                put_gradient(parameter, piece)


def put_gradient(parameter: torch.nn.Parameter, value: torch.Tensor) -> None:
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    parameter.grad.detach().copy_(value.reshape(parameter.shape))


def gradient_of(parameter: torch.nn.Parameter, index: int) -> torch.Tensor | None:
    """Returns a parameter's gradient, or None. Raises NotImplementedError for a sparse gradient."""
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
    """Groups entries by dtype, in the order in which the dtypes first appear, which is the same on all ranks."""
    found: dict[torch.dtype, list[Entry]] = {}
    for parameter, value in entries:
        found.setdefault(parameter.dtype if value is None else value.dtype, []).append((parameter, value))
    return list(found.values())
