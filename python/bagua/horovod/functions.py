"""Parameters, optimizer state and objects for all ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from bagua.errors import MismatchError
from bagua.torch_api import env
from bagua.torch_api.model_engine.bucketing import split
from bagua.torch_api.model_engine.consistency import broadcast_optimizer
from bagua.torch_api.process_group import DTYPES, Communicator, check_on_cpu

from . import global_state
from .data_movement import broadcast_, check_root, digest, everybody

__all__ = ["allgather_object", "broadcast_object", "broadcast_optimizer_state", "broadcast_parameters"]


def _broadcast_all(tensors: Sequence[torch.Tensor], root_rank: int) -> None:
    """The root's values for tensors of the same shapes and dtypes on all ranks, in place; several in one message."""
    communicator = global_state.world()
    plain = [tensor.detach() for tensor in tensors]
    for bucket in split([tensor for tensor in plain if tensor.dtype in DTYPES], env.get_default_bucket_size()):
        communicator.broadcast_coalesced(bucket, root_rank)
    for tensor in plain:
        if tensor.dtype not in DTYPES:
            broadcast_(tensor, root_rank)


def _check_equal(communicator: Communicator, what: str, value: object) -> None:
    """MismatchError on every rank where a value differs between them."""
    digests = [row[0] for row in everybody(communicator, digest(value))]
    others = [rank for rank, other in enumerate(digests) if other != digests[communicator.rank()]]
    if others:
        raise MismatchError(
            f"{what} of rank {communicator.rank()} and of ranks {others} differ in names, shapes or dtypes"
        )


def broadcast_parameters(
    params: Mapping[str, Any] | Iterable[tuple[str, torch.Tensor | None]],
    root_rank: int,
) -> None:
    """Gives parameters and buffers the values of ``root_rank``, a rank of the job, in place.

    ``params`` is ``model.state_dict()`` or ``model.named_parameters()``. TypeError for others, MismatchError on every
    rank where names, shapes or dtypes differ.
    """
    if isinstance(params, torch.Tensor) or not isinstance(params, Iterable):
        raise TypeError(f"broadcast_parameters takes a state_dict or named_parameters, not {type(params).__name__}")
    named: list[tuple[str, torch.Tensor]] = []
    for pair in params.items() if isinstance(params, Mapping) else params:
        if not (isinstance(pair, tuple) and len(pair) == 2):
            raise TypeError(f"broadcast_parameters takes pairs of a name and a tensor, not {type(pair).__name__}")
        name, tensor = pair
        if tensor is None:
            continue
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"parameter {name!r} is a {type(tensor).__name__}, not a tensor")
        check_on_cpu(tensor, f"parameter {name!r}")
        named.append((name, tensor))
    check_root(root_rank)
    signature = [(name, tuple(tensor.shape), tensor.dtype) for name, tensor in named]
    _check_equal(global_state.world(), "the parameters", signature)
    _broadcast_all([tensor for _, tensor in named], root_rank)


def broadcast_optimizer_state(optimizer: torch.optim.Optimizer, root_rank: int) -> None:
    """Gives an optimizer the state and the options of ``root_rank``'s. Its state may be empty on any rank."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"broadcast_optimizer_state takes an optimizer, not {type(optimizer).__name__}")
    communicator = global_state.world()
    root = check_root(root_rank)
    shapes = [[tuple(param.shape) for param in group["params"]] for group in optimizer.param_groups]
    _check_equal(communicator, "the optimizer's parameters", shapes)
    if communicator.rank() == root:
        for leaf in tree_leaves(optimizer.state_dict()):
            if isinstance(leaf, torch.Tensor):
                check_on_cpu(leaf, "a tensor of the optimizer's state")
    broadcast_optimizer(communicator, lambda room: communicator.broadcast(room, root), optimizer, root=root)


def broadcast_object(obj: Any, root_rank: int = 0, name: str | None = None) -> Any:
    """The object of ``root_rank``, a rank of the job, by pickle; the other ranks' is ignored.

    Unpickling runs what that rank has put in its object. Errors are those of :func:`bagua.broadcast_object`.
    """
    return global_state.world().broadcast_object(obj, check_root(root_rank))


def allgather_object(obj: Any, name: str | None = None) -> list[Any]:
    """Every rank's object in the order of the ranks, by pickle.

    Unpickling runs what the members have put in their objects, so use it only among ranks that trust each other. Errors
    are those of :func:`bagua.all_gather_object`.
    """
    return global_state.world().allgather_object(obj)
