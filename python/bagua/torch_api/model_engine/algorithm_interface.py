"""The interface between a wrapped model and its algorithm: the tensors that are communicated, and when."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from typing import Protocol

import torch

from ..bucket import BaguaBucket
from ..process_group import ProcessGroup
from ..tensor import Getter
from .bucket_engine import BucketEngine
from .votes import Votes

#: Names and parameters of a model.
Parameters = Sequence[tuple[str, torch.nn.Parameter]]


def always(tensor: torch.Tensor) -> Getter:
    """Returns a getter that always returns ``tensor``."""
    return lambda _: tensor


class WrappedModel(Protocol):
    """The members of ``model.bagua_ddp`` that an algorithm may use."""

    #: Name of the model, the same on all ranks.
    bagua_module_name: str
    bagua_optimizers: list[torch.optim.Optimizer]
    #: The buckets in the order of communication.
    bagua_buckets: list[BaguaBucket]
    #: Number of training forwards so far.
    bagua_train_step_counter: int
    #: SHA-256 of everything that must be equal on all ranks: algorithm, options, parameters and buffers.
    digest: bytes
    #: Names of parameters and buffers that are not communicated.
    parameters_to_ignore: frozenset[str]
    #: Name and parameter of every gradient to communicate, in the model's order, when the algorithm began.
    parameters: Parameters
    process_group: ProcessGroup
    backend: BucketEngine
    exchange: Exchange
    votes: Votes
    find_unused_parameters: bool
    #: True if buckets own the memory of their tensors.
    do_flatten: bool
    #: Size of a bucket in bytes.
    bucket_size: int
    #: Number of the last step that began; -1 before the first. A step begins with the first training forward (with
    #: gradients enabled, outside ``no_sync``) after the backward of the last step.
    step: int
    #: If gradients are exchanged: number of optimizer steps without a backward before them. Equal on all ranks.
    empty_steps: int

    @property
    def module(self) -> torch.nn.Module:
        """The model."""

    def bagua_build_params(self) -> list[tuple[str, torch.nn.Parameter]]:
        """Returns name and parameter of every gradient to communicate, in the model's order."""

    def send_buffers(self) -> None:
        """Copies rank 0's buffers to every rank, unless ``broadcast_buffers`` is False. Collective."""

    def restart(self, step: int) -> None:
        """Makes the next training forward begin step number ``step``."""

    def start_buffers(self) -> Callable[[], None]:
        """Starts :meth:`send_buffers`. Returns a function that waits for it and then changes the buffers."""


class Exchange(ABC):
    """The tensors of one model that are communicated. Made by an algorithm; see ``gradients`` and ``weights``.

    All methods except :meth:`register` do nothing by default.
    """

    #: True if other ranks wait for the gradients of every backward. A missing gradient is then an error on this rank.
    needs_gradients = False
    #: True if the engine communicates the buckets.
    uses_buckets = True

    def __init__(self, bagua_ddp: WrappedModel) -> None:
        # Keeps no reference to the model's engine, which refers to this object.
        self._backend = bagua_ddp.backend
        self._module_name = bagua_ddp.bagua_module_name
        self._parameters = bagua_ddp.parameters
        self._votes = bagua_ddp.votes

    @abstractmethod
    def register(self) -> list[torch.Tensor]:
        """Registers the tensors to communicate, and returns them in the order in which they become ready."""

    def bind(self, buckets: Sequence[BaguaBucket]) -> None:  # noqa: B027
        """Connects the tensors to their buckets. Called when the buckets are registered with the engine."""

    def begin(self) -> None:  # noqa: B027
        """Called before the first training forward of a step that communicates."""

    def accumulated(self, name: str) -> None:  # noqa: B027
        """Called with the parameter's name when a gradient stays on this rank because of ``no_sync``, and before a
        user's own backward hook.
        """

    def arrived(self, name: str, param: torch.nn.Parameter) -> None:  # noqa: B027
        """Called when the local value of a gradient is final."""

    def finish(self) -> None:  # noqa: B027
        """Called at the end of backward. When it returns, the caller may use the gradients."""

    def skip(self) -> None:
        """Called instead of a backward, before :meth:`finish`, if this rank contributes nothing to a step."""
        for _, param in self._parameters:
            param.grad = None

    def before_flags(self) -> None:  # noqa: B027
        """Called before the flags are read. Waits for an exchange that this rank has begun and not waited for."""

    def abandon(self) -> None:  # noqa: B027
        """Forgets a backward that never completed."""

    def given_gradient(self, params: Collection[int]) -> str | None:
        """Returns the name of a parameter whose gradient the ranks have not exchanged, or None. Gradients of zeros do
        not count.

        Called if no backward has run since the last step of an optimizer that holds the parameters with the ids
        ``params``.
        """
        return None

    def before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:  # noqa: B027
        """Called before each step of an optimizer that holds parameters of the model."""

    def stepped(self, optimizer: torch.optim.Optimizer) -> None:  # noqa: B027
        """Called after each step of such an optimizer."""

    def before_step(self) -> None:  # noqa: B027
        """Completes work that the last step left undone. Called before each step, and before the model is closed."""

    def before_load(self) -> None:  # noqa: B027
        """Completes pending communication before other weights are loaded, so that its result does not replace them."""

    def drop(self) -> bool:
        """Waits for communication that was begun, and begins none. Returns True if work was left undone.

        Called instead of :meth:`before_step` when the model was garbage-collected.
        """
        return False
