"""SUM of sparse tensors: every rank gathers the rows of all and adds them up in rank order.

Numbers of rows differ, so their count goes first. Both steps block the caller: a sparse all_reduce returns when it is
done.
"""

from __future__ import annotations

from typing import Any

import torch

from bagua import engine

from .operations import all_gather, all_to_all
from .torch_bindings import c10d
from .work import Work

__all__ = ["all_reduce"]


def all_reduce(raw: engine.Communicator, tensor: torch.Tensor, op: Any, timeout: float) -> Work:
    """Every rank gets the sum, in place. NotImplementedError for another reduction."""
    if getattr(op, "op", op) != c10d.ReduceOp.RedOpType.SUM:
        raise NotImplementedError(f"a sparse tensor is reduced by SUM alone, not by {op}")
    if tensor.is_cuda:
        raise NotImplementedError(f"the sparse tensor is on {tensor.device}: only those of the CPU are reduced yet")
    mine = tensor.detach().coalesce()
    indices, values = mine.indices(), mine.values()
    counts = torch.empty(raw.size, dtype=torch.int64)
    all_gather(raw, counts, torch.tensor([indices.shape[1]])).begin(False, timeout)
    rows = counts.tolist()
    total = torch.zeros_like(mine)
    gathered_indices = _gather_rows(raw, indices.t().contiguous(), rows, timeout)
    gathered_values = _gather_rows(raw, values, rows, timeout)
    start = 0
    for count in rows:
        part = slice(start, start + count)
        total = total + torch.sparse_coo_tensor(gathered_indices[part].t(), gathered_values[part], tensor.shape)
        start += count
    with torch.no_grad():
        # Not into tensor.detach(), which would keep the number of rows it has now.
        tensor.copy_(total.coalesce())
    return Work(None, [tensor])


def _gather_rows(raw: engine.Communicator, mine: torch.Tensor, rows: list[int], timeout: float) -> torch.Tensor:
    """The rows of all ranks, one after the other."""
    sends = mine.repeat(raw.size, *([1] * (mine.dim() - 1)))
    room = torch.empty((sum(rows), *mine.shape[1:]), dtype=mine.dtype)
    all_to_all(raw, room, sends, rows, [mine.shape[0]] * raw.size).begin(False, timeout)
    return room
