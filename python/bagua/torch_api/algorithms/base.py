"""What an algorithm is: which tensors are communicated, in which buckets, with which operations, and when.

The defaults communicate gradients: a bucket goes as soon as its gradients are there, and backward returns when all have
arrived. An algorithm replaces what it does differently.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from ..bucket import BaguaBucket
from ..data_parallel.backend import Backend
from ..data_parallel.gradients import GradientExchange
from ..process_group import ProcessGroup, ReduceOp


class WrappedModel(Protocol):
    """What an algorithm may use of the model that it communicates for: ``model.bagua_ddp``."""

    #: Name of the model, the same on all ranks.
    bagua_module_name: str
    bagua_optimizers: list[torch.optim.Optimizer]
    #: In the order of communication.
    bagua_buckets: list[BaguaBucket]
    #: Training forwards so far.
    bagua_train_step_counter: int
    process_group: ProcessGroup
    backend: Backend
    gradients: GradientExchange

    @property
    def module(self) -> torch.nn.Module:
        """The model."""

    def bagua_build_params(self) -> list[tuple[str, torch.nn.Parameter]]:
        """Name and parameter of every gradient to communicate, in the model's order."""


class AlgorithmImpl:
    """An algorithm at work on one model. The hooks are asked for once, after the buckets are registered."""

    def __init__(self, process_group: ProcessGroup) -> None:
        self.process_group = process_group

    def need_reset(self) -> bool:
        """Asked before each training forward: True has everything initialised anew, broadcast included."""
        return False

    def init_tensors(self, bagua_ddp: WrappedModel) -> list[torch.Tensor]:
        """The tensors to communicate, registered, in the order in which they become ready."""
        return bagua_ddp.gradients.register()

    def tensors_to_buckets(self, tensors: Sequence[Sequence[torch.Tensor]], do_flatten: bool) -> list[BaguaBucket]:
        """One bucket for each list."""
        group = self.process_group
        return [BaguaBucket(bucket, str(i), do_flatten, group=group) for i, bucket in enumerate(tensors)]

    def init_operations(self, bagua_ddp: WrappedModel, bucket: BaguaBucket) -> None:
        """Appends the operations to a bucket."""

    def sparse_op(self) -> ReduceOp | None:
        """How sparse gradients are combined: SUM or AVG. ``None``: a model that has some is refused.

        Asked once. The default hooks do it, after the buckets.
        """
        return None

    def init_forward_pre_hook(self, bagua_ddp: WrappedModel) -> Callable[[Any], None]:
        """Called with the model's inputs before each training forward."""

        def hook(inputs: Any) -> None:
            pass

        return hook

    def init_backward_hook(self, bagua_ddp: WrappedModel) -> Callable[[str, torch.nn.Parameter], None]:
        """Called with name and parameter when a gradient has its final local value."""
        return bagua_ddp.gradients.arrived

    def init_post_backward_hook(self, bagua_ddp: WrappedModel) -> Callable[[], None]:
        """Called when the whole backward is done, before it returns."""
        return bagua_ddp.gradients.finish

    def init_post_optimizer_step_hook(self, bagua_ddp: WrappedModel) -> Callable[[torch.optim.Optimizer], None]:
        """Called with the optimizer after each of its steps."""

        def hook(optimizer: torch.optim.Optimizer) -> None:
            pass

        return hook


class Algorithm:
    """What a user chooses; :meth:`reify` puts it to work on a process group. One object may serve several models."""

    def reify(self, process_group: ProcessGroup) -> AlgorithmImpl:
        """A fresh implementation."""
        raise NotImplementedError(f"{type(self).__name__}.reify")

    @classmethod
    def init(cls, name: str, **kwargs: Any) -> Algorithm:
        """The algorithm registered under a name."""
        made = GlobalAlgorithmRegistry.get(name)(**kwargs)
        if not isinstance(made, Algorithm):
            raise TypeError(f"{name!r} is registered with {made!r}, which is not an Algorithm")
        return made


class _Registry(dict[str, dict[str, Any]]):
    """Algorithms by name."""

    def register(self, name: str, algorithm: Callable[..., Algorithm], description: str | None = None) -> None:
        """Adds one. A name that is taken is an error."""
        if not isinstance(name, str):
            raise TypeError(f"an algorithm's name is a str, not {name!r}")
        if name in self:
            raise ValueError(f"an algorithm {name!r} is already registered")
        self[name] = {"algorithm": algorithm, "description": description or ""}

    def get(self, name: str, default: Any = None) -> Any:
        """The class or function that makes the algorithm of this name."""
        found = super().get(name)
        if found is not None:
            return found["algorithm"]
        if default is not None:
            return default
        raise KeyError(f"no algorithm {name!r}; registered: {', '.join(self.available_algorithms()) or 'none'}")

    def available_algorithms(self) -> list[str]:
        """The registered names."""
        return list(self)

    def __str__(self) -> str:
        return f"Registered Algorithms: {', '.join(self)}"


GlobalAlgorithmRegistry = _Registry()
