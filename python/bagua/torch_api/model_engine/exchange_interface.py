"""Which tensors of a model are communicated, and when: the interface between a wrapped model and its algorithm."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from typing import Protocol

import torch

from ..bucket import BaguaBucket
from ..process_group import ProcessGroup
from ..tensor import Getter
from .bucket_engine import BucketEngine

#: Names and parameters of a model.
Parameters = Sequence[tuple[str, torch.nn.Parameter]]


def always(tensor: torch.Tensor) -> Getter:
    """A getter that answers with one tensor."""
    return lambda _: tensor


class WrappedModel(Protocol):
    """What an algorithm may use of the model that it communicates for: ``model.bagua_ddp``."""

    #: Name of the model, the same on all ranks.
    bagua_module_name: str
    bagua_optimizers: list[torch.optim.Optimizer]
    #: In the order of communication.
    bagua_buckets: list[BaguaBucket]
    #: Training forwards so far.
    bagua_train_step_counter: int
    #: SHA-256 of what is equal on all ranks: algorithm, options, parameters and buffers.
    digest: bytes
    #: Names of parameters and buffers that each rank has for itself.
    parameters_to_ignore: frozenset[str]
    #: Name and parameter of every gradient to communicate, in the model's order, as when the algorithm began.
    parameters: Parameters
    process_group: ProcessGroup
    backend: BucketEngine
    exchange: Exchange
    find_unused_parameters: bool
    #: Buckets own the memory of their tensors.
    do_flatten: bool
    #: Bytes that are communicated at once.
    bucket_size: int
    #: Number of the last step that began; -1 before the first. A step begins with the first training forward (grad
    #: enabled, outside ``no_sync``) after the last step's backward; nothing else begins one.
    step: int
    #: Optimizer steps after a training forward without a backward, if gradients are exchanged; equal on all ranks.
    empty_steps: int

    @property
    def module(self) -> torch.nn.Module:
        """The model."""

    def bagua_build_params(self) -> list[tuple[str, torch.nn.Parameter]]:
        """Name and parameter of every gradient to communicate, in the model's order."""

    def send_buffers(self) -> None:
        """Every rank gets rank 0's buffers, unless ``broadcast_buffers`` is False. Collective."""

    def restart(self, step: int) -> None:
        """The next training forward begins the step of this number."""

    def start_buffers(self) -> Callable[[], None]:
        """Starts what :meth:`send_buffers` does, and returns the wait for it, which changes the buffers."""


class Exchange(ABC):
    """The tensors of one model that are communicated. An algorithm makes it; see ``gradients`` and ``weights``.

    Every call but :meth:`register` does nothing unless it is replaced.
    """

    #: Other ranks wait for the gradients of every backward: one that never comes is an error on this rank.
    needs_gradients = False
    #: The engine communicates the buckets.
    uses_buckets = True

    def __init__(self, bagua_ddp: WrappedModel) -> None:
        # Not the object itself: it has this one.
        self._backend = bagua_ddp.backend
        self._module_name = bagua_ddp.bagua_module_name
        self._parameters = bagua_ddp.parameters

    @abstractmethod
    def register(self) -> list[torch.Tensor]:
        """The tensors to communicate as Bagua tensors, in the order in which they become ready."""

    def bind(self, buckets: Sequence[BaguaBucket]) -> None:  # noqa: B027
        """Takes over what the buckets made of the tensors; called when they are registered with the engine."""

    def begin(self) -> None:  # noqa: B027
        """A step that communicates begins: its first training forward is about to run."""

    def accumulated(self, name: str) -> None:  # noqa: B027
        """A gradient that ``no_sync`` keeps on this rank."""

    def arrived(self, name: str, param: torch.nn.Parameter) -> None:  # noqa: B027
        """A gradient has its final local value."""

    def finish(self) -> None:  # noqa: B027
        """The backward is done; its caller may use the gradients as soon as this returns."""

    def abandon(self) -> None:  # noqa: B027
        """Forgets a backward that never came to its end."""

    def given_gradient(self, params: Collection[int]) -> str | None:
        """Called if no backward came since the last step of an optimizer that holds the parameters with these ids: the
        name of one whose gradient the ranks have not exchanged. Zeros do not count.
        """
        return None

    def before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:  # noqa: B027
        """Before each step of an optimizer that holds parameters of the model."""

    def stepped(self, optimizer: torch.optim.Optimizer) -> None:  # noqa: B027
        """After each step of such an optimizer."""

    def before_step(self) -> None:  # noqa: B027
        """Before a step begins, and before the model is closed: does what the last step left undone."""

    def before_load(self) -> None:  # noqa: B027
        """Before other weights are loaded: takes over the results of what was sent, which they replace."""

    def drop(self) -> bool:
        """Instead of :meth:`before_step` when the model was collected: waits for what was begun, and begins nothing.
        Whether something was left undone.
        """
        return False
