"""``model.with_bagua(...)``: the one call that makes a model train on several ranks."""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.weak import WeakIdKeyDictionary

from bagua import group as neutral

from .algorithms.base import Algorithm, AlgorithmImpl
from .bucket import BaguaBucket
from .ddp import BaguaDistributedDataParallel
from .groups import BaguaProcessGroup, to_bagua_process_group

# Beside the models and not in them, so that a copy or a pickle of a model is a plain one.
_wrapped: MutableMapping[torch.nn.Module, BaguaDistributedDataParallel] = WeakIdKeyDictionary()
_names: MutableMapping[torch.nn.Module, str] = WeakIdKeyDictionary()


class _Counter:
    """Numbers models in the order of their wrapping, which is the same on all ranks."""

    models = 0


def with_bagua(
    module: torch.nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    algorithm: Algorithm,
    process_group: BaguaProcessGroup | dist.ProcessGroup | None = None,
    do_flatten: bool = True,
    *,
    find_unused_parameters: bool = False,
    broadcast_buffers: bool = True,
    bucket_size: int | None = None,
) -> torch.nn.Module:
    """Makes ``module`` train in step with the other ranks, and returns it.

    Parameters, buffers and the optimizers' state become rank 0's. From then on ``loss.backward()`` returns with
    gradients that are communicated as ``algorithm`` says. Called again, it replaces what was there before.

    With ``do_flatten`` a gradient is a view of its bucket's memory, which every backward overwrites: clone what must
    outlive ``zero_grad()``.

    ``find_unused_parameters``: parameters that do not take part in a step are not an error. ``broadcast_buffers``: rank
    0's buffers before each training forward. ``bucket_size``: bytes that are communicated at once (default: the
    environment's).
    """
    group = to_bagua_process_group(process_group)
    unwrap(module)
    if module not in _names:
        _names[module] = f"{type(module).__name__}_{_Counter.models}"
        _Counter.models += 1
    _wrapped[module] = BaguaDistributedDataParallel(
        module,
        optimizers,
        algorithm,
        group,
        do_flatten,
        name=_names[module],
        find_unused_parameters=find_unused_parameters,
        broadcast_buffers=broadcast_buffers,
        bucket_size=bucket_size,
    )
    return module


def unwrap(module: torch.nn.Module) -> torch.nn.Module:
    """Makes a model train alone again. Nothing happens to one that does already."""
    ddp = _wrapped.pop(module, None)
    if ddp is not None:
        ddp.close()
    return module


def no_sync(module: torch.nn.Module) -> AbstractContextManager[None]:
    """Gradients only accumulate inside; the first backward afterwards communicates their sum."""
    return _ddp_of(module).no_sync()


def _ddp_of(module: Any) -> BaguaDistributedDataParallel:
    ddp = _wrapped.get(module)
    if ddp is None:
        raise AttributeError(f"this {type(module).__name__} is not wrapped: call with_bagua first")
    return ddp


class BaguaModule:
    """The members that :class:`torch.nn.Module` gains."""

    def with_bagua(self: Any, *args: Any, **kwargs: Any) -> torch.nn.Module:
        """See :func:`with_bagua`."""
        return with_bagua(self, *args, **kwargs)

    @property
    def bagua_ddp(self: Any) -> BaguaDistributedDataParallel:
        """What communicates for this model."""
        return _ddp_of(self)

    @property
    def bagua_module_name(self: Any) -> str:
        """Name of the model among this process's; by default its class and a number. Set it before ``with_bagua``."""
        name = _names.get(self)
        if name is None:
            raise AttributeError(f"this {type(self).__name__} has no name yet")
        return name

    @bagua_module_name.setter
    def bagua_module_name(self: Any, name: str) -> None:
        _names[self] = name

    @property
    def bagua_algorithm(self: Any) -> AlgorithmImpl:
        """The algorithm at work."""
        return _ddp_of(self).bagua_algorithm

    @property
    def bagua_optimizers(self: Any) -> list[torch.optim.Optimizer]:
        """The optimizers that were given."""
        return _ddp_of(self).bagua_optimizers

    @property
    def bagua_buckets(self: Any) -> list[BaguaBucket]:
        """The buckets, in the order of communication."""
        return _ddp_of(self).bagua_buckets


def _patch_torch() -> None:
    properties = set()
    for name, member in vars(BaguaModule).items():
        if "bagua" in name:
            setattr(torch.nn.Module, name, member)
        if isinstance(member, property):
            properties.add(name)
    everything = torch.nn.Module.__dir__

    def visible(self: torch.nn.Module) -> list[str]:
        """What a module has. torch.compile reads every name that stands here, and fails with the first that raises."""
        names = everything(self)  # type: ignore[no-untyped-call]
        return [name for name in names if name not in properties or hasattr(self, name)]

    torch.nn.Module.__dir__ = visible  # type: ignore[method-assign]


def _end_all() -> None:
    """Removes the hooks of every model, so that each trains alone after the group is gone."""
    for ddp in list(_wrapped.values()):
        ddp.close()
    _wrapped.clear()
    _Counter.models = 0


neutral.shutdown_hooks.append(_end_all)
_patch_torch()
