"""Compressed all_reduce computed on one process with NumPy and the codecs: the ranks' results equal it bit for bit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

import bagua

Values = npt.NDArray[Any]

#: Codecs that send one record of the whole tensor.
ONE_SHOT = ("top_k", "random_k")


class CompressedAllReduce:
    """The members of one bucket over its steps. ``errors`` is None without error feedback, else float32 by member."""

    def __init__(
        self, name: str, options: dict[str, Any], members: int, ranks: int, average: bool, *, feedback: bool = False
    ) -> None:
        self.name = name
        # A codec that draws counts its calls, as each member's bucket counts its communications.
        self._codecs = [bagua.Codec(name, **options) for _ in range(members)]
        self.members = members
        self.divisor = ranks if average else 1
        self.feedback = feedback
        self.errors: list[Values] | None = None

    def step(self, inputs: Sequence[Values], padding: int = 0) -> Values:
        """The result of one communication, padding left out. ``inputs`` are the members' own elements."""
        count, dtype = len(inputs[0]), inputs[0].dtype
        if self.errors is None:
            self.errors = [np.zeros(count, np.float32) for _ in inputs]
        if self.members == 1:
            return inputs[0]
        after = [np.zeros(count, np.float32) for _ in inputs]
        given = list(inputs)
        if self.feedback:
            after = [x.astype(np.float32) + e for x, e in zip(inputs, self.errors, strict=True)]
            given = [x.astype(dtype) for x in after]
        total = count + padding
        if self.name not in ONE_SHOT:
            total += -total % self.members
        padded = [np.concatenate([x, np.zeros(total - count, dtype)]) for x in given]
        result = (self._one_shot if self.name in ONE_SHOT else self._two_shot)(padded, after, count)
        if self.feedback and np.isfinite(result[:count].astype(np.float32)).all():
            self.errors = after
        return result[:count]

    def _one_shot(self, padded: list[Values], after: list[Values], count: int) -> Values:
        decoded = []
        for codec, x, left in zip(self._codecs, padded, after, strict=True):
            decoded.append(codec.decode(codec.encode(x), np.empty_like(x)))
            left -= decoded[-1][:count].astype(np.float32)
        return self._mean(decoded)

    def _two_shot(self, padded: list[Values], after: list[Values], count: int) -> Values:
        chunk = len(padded[0]) // self.members
        decoded = []
        for codec, x, left in zip(self._codecs, padded, after, strict=True):
            data = codec.encode(x, chunks=self.members)
            decoded.append(codec.decode(data, np.empty_like(x), chunks=self.members))
            left -= decoded[-1][:count].astype(np.float32)
        mean = self._mean(decoded)
        result = np.empty_like(mean)
        for owner, codec in enumerate(self._codecs):
            part = slice(owner * chunk, (owner + 1) * chunk)
            own = np.ascontiguousarray(mean[part])
            result[part] = codec.decode(codec.encode(own), np.empty_like(own))
            carried = slice(part.start, min(part.stop, count))
            lost = mean[carried].astype(np.float32) - result[carried].astype(np.float32)
            after[owner][carried] += np.float32(self.divisor) * lost
        return result

    def _mean(self, decoded: list[Values]) -> Values:
        total = decoded[0].astype(np.float32)
        for x in decoded[1:]:
            total = total + x.astype(np.float32)
        return (total / np.float32(self.divisor)).astype(decoded[0].dtype)


class CompressedReduceScatter(CompressedAllReduce):
    """The reduce_scatter, in which every codec sends one record for each member's part."""

    def parts(self, inputs: Sequence[Values]) -> list[Values]:
        """The part of each member. What is not finite stays out of the errors of those who sent or got it."""
        if self.errors is None:
            self.errors = [np.zeros(len(x), np.float32) for x in inputs]
        after = [x.astype(np.float32) + e for x, e in zip(inputs, self.errors, strict=True)]
        decoded = []
        for codec, x, left in zip(self._codecs, inputs, after, strict=True):
            given = left.astype(x.dtype) if self.feedback else x
            decoded.append(codec.decode(codec.encode(given, chunks=self.members), given, chunks=self.members))
            left -= decoded[-1].astype(np.float32)
        parts = np.split(self._mean(decoded), self.members)
        if self.feedback:
            whole = [np.isfinite(x).all() and np.isfinite(part).all() for x, part in zip(after, parts, strict=True)]
            self.errors = [x if finite else e for x, e, finite in zip(after, self.errors, whole, strict=True)]
        return parts
