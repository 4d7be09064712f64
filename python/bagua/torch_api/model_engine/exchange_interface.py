"""Which tensors of a model are communicated, and when: the interface between a wrapped model and its algorithm."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch

from ..bucket import BaguaBucket
from ..tensor import Getter

#: Names and parameters of a model.
Parameters = Sequence[tuple[str, torch.nn.Parameter]]


def always(tensor: torch.Tensor) -> Getter:
    """A getter that answers with one tensor."""
    return lambda _: tensor


class Exchange(ABC):
    """The tensors of one model that are communicated. An algorithm makes it; see ``gradients`` and ``weights``.

    Every call but :meth:`register` does nothing unless it is replaced.
    """

    #: Other ranks wait for the gradients of every backward: one that never comes is an error on this rank.
    needs_gradients = False

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
