"""Sparse gradients: combines the rows of Embedding and EmbeddingBag weights that the ranks' samples touched.

The sparse parameters of a model are known before the first backward and equal on all ranks. After each backward, the
ranks

1. gather the numbers of rows with one all_gather,
2. gather the rows with a second all_gather, padded to the rank with the most bytes, if any rank has a row,
3. add all rows in rank order, as dense collectives do, so that the results are bitwise equal on all ranks.

All ranks therefore call the same collectives, whichever parameters a rank used. They run after backward, because the
number of rows is known only then, and buckets of dense gradients are sent first.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import torch

from bagua.errors import BaguaError

from ..bucket_memory import resolved
from ..process_group import ReduceOp
from .algorithm_interface import Parameters, WrappedModel
from .gradients import GradientExchange
from .sync_model_state import ALIGN

# Rows are added in these dtypes and rounded once, as in the core's reductions.
_ACCUMULATED_IN = {torch.float16: torch.float32, torch.bfloat16: torch.float32}

_INDEX = torch.int64


def sparse_parameters(
    modules: Iterable[torch.nn.Module], parameters: Parameters
) -> list[tuple[str, torch.nn.Parameter]]:
    """Returns those ``parameters`` that are weights of ``modules``: Embedding or EmbeddingBag with ``sparse=True``."""
    weights = {
        id(child.weight)
        for child in modules
        if isinstance(child, torch.nn.Embedding | torch.nn.EmbeddingBag) and child.sparse
    }
    return [(name, param) for name, param in parameters if id(param) in weights]


@dataclass
class _Rows:
    """The rows of one parameter's gradient on one rank."""

    # Row numbers, ascending and without repetition.
    indices: torch.Tensor
    values: torch.Tensor


@dataclass
class _Slot:
    name: str
    param: torch.nn.Parameter
    # True if the parameter got a gradient in this backward.
    arrived: bool = False

    def none(self) -> _Rows:
        return _Rows(torch.empty(0, dtype=_INDEX), torch.empty((0, *self.param.shape[1:]), dtype=self.param.dtype))

    def windows(self, room: torch.Tensor, start: int, rows: int) -> tuple[_Rows, int]:
        """Returns views of this parameter's rows in a message, and the offset of the next parameter."""
        shape = (rows, *self.param.shape[1:])
        indices, start = _window(room, start, (rows,), _INDEX)
        values, start = _window(room, start, shape, self.param.dtype)
        return _Rows(indices, values), start

    def bytes(self, rows: int) -> int:
        row = self.param.shape[1:].numel() * self.param.element_size()
        return _aligned(rows * _INDEX.itemsize) + _aligned(rows * row)


class SparseGradientExchange(GradientExchange):
    """The exchange of gradients for a model that has ``sparse`` parameters. Dense gradients travel in buckets.

    ``op`` (SUM or AVG) combines the ranks' sparse gradients.
    """

    def __init__(self, bagua_ddp: WrappedModel, sparse: Parameters, op: ReduceOp) -> None:
        super().__init__(bagua_ddp)
        self._sparse = {name: _Slot(name, param) for name, param in sparse}
        self._parameters = [(name, param) for name, param in self._parameters if name not in self._sparse]
        self._divisor = self._backend.size if op is ReduceOp.AVG else 1

    def _all_parameters(self) -> Parameters:
        return [*self._parameters, *((slot.name, slot.param) for slot in self._sparse.values())]

    def arrived(self, name: str, param: torch.nn.Parameter) -> None:
        """Records a complete gradient.

        Autograd adds a second sparse gradient in the same backward (re-entrant checkpoints) to the first one.
        """
        slot = self._sparse.get(name)
        if slot is None:
            super().arrived(name, param)
        else:
            slot.arrived = True

    def skip(self) -> None:
        """Like :meth:`GradientExchange.skip`. For sparse parameters, this rank contributes gradients without rows."""
        super().skip()
        for slot in self._sparse.values():
            slot.arrived = not self._find_unused
            if slot.arrived:
                rows, param = slot.none(), slot.param
                self._replace(param, torch.sparse_coo_tensor(rows.indices.unsqueeze(0), rows.values, param.shape))

    def _unused_beside(self, touched: Collection[str]) -> list[str]:
        return [slot.name for slot in self._sparse.values() if not self._is_used(slot, touched)]

    def _is_used(self, slot: _Slot, touched: Collection[str]) -> bool:
        return slot.arrived or (slot.name in touched and slot.param.grad is not None)

    def _exchange_beside(self, touched: Collection[str], divisor: float) -> None:
        """Replaces each sparse gradient by the combination of all ranks' gradients. Collective.

        A parameter that no rank used keeps its gradient. If only this rank did not use it, this rank contributes its
        old gradient, if any.
        """
        slots = list(self._sparse.values())
        used = [self._is_used(slot, touched) for slot in slots]
        mine = [self._rows_of(slot, is_used) for slot, is_used in zip(slots, used, strict=True)]
        if self._votes.room is not None:
            mine = [_Rows(rows.indices, rows.values.clone()) for rows in mine]
            self._votes.scale([rows.values for rows in mine])
        counts = torch.tensor([[int(u), len(rows.indices)] for u, rows in zip(used, mine, strict=True)], dtype=_INDEX)
        table: list[list[list[int]]] = self._backend.all_gather(counts).tolist()
        # All ranks have the same table, so they take the same decisions.
        live = [i for i in range(len(slots)) if any(theirs[i][0] for theirs in table)]
        rows = self._gather([slots[i] for i in live], [mine[i] for i in live], [[t[i][1] for i in live] for t in table])
        for slot, parts in zip([slots[i] for i in live], rows, strict=True):
            divisor = self._divisor if self._votes.room is None else divisor
            self._replace(slot.param, _combined(parts, slot.param, divisor))

    def _rows_of(self, slot: _Slot, is_used: bool) -> _Rows:
        grad, param = slot.param.grad, slot.param
        if grad is None:
            if is_used:
                raise self._backend.reported(
                    BaguaError(
                        f"the gradient of {slot.name!r} is None when it is to be communicated: another hook removed it"
                    )
                )
            return slot.none()
        if grad.layout != torch.sparse_coo or grad.sparse_dim() != 1:
            kind = (
                "dense" if grad.layout == torch.strided else f"{grad.layout} with {grad.sparse_dim()} sparse dimensions"
            )
            raise self._backend.reported(
                NotImplementedError(
                    f"the gradient of {slot.name!r} of model {self._module_name!r} is {kind} on rank "
                    f"{self._backend.rank}, but sparse=True of its embedding announced sparse rows: a weight that "
                    "another module or operation uses too needs sparse=False"
                )
            )
        grad = grad.detach().coalesce()
        # Resolved, because the message must hold actual values.
        return _Rows(grad.indices()[0], resolved(grad.values()).to(param.dtype))

    def _gather(
        self, slots: Sequence[_Slot], mine: Sequence[_Rows], counts: Sequence[Sequence[int]]
    ) -> list[list[_Rows]]:
        """Returns every rank's rows of each parameter. ``counts`` is by rank, then by parameter."""
        sizes = [sum(slot.bytes(n) for slot, n in zip(slots, theirs, strict=True)) for theirs in counts]
        longest = max(sizes)
        room = torch.empty(len(counts) * longest, dtype=torch.uint8)
        found: list[list[_Rows]] = [[] for _ in slots]
        for rank, theirs in enumerate(counts):
            start = rank * longest
            for slot, n, of_slot in zip(slots, theirs, found, strict=True):
                rows, start = slot.windows(room, start, n)
                of_slot.append(rows)
        for of_slot, rows in zip(found, mine, strict=True):
            of_slot[self._backend.rank].indices.copy_(rows.indices)
            of_slot[self._backend.rank].values.copy_(rows.values)
        if longest > 0:
            self._backend.all_gather_inplace(room)
        return found

    def _replace(self, param: torch.nn.Parameter, grad: torch.Tensor) -> None:
        if param.grad is not None and param.grad.requires_grad:
            # With create_graph=True the values are combined, but the graph stays that of this rank.
            param.grad.data = grad
        else:
            param.grad = grad

    def _reset(self) -> None:
        super()._reset()
        for slot in self._sparse.values():
            slot.arrived = False


def _aligned(size: int) -> int:
    return size + -size % ALIGN


def _window(room: torch.Tensor, start: int, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[torch.Tensor, int]:
    size = torch.Size(shape).numel() * dtype.itemsize
    return room[start : start + size].view(dtype).view(shape), start + _aligned(size)


def _combined(parts: Sequence[_Rows], param: torch.nn.Parameter, divisor: float) -> torch.Tensor:
    """Returns a coalesced gradient: the sum of all ranks' rows in rank order, divided by ``divisor``."""
    touched, places = torch.unique(torch.cat([rows.indices for rows in parts]), return_inverse=True)
    dtype = _ACCUMULATED_IN.get(param.dtype, param.dtype)
    total = torch.zeros((len(touched), *param.shape[1:]), dtype=dtype)
    for rows, place in zip(parts, places.split([len(rows.indices) for rows in parts]), strict=True):
        # A row occurs once per rank, so the order of additions does not depend on the number of threads.
        total.index_add_(0, place, rows.values.to(dtype))
    # The rows are zeros if all ranks have skipped.
    if divisor not in (0, 1):
        total /= divisor
    # The rows are sorted and unique, so there is nothing to coalesce or check.
    return torch.sparse_coo_tensor(
        touched.unsqueeze(0), total.to(param.dtype), param.shape, is_coalesced=True, check_invariants=False
    )


def exchange_gradients(bagua_ddp: WrappedModel, sparse_op: ReduceOp | None = None) -> GradientExchange:
    """Returns the exchange of the model's gradients, in which ``sparse_op`` combines sparse ones (None: SUM)."""
    if sparse := sparse_parameters(bagua_ddp.module.modules(), bagua_ddp.parameters):
        return SparseGradientExchange(bagua_ddp, sparse, sparse_op or ReduceOp.SUM)
    return GradientExchange(bagua_ddp)
