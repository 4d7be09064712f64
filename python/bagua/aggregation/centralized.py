"""Aggregations after which every rank has the same result: all-reduce over our engine, torch.distributed or Horovod."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any, Literal

import torch

from .aggregation import Aggregation, Denominator, divisor
from .backends import HALVES, Group, HorovodReducer, Reducer, find
from .powersgd import PowerAggregation
from .sparsified import SparsifiedAggregation

__all__ = [
    "ALLREDUCE_AGGREGATION_OPS",
    "AVG_CUSTOM",
    "AVG_WORLD",
    "AllReduceAggregation",
    "AllReduceAggregationHVD",
    "PowerAggregation",
    "SparsifiedAggregation",
]

#: The operation that divides the sum by the number of ranks.
AVG_WORLD = "avg_world"
#: The operation that divides the sum by the caller's `denom`.
AVG_CUSTOM = "avg_custom"
#: The averaging operations of mlbench-core.
ALLREDUCE_AGGREGATION_OPS = [AVG_WORLD, AVG_CUSTOM]

_Kind = Literal["avg_world", "avg_custom", "sum", "min", "max"]

#: Name or alias -> operation.
_KINDS: dict[str, _Kind] = {
    AVG_WORLD: "avg_world",
    "avg": "avg_world",
    AVG_CUSTOM: "avg_custom",
    "custom_avg": "avg_custom",
    "sum": "sum",
    "min": "min",
    "max": "max",
}


class AllReduceAggregation(Aggregation):
    """Averages, adds, or takes the minimum or maximum of all ranks' gradients or weights, element by element.

    ``op`` of the closures is ``"avg_world"`` (or ``"avg"``), ``"avg_custom"`` (or ``"custom_avg"``: the sum divided by
    ``denom``, a number or a tensor of one element), ``"sum"``, ``"min"`` or ``"max"``. They raise NotImplementedError
    for another ``op`` and ValueError for an invalid ``denom``, before anything is communicated.

    ``world_size`` is the group's size, or 1 to communicate with nobody, which needs no process group. The division
    comes after the sum unless ``divide_before`` is set. Half precision is accumulated in float32 and rounded once, so
    an average does not overflow if only the sum would.

    ``denom`` is not communicated. If it differs between ranks and ``divide_before`` is set, every rank gets the sum of
    x_r / denom_r. Without ``divide_before``, each rank divides the sum by its own ``denom``, and the replicas diverge.

    ``group`` has the ranks that take part: None for our default group, a process group of ours or of torch.distributed,
    or ``"torch"``.
    """

    def __init__(
        self, world_size: int, divide_before: bool = False, use_cuda: bool = False, *, group: Group = None
    ) -> None:
        super().__init__(use_cuda)
        if world_size < 1:
            raise ValueError(f"world_size is {world_size}; it must be at least 1")
        self.world_size = world_size
        self.divide_before = divide_before
        self.group = group

    def _reducer(self) -> Reducer:
        return find(self.group, self.world_size)

    def _place(self, device: torch.device) -> torch.device:
        return self._reducer().place(device, self.use_cuda)

    def _check(self, op: str, denom: Denominator) -> None:
        kind = _KINDS.get(op)
        if kind is None:
            raise NotImplementedError(f"op must be one of {', '.join(_KINDS)}; got {op!r}")
        if kind == "avg_custom":
            divisor(denom)
        self._reducer()

    def _agg(self, data: Any, op: str, denom: Denominator = None) -> Any:
        self._check(op, denom)
        return self._agg_marked(data, 0, op, denom)

    def _agg_marked(self, data: torch.Tensor, marks: int, op: str, denom: Denominator) -> torch.Tensor:
        kind, reducer = _KINDS[op], self._reducer()
        if kind in ("avg_world", "avg_custom") and not data.dtype.is_floating_point and not data.dtype.is_complex:
            raise TypeError(f"{op} of {str(data.dtype).removeprefix('torch.')} is not defined")
        if data.dtype.is_complex:
            raise TypeError(f"{str(data.dtype).removeprefix('torch.')} tensors cannot be aggregated")
        end = data.numel() - marks
        if kind == "avg_world" and not self.divide_before:
            reducer.all_reduce(data, "mean")
        elif kind == "avg_world" or (kind == "avg_custom" and self.divide_before):
            # Marks are not divided, because a large denominator could round them to zero.
            data[:end].div_(self.world_size if kind == "avg_world" else divisor(denom))
            reducer.all_reduce(data, "sum")
        elif kind == "avg_custom":
            wide = data.float() if data.dtype in HALVES else data
            reducer.all_reduce(wide, "sum")
            wide[:end].div_(divisor(denom))
            if wide is not data:
                data.copy_(wide)
        elif kind == "sum" or kind == "min" or kind == "max":
            reducer.all_reduce(data, kind)
        return data


def _horovod() -> ModuleType | None:
    try:
        return importlib.import_module("horovod.torch")
    except ImportError:
        return None


class AllReduceAggregationHVD(AllReduceAggregation):
    """:class:`AllReduceAggregation` over Horovod if it is installed, else over our engine or ``group``.

    The caller must have called ``hvd.init()``. torch.distributed need not be initialised.
    """

    def __init__(
        self, world_size: int, divide_before: bool = False, use_cuda: bool = False, *, group: Group = None
    ) -> None:
        super().__init__(world_size, divide_before, use_cuda, group=group)
        self._horovod = _horovod()

    def _reducer(self) -> Reducer:
        if self._horovod is None or self.world_size == 1:
            return super()._reducer()
        reducer = HorovodReducer(self._horovod)
        if reducer.size != self.world_size:
            raise ValueError(f"world_size is {self.world_size}, but Horovod has {reducer.size} rank(s)")
        return reducer
