"""SUM of sparse tensors: every rank gathers all ranks' rows and adds them in rank order.

Numbers of rows differ between ranks, so they are gathered first. Both steps block the caller, so a sparse all_reduce
has completed when it returns.
"""

from __future__ import annotations

from typing import Any

import torch

from bagua import extension

from .operations import all_gather, all_to_all
from .torch_bindings import c10d
from .work import Work

__all__ = ["all_reduce"]


def all_reduce(raw: extension.Communicator, tensor: torch.Tensor, op: Any, timeout: float) -> Work:
    """Sums sparse tensors, in place on every rank. Raises NotImplementedError for another reduction."""
    if getattr(op, "op", op) != c10d.ReduceOp.RedOpType.SUM:
        raise NotImplementedError(f"a sparse tensor is reduced by SUM alone, not by {op}")
    if tensor.is_cuda:
        raise NotImplementedError(f"the sparse tensor is on {tensor.device}: move it to the CPU first")
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
        # tensor.detach() would keep the current number of rows.
        tensor.copy_(total.coalesce())
    return Work(None, [tensor])


def _gather_rows(raw: extension.Communicator, mine: torch.Tensor, rows: list[int], timeout: float) -> torch.Tensor:
    """Returns the rows of all ranks, concatenated."""
    sends = mine.repeat(raw.size, *([1] * (mine.dim() - 1)))
    room = torch.empty((sum(rows), *mine.shape[1:]), dtype=mine.dtype)
    all_to_all(raw, room, sends, rows, [mine.shape[0]] * raw.size).begin(False, timeout)
    return room
