"""The ranks' votes: what each rank says beside its gradients or weights in an exchange.

A vote has the weight of the rank's tensors and its flags. The last bucket of a model has room for the votes of all
ranks behind its tensors. Each rank writes its own vote, and zeros for the other ranks. When the ranks have added up
the bucket, each of them has all votes, without a collective for them. One element of the bucket has one byte of a vote,
because every element type represents the integers from 0 to 255 exactly.

Each rank multiplies its tensors by its weight before the exchange. Afterwards, all ranks divide by the sum of weights.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence

import torch

_VOTE = struct.Struct("<dI")

#: Bytes of a vote, and elements per rank in the last bucket.
VOTE_BYTES = _VOTE.size


class Votes:
    """The votes on one model. Without :attr:`room` there are none, and averages are those of the algorithm."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size
        #: The part of the last bucket that has the votes; None until the ranks use votes.
        self.room: torch.Tensor | None = None
        #: This rank's weight from the next exchange on.
        self.weight = 1.0
        #: The factor of this rank's tensors in this exchange.
        self.factor = 1.0
        # False if the algorithm adds up and does not average.
        self._divides = True

    def use(self, room: torch.Tensor, divides: bool) -> None:
        """Exchanges votes from now on, in this part of the last bucket."""
        self.room, self._divides = room, divides

    def write(self, *, weight: float | None = None) -> None:
        """Writes this rank's vote before the bucket is sent. ``weight`` replaces :attr:`weight` in this exchange."""
        if self.room is None:
            return
        weight = self.weight if weight is None else weight
        # A rank alone would round for nothing.
        self.factor = weight if self._size > 1 or weight == 0 else 1.0
        vote = torch.zeros(self._size * VOTE_BYTES, dtype=torch.uint8)
        own = bytearray(_VOTE.pack(weight, 0))
        vote[self._rank * VOTE_BYTES :][:VOTE_BYTES] = torch.frombuffer(own, dtype=torch.uint8)
        self.room.copy_(vote)

    def scale(self, tensors: Sequence[torch.Tensor]) -> None:
        """Multiplies this rank's tensors by its weight. With weight 0, they also lose what is not finite."""
        if self.factor == 0:
            torch._foreach_zero_(tensors)
        elif self.factor != 1:
            torch._foreach_mul_(tensors, self.factor)

    def read(self) -> float:
        """Reads all votes when the bucket was received. Returns the divisor of the sums.

        Raises ValueError on all ranks if the weight of every rank is 0.
        """
        if self.room is None:
            return 1.0
        values = self.room.real if self.room.is_complex() else self.room
        votes = list(_VOTE.iter_unpack(values.cpu().to(torch.uint8).numpy().tobytes()))
        total = math.fsum(weight for weight, _ in votes)
        if total == 0:
            raise ValueError(
                f"the weight of every rank is 0 ({self._size} ranks), so there is no average: set_weight() needs a "
                "positive weight on one rank"
            )
        return total if self._divides and self._size > 1 else 1.0


def divide(tensors: Sequence[torch.Tensor], divisor: float) -> None:
    """Divides sums by the divisor of :meth:`Votes.read`."""
    if divisor != 1 and tensors:
        torch._foreach_div_(tensors, divisor)
