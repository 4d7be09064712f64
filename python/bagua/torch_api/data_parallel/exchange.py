"""What of a model travels between its ranks, and when: the calls that a wrapped model makes to it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from ..bucket import BaguaBucket


class Exchange(Protocol):
    """The tensors of one model that are communicated. An algorithm makes it; see ``gradients`` and ``weights``."""

    #: Other ranks wait for the gradients of every backward: one that never comes is an error on this rank.
    needs_gradients: bool

    def register(self) -> list[torch.Tensor]:
        """The tensors to communicate as Bagua tensors, in the order in which they become ready."""

    def bind(self, buckets: Sequence[BaguaBucket]) -> None:
        """Takes over what the buckets made of the tensors; called when they are registered with the engine."""

    def begin(self) -> None:
        """A step that communicates begins: its first training forward is about to run."""

    def accumulated(self, name: str) -> None:
        """A gradient that ``no_sync`` keeps on this rank."""

    def arrived(self, name: str, param: torch.nn.Parameter) -> None:
        """A gradient has its final local value."""

    def finish(self) -> None:
        """The backward is done; its caller may use the gradients as soon as this returns."""

    def abandon(self) -> None:
        """Forgets a backward that never came to its end."""
