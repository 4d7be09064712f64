"""The ranks' votes: the weight and the flags that each rank sends with its gradients or weights.

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
from typing import Any

import torch

from ..bucket_memory import factor_for

_VOTE = struct.Struct("<dI")

#: Size of one rank's vote in bytes. The last bucket reserves this number of elements for each rank.
VOTE_BYTES = _VOTE.size

#: The flag of a rank that skips a step.
SKIP = "skip"

#: Number of flags that a user may name.
MOST_FLAGS = 16


class Votes:
    """The votes of all ranks on one model. Ranks vote only if the last bucket has room for the votes (:attr:`room`)."""

    def __init__(self, rank: int, size: int, names: Sequence[str] | None = None) -> None:
        self._rank, self._size = rank, size
        #: The names that the user gave the flags; None if the user named none.
        self.names = None if names is None else checked_names(names)
        self._all_names = (SKIP, *(self.names or ()))
        #: Flags that this rank has raised and not exchanged yet. A signal handler may add one between any two
        #: instructions, so every change of the set must be a single call.
        self.raised: set[str] = set()
        # The raised flags that this rank's last vote contains.
        self._sent: set[str] = set()
        #: The flags in the votes of the last exchange.
        self.flags: frozenset[str] = frozenset()
        #: True if this rank skips the next exchange.
        self.skips = False
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

    def raise_flag(self, name: str) -> None:
        """Puts a flag into the next vote. Raises ValueError for an unknown name."""
        if name not in (self.names or ()):
            known = f"they are {list(self.names)}" if self.names else "no flags were named"
            raise ValueError(f"unknown flag {name!r}: pass flags=[...] to the call that wraps the model; {known}")
        self.raised.add(name)

    def write(self, *, weight: float | None = None) -> None:
        """Writes this rank's vote before the bucket is sent. ``weight`` replaces :attr:`weight` in this exchange."""
        if self.room is None:
            return
        self._sent = self.raised.copy()
        raised = self._sent | {SKIP} if self.skips else self._sent
        weight = 0.0 if self.skips else self.weight if weight is None else weight
        self.skips = False
        # A rank alone would round for nothing.
        self.factor = weight if self._size > 1 or weight == 0 else 1.0
        vote = torch.zeros(self._size * VOTE_BYTES, dtype=torch.uint8)
        own = bytearray(_VOTE.pack(weight, sum(1 << self._all_names.index(name) for name in raised)))
        vote[self._rank * VOTE_BYTES :][:VOTE_BYTES] = torch.frombuffer(own, dtype=torch.uint8)
        self.room.copy_(vote)

    def scale(self, tensors: list[torch.Tensor]) -> None:
        """Multiplies this rank's tensors by its weight. With weight 0, they also lose what is not finite."""
        if self.factor == 0:
            torch._foreach_zero_(tensors)
        elif self.factor != 1:
            torch._foreach_mul_(tensors, self.factor)

    def read(self) -> float:
        """Reads all votes when the bucket was received. Returns the divisor of the sums; 0 if all ranks have skipped.

        Otherwise raises ValueError on all ranks if the weight of every rank is 0.
        """
        if self.room is None:
            return 1.0
        values = self.room.real if self.room.is_complex() else self.room
        votes = list(_VOTE.iter_unpack(values.cpu().to(torch.uint8).numpy().tobytes()))
        total = math.fsum(weight for weight, _ in votes)
        held = [{name for bit, name in enumerate(self._all_names) if flags >> bit & 1} for _, flags in votes]
        self.flags = frozenset().union(*held)
        self.raised.difference_update(self._sent)
        if total == 0 and all(SKIP in flags for flags in held):
            return 0.0
        if total == 0:
            raise ValueError(
                f"the weight of every rank is 0 ({self._size} ranks), so there is no average: set_weight() needs a "
                "positive weight on one rank"
            )
        return total if self._divides and self._size > 1 else 1.0


def divide(tensors: list[torch.Tensor], divisor: float) -> None:
    """Divides sums by the divisor of :meth:`Votes.read`. A divisor of 0 makes them zeros."""
    if divisor == 0 and tensors:
        torch._foreach_zero_(tensors)
    elif divisor != 1 and tensors:
        is_float32 = all(tensor.dtype is torch.float32 and not tensor.is_cuda for tensor in tensors)
        operand: Any = factor_for(divisor, torch.float32) if is_float32 else divisor
        torch._foreach_div_(tensors, operand)


def checked_names(names: Sequence[str]) -> tuple[str, ...]:
    """Returns the names of flags. Raises TypeError or ValueError if they cannot be used."""
    if isinstance(names, str) or not all(isinstance(name, str) for name in names):
        raise TypeError(f"flags must be a list of names, not {names!r}")
    if len(set(names)) < len(names) or len(names) > MOST_FLAGS or SKIP in names:
        raise ValueError(f"flags must be at most {MOST_FLAGS} different names other than {SKIP!r}, not {list(names)}")
    return tuple(names)
