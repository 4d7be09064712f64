"""Joins and leaves the group of ranks that a strategy trains in, and reduces single tensors over it."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from bagua import config
from bagua.group import default
from bagua.process_state import Record, process, record, report

__all__ = ["fail", "join", "leave", "reduce", "restart"]

_OPS = {
    None: dist.ReduceOp.AVG,
    "mean": dist.ReduceOp.AVG,
    "avg": dist.ReduceOp.AVG,
    "sum": dist.ReduceOp.SUM,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
    "product": dist.ReduceOp.PRODUCT,
}

# If these are set, Lightning assumes that a launcher started this process. A world of one must therefore unset them.
_RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


class _Restart(Record):
    """State that a failed fit leaves for the next one."""

    def __init__(self) -> None:
        #: Store of the failed world, its size, and the number of failures so far. None if no fit has failed.
        self.after_failure: tuple[Any, int, int] | None = None


_restart = record(_Restart)


def join() -> None:
    """Makes Bagua's default group from the world of torch.distributed, unless it exists already."""
    import bagua.torch_api as bagua

    if bagua.is_initialized():
        if process.torchs_world in (None, default()):
            return
        # Bagua's group belongs to an earlier world of torch.distributed, which was destroyed.
        bagua.destroy_process_group()
    if dist.get_world_size() > 1:
        bagua.init_process_group()
        return
    with config.keeping(*_RANK_VARIABLES):
        bagua.init_process_group()


def fail(exception: BaseException) -> None:
    """Reports an exception to the other ranks, so that their calls raise PeerRaisedError instead of timing out."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        report(type(exception), exception)


def leave() -> None:
    """Ends a failed world, so that the next fit in this process can have a new one."""
    import bagua.torch_api as bagua

    if not dist.is_initialized():
        return
    if dist.get_backend() != "bagua":
        # torch's own world continues. Only Bagua's group has failed.
        if dist.get_world_size() > 1 and bagua.is_initialized():
            bagua.destroy_process_group()
        return
    # Keep the store: otherwise an early rank would reach the failed world's store at the same port.
    store: Any = dist.distributed_c10d._get_default_store()
    number = 1 if _restart.after_failure is None else _restart.after_failure[2] + 1
    _restart.after_failure = store, dist.get_world_size(), number
    bagua.destroy_process_group()
    dist.destroy_process_group()


def restart(backend: str, rank: int, world_size: int, timeout: timedelta) -> None:
    """Initialises torch.distributed with the failed world's store, if the last world of these ranks failed."""
    after_failure = _restart.after_failure
    if dist.is_initialized() or after_failure is None or after_failure[1] != world_size:
        return
    store, _, number = after_failure
    dist.init_process_group(
        backend,
        store=PrefixStore(f"bagua/lightning/{number}", store),
        rank=rank,
        world_size=world_size,
        timeout=timeout,
    )


def reduce(who: str, tensor: Any, group: Any, reduce_op: Any) -> Any:
    """Reduces a tensor over all ranks, in place, and returns it. Returns anything else unchanged.

    ``reduce_op`` is "mean" (or "avg" or None), "sum", "min", "max" or "product", in any case, or a
    ``torch.distributed.ReduceOp``. A mean of integers is truncated towards zero. Raises ValueError for another value,
    and for a group.
    """
    if not isinstance(tensor, torch.Tensor):
        return tensor
    if group is not None:
        raise ValueError(f"{who} reduces over all ranks: group must be None, not {group!r}")
    if isinstance(reduce_op, str) or reduce_op is None:
        name = reduce_op if reduce_op is None else reduce_op.lower()
        if name not in _OPS:
            names = ", ".join(repr(known) for known in _OPS if known)
            raise ValueError(f"unrecognized reduce_op {reduce_op!r} for {who}: it takes {names}, None or a ReduceOp")
        op: Any = _OPS[name]
    elif isinstance(reduce_op, (dist.ReduceOp, dist.ReduceOp.RedOpType)):
        op = reduce_op
    else:
        raise ValueError(f"unrecognized reduce_op {reduce_op!r} for {who}: it takes a name, None or a ReduceOp")
    if not dist.is_initialized():
        return tensor
    # gloo cannot average.
    divided = op == dist.ReduceOp.AVG and dist.get_backend() == "gloo"
    dist.all_reduce(tensor, dist.ReduceOp.SUM if divided else op)
    if divided:
        whole = not (tensor.is_floating_point() or tensor.is_complex())
        tensor.div_(dist.get_world_size(), rounding_mode="trunc" if whole else None)
    return tensor
