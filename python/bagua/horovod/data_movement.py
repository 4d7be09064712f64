"""Operations that move elements and change none: allgather, broadcast, alltoall, barrier. Tensors of every dtype.

Before tensors whose lengths may differ, the ranks exchange the lengths: the asynchronous forms return when every rank
has called them, and what follows is asynchronous. ``name`` is accepted for the scripts' sake, as operations match by
their order.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import torch

from bagua.errors import MismatchError
from bagua.handle import Handle
from bagua.torch_api.process_group import DTYPES, Communicator, ReduceOp, check_on_cpu
from bagua.verbs import starts

from . import global_state

__all__ = [
    "allgather",
    "allgather_async",
    "alltoall",
    "alltoall_async",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
]


def check_root(rank: int) -> int:
    """Returns the rank. Raises ValueError if the job has no such rank."""
    if rank not in range(size := global_state.world().nranks()):
        raise ValueError(f"root_rank must be a rank of the job, from 0 to {size - 1}; got {rank}")
    return rank


def _check(tensor: Any, what: str) -> Communicator:
    """Returns the communicator for a tensor that can be communicated."""
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{what} takes a torch.Tensor, not {type(tensor).__name__}")
    check_on_cpu(tensor, f"the tensor of {what}")
    return global_state.world()


def _check_rows(tensor: Any, what: str) -> Communicator:
    communicator = _check(tensor, what)
    if tensor.dim() == 0:
        raise ValueError(f"{what} needs a tensor of at least one dimension")
    return communicator


def _elements(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's elements in one dimension, as bytes where the core does not know their dtype."""
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1)
    return flat if tensor.dtype in DTYPES else flat.view(torch.uint8)


def digest(*what: object) -> int:
    """A number that is equal on ranks that agree."""
    return zlib.crc32(repr(what).encode())


def _agree(digests: Sequence[int], rank: int, what: str, tensor: torch.Tensor) -> None:
    others = [other for other, value in enumerate(digests) if value != digests[rank]]
    if others:
        raise MismatchError(
            f"{what}: rank {rank} has {tensor.dtype} with rows of shape {list(tensor.shape[1:])}, and the dtype or "
            f"rows of ranks {others} are others"
        )


def everybody(communicator: Communicator, *numbers: int) -> list[list[int]]:
    """Some numbers of each rank, on every rank."""
    found = torch.empty(communicator.nranks() * len(numbers), dtype=torch.int64)
    communicator.allgather(torch.tensor(numbers, dtype=torch.int64), found)
    rows: list[list[int]] = found.view(-1, len(numbers)).tolist()
    return rows


# --- allgather --------------------------------------------------------------------------------------------------------


def _gather(tensor: torch.Tensor) -> tuple[Handle[Any], list[int]]:
    """Starts an allgather; also each rank's number of rows."""
    communicator = _check_rows(tensor, "allgather")
    table = everybody(communicator, len(tensor), digest(tensor.dtype, tensor.shape[1:]))
    rows, digests = [row[0] for row in table], [row[1] for row in table]
    _agree(digests, communicator.rank(), "allgather", tensor)
    sent = _elements(tensor)
    result = tensor.detach().new_empty(sum(rows), *tensor.shape[1:])
    received = _elements(result)
    if len(set(rows)) == 1:
        part = communicator.allgather(sent, received, async_op=True)
    else:
        width = received.numel() // sum(rows)
        counts = [count * width for count in rows]
        ranks = communicator.nranks()
        # The same elements to every rank.
        part = communicator.alltoall_v(
            sent, [sent.numel()] * ranks, [0] * ranks, received, counts, starts(counts), async_op=True
        )
    return Handle([part], lambda: result), rows


class _AllGather(torch.autograd.Function):
    """The gradient of a rank's rows is their gradient's average over the ranks."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> Any:
        handle, rows = _gather(tensor)
        rank = global_state.world().rank()
        ctx.mine = slice(sum(rows[:rank]), sum(rows[: rank + 1]))
        return handle.wait()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return _average(grad)[ctx.mine]


def _average(grad: torch.Tensor) -> torch.Tensor:
    mean = grad.clone(memory_format=torch.contiguous_format)
    global_state.world().allreduce_inplace(mean, ReduceOp.AVG)
    return mean


def allgather_async(tensor: torch.Tensor, name: str | None = None) -> Handle[Any]:
    """Starts :func:`allgather`, without gradient."""
    return _gather(tensor)[0]


def allgather(tensor: torch.Tensor, name: str | None = None) -> torch.Tensor:
    """All ranks' tensors, joined along the first dimension, in which alone they may differ.

    ValueError for a tensor without dimensions, MismatchError on every rank where the other dimensions or dtypes differ.
    """
    result: torch.Tensor = _AllGather.apply(tensor)
    return result


# --- broadcast --------------------------------------------------------------------------------------------------------


@torch.no_grad()
def _spread(tensor: torch.Tensor, root_rank: int, output: torch.Tensor | None) -> Handle[Any]:
    communicator = _check(tensor, "broadcast")
    root = check_root(root_rank)
    values = tensor.detach().resolve_conj().resolve_neg()
    # In place where the memory is the tensor's own and has no gaps.
    direct = output is not None and values.is_contiguous() and values.data_ptr() == tensor.data_ptr()
    if not direct:
        values = values.clone(memory_format=torch.contiguous_format)
    part = communicator.broadcast(values if values.dtype in DTYPES else _elements(values), root, async_op=True)

    @torch.no_grad()
    def finish() -> torch.Tensor:
        if output is None:
            return values
        return output if direct else output.copy_(values)

    return Handle([part], finish)


class _Broadcast(torch.autograd.Function):
    """The gradient of the root's tensor is the average over the ranks; that of the others' is zero."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, root_rank: int) -> Any:
        ctx.root = root_rank
        return _spread(tensor, root_rank, None).wait()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        mean = _average(grad)
        return (mean if global_state.world().rank() == ctx.root else mean.zero_()), None


def broadcast_async(tensor: torch.Tensor, root_rank: int, name: str | None = None) -> Handle[Any]:
    """Starts :func:`broadcast`, without gradient."""
    return _spread(tensor, root_rank, None)


def broadcast(tensor: torch.Tensor, root_rank: int, name: str | None = None) -> torch.Tensor:
    """A new tensor with the values of ``root_rank``, a rank of the job."""
    result: torch.Tensor = _Broadcast.apply(tensor, root_rank)
    return result


def broadcast_async_(tensor: torch.Tensor, root_rank: int, name: str | None = None) -> Handle[Any]:
    """Starts :func:`broadcast_`. The tensor has the values after ``synchronize``."""
    return _spread(tensor, root_rank, tensor)


def broadcast_(tensor: torch.Tensor, root_rank: int, name: str | None = None) -> torch.Tensor:
    """:func:`broadcast` in place, without a gradient; returns the tensor."""
    result: torch.Tensor = broadcast_async_(tensor, root_rank, name).wait()
    return result


# --- alltoall ---------------------------------------------------------------------------------------------------------


def _check_splits(tensor: torch.Tensor, splits: Any, ranks: int) -> list[int]:
    if splits is None:
        if len(tensor) % ranks:
            raise ValueError(f"alltoall without splits: {ranks} ranks cannot divide {len(tensor)} rows evenly")
        return [len(tensor) // ranks] * ranks
    given = splits if isinstance(splits, torch.Tensor) else torch.as_tensor(splits)
    if given.dim() != 1 or given.is_floating_point() or given.is_complex() or given.dtype is torch.bool:
        raise TypeError(f"alltoall: splits is a list of whole numbers, not {splits!r}")
    found: list[int] = given.tolist()
    if len(found) != ranks:
        raise ValueError(f"alltoall: {len(found)} splits for {ranks} ranks")
    if any(rows < 0 for rows in found) or sum(found) > len(tensor):
        raise ValueError(f"alltoall: splits {found} of a tensor with {len(tensor)} rows")
    return found


def _exchange(tensor: torch.Tensor, splits: Any) -> tuple[Handle[Any], list[int], list[int]]:
    """Starts an alltoall; also the rows that go to each rank, and those that come from each."""
    communicator = _check_rows(tensor, "alltoall")
    ranks = communicator.nranks()
    rows = _check_splits(tensor, splits, ranks)
    mark = digest(tensor.dtype, tensor.shape[1:])
    table = torch.empty(ranks, 2, dtype=torch.int64)
    communicator.alltoall(torch.tensor([[count, mark] for count in rows], dtype=torch.int64), table)
    coming: list[int] = table[:, 0].tolist()
    _agree(table[:, 1].tolist(), communicator.rank(), "alltoall", tensor)
    sent = _elements(tensor)
    result = tensor.detach().new_empty(sum(coming), *tensor.shape[1:])
    received = _elements(result)
    width = sent.numel() // len(tensor) if len(tensor) else (received.numel() // sum(coming) if sum(coming) else 0)
    counts, places = [count * width for count in rows], [count * width for count in coming]
    part = communicator.alltoall_v(sent, counts, starts(counts), received, places, starts(places), async_op=True)
    return Handle([part], lambda: result), rows, coming


class _AllToAll(torch.autograd.Function):
    """The gradient of a row is that of the row where it went; zero for rows that went nowhere."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, splits: Any) -> Any:
        handle, rows, coming = _exchange(tensor, splits)
        ctx.coming, ctx.shape, ctx.sent = coming, tensor.shape, sum(rows)
        received = torch.tensor(coming, dtype=torch.int32)
        ctx.mark_non_differentiable(received)
        return handle.wait(), received

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor, _: Any) -> Any:
        back = _exchange(grad, ctx.coming)[0].wait()
        whole = back.new_zeros(ctx.shape)
        whole[: ctx.sent] = back
        return whole, None


def alltoall_async(
    tensor: torch.Tensor,
    splits: torch.Tensor | Sequence[int] | None = None,
    name: str | None = None,
) -> Handle[Any]:
    """Starts :func:`alltoall`, without gradient."""
    handle, _, coming = _exchange(tensor, splits)
    if splits is None:
        return handle
    received = torch.tensor(coming, dtype=torch.int32)
    return Handle([handle], lambda: (handle.wait(), received))


def alltoall(
    tensor: torch.Tensor,
    splits: torch.Tensor | Sequence[int] | None = None,
    name: str | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """The rows that all ranks sent to this one, in the order of the ranks.

    Without ``splits`` a tensor's rows are divided evenly. With them, ``splits[r]`` rows go to rank r, and the result is
    a pair: the rows, and how many came from each rank (int32). ValueError for splits that do not fit, MismatchError on
    every rank where the other dimensions or dtypes differ.
    """
    result, received = _AllToAll.apply(tensor, splits)
    return result if splits is None else (result, received)


def barrier() -> None:
    """Blocks until every rank has called it."""
    global_state.world().barrier()
