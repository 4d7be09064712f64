"""Aggregates only some elements of each gradient: the k largest, k random ones, or a block of k. The rest waits its
turn.

Stich, Cordonnier and Jaggi, "Sparsified SGD with Memory", NeurIPS 2018: top-k and random-k with error feedback.

Each rank chooses on its own, so up to world size times k elements of a result are not zero. One all_gather per step
carries all choices as bytes: one flag per parameter (is there a gradient?), int64 positions, and values in the
parameters' dtypes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

import torch

from bagua.linalg import is_finite

from .aggregation import Denominator, divisor
from .backends import Group
from .error_feedback import CompressingAggregation, Gradients

Method = Literal["top_k", "random_k", "block"]

_AVERAGES = ("avg_world", "avg")
_CUSTOM = ("avg_custom", "custom_avg")


class SparsifiedAggregation(CompressingAggregation):
    """Aggregates sparsified gradients.

    ``k`` is the amount that a rank sends of each tensor: a float in (0, 1] is a fraction (at least one element), an int
    a count (at most all elements). ``method`` chooses the elements: ``"top_k"`` the largest in magnitude,
    ``"random_k"`` random ones, ``"block"`` consecutive ones at a random place. ``seed`` is the seed of the random
    choice, which differs between ranks and does not use other random number generators. ``error_feedback=False`` drops
    the elements that are not sent.

    ``op`` of the closure is ``"avg_world"``, ``"avg_custom"`` (see :class:`AllReduceAggregation`) or ``"sum"``. After
    each step with an average over the world, the mean of the ranks' memories plus the result equals the mean of
    gradients plus memories before it.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        use_cuda: bool = False,
        *,
        k: int | float = 0.01,
        method: Method = "top_k",
        error_feedback: bool = True,
        seed: int = 1,
        group: Group = None,
    ) -> None:
        super().__init__(model, use_cuda, group=group)
        if method not in ("top_k", "random_k", "block"):
            raise ValueError(f"method must be one of top_k, random_k, block; got {method!r}")
        if not 0 < k < math.inf or (isinstance(k, float) and k > 1.0):
            raise ValueError(f"k={k!r} is neither a fraction in (0, 1] nor a count of at least 1")
        self.k = k
        self.method = method
        self.error_feedback = error_feedback
        self.seed = seed
        self._generator: torch.Generator | None = None

    def count(self, index: int) -> int:
        """Returns the number of elements of a parameter that each rank sends."""
        numel = self.parameters[index].numel()
        if isinstance(self.k, float):
            return min(numel, max(1, math.ceil(self.k * numel)))
        return min(numel, self.k)

    def _check(self, op: str, denom: Denominator) -> None:
        if op in _CUSTOM:
            divisor(denom)
        elif op not in _AVERAGES and op != "sum":
            raise NotImplementedError(f"op must be one of {', '.join((*_AVERAGES, *_CUSTOM, 'sum'))}; got {op!r}")

    def _random(self) -> torch.Generator:
        if self._generator is None:
            # The prime keeps the generators of neighbouring ranks and seeds apart.
            self._generator = torch.Generator().manual_seed(self.seed * 1_000_003 + self._peers().rank)
        return self._generator

    def _choose(self, values: torch.Tensor, k: int) -> torch.Tensor:
        """Returns the choice from a flat tensor, as int64: the positions, or the start of the block."""
        size = values.numel()
        if self.method == "top_k":
            return torch.topk(values.abs(), k, sorted=False).indices.cpu()
        if self.method == "random_k":
            return torch.randperm(size, generator=self._random())[:k]
        blocks = -(-size // k) if k else 1
        # The last block ends with the tensor and may overlap the one before, so that every element has its turn.
        block = int(torch.randint(blocks, (1,), generator=self._random()).item())
        return torch.tensor([min(block * k, size - k)])

    def _positions(self, chosen: torch.Tensor, k: int) -> torch.Tensor:
        return torch.arange(k) + chosen if self.method == "block" else chosen

    def _combine(self, chosen: Sequence[int], gradients: Gradients, op: str, denom: Denominator) -> None:
        assert isinstance(gradients, list)
        peers = self._peers()
        present = torch.tensor([gradients[index] is not None for index in chosen], dtype=torch.uint8)
        sums, places, values = [], [], []
        for index in chosen:
            whole = self._with_memory(index, gradients[index]).reshape(-1)
            place = self._choose(whole, self.count(index))
            value = whole[self._positions(place, self.count(index)).to(whole.device)]
            if not is_finite(whole):
                # All ranks must see this, whichever elements were chosen.
                value = torch.full_like(value, math.nan)
            sums.append(whole)
            places.append(place)
            values.append(value.to("cpu", self.parameters[index].dtype))
        message = torch.cat([present, *map(_bytes, places), *map(_bytes, values)])
        device = peers.place(sums[0].device, self.use_cuda)
        everybody = peers.all_gather(message.to(device)).cpu()

        anywhere = everybody[:, : len(chosen)].any(dim=0).tolist()
        parting = {"sum": 1.0} | dict.fromkeys(_AVERAGES, float(peers.size))
        denominator = parting[op] if op in parting else divisor(denom)
        at_place, at_value = len(chosen), len(chosen) + sum(_size(place) for place in places)
        for number, index in enumerate(chosen):
            k, whole, parameter = self.count(index), sums[number], self.parameters[index]
            result = torch.zeros(whole.numel(), dtype=whole.dtype)
            for row in everybody:
                theirs = _values(row, at_place, places[number])
                # Positions of one rank are distinct, so additions happen in rank order.
                result.index_add_(
                    0, self._positions(theirs, k), _values(row, at_value, values[number]).to(result.dtype)
                )
            at_place += _size(places[number])
            at_value += _size(values[number])
            if not anywhere[number]:
                continue
            gradients[index] = (result / denominator).to(parameter.device, parameter.dtype).view(parameter.shape)
            # All ranks see an overflow and skip the step. The memory must not be lost in it.
            if self.error_feedback and is_finite(result):
                positions = self._positions(places[number], k).to(whole.device)
                sent = values[number].to(whole.device, whole.dtype)
                # Keep the rounding error of half precision, too.
                whole[positions] -= sent
                self.memories[index].copy_(whole.view(parameter.shape))

    def state_dict(self) -> dict[str, Any]:
        """Returns the memories and the state of the random generator."""
        generator = None if self._generator is None else self._generator.get_state()
        return super().state_dict() | {"generator": generator}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores the state that :meth:`state_dict` returned on this rank."""
        super().load_state_dict(state)
        self._generator = None
        if state["generator"] is not None:
            self._generator = torch.Generator()
            self._generator.set_state(state["generator"])


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


def _size(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _values(row: torch.Tensor, begin: int, like: torch.Tensor) -> torch.Tensor:
    """Returns the tensor whose bytes start at ``begin``, with the dtype and size of ``like``."""
    # The copy is aligned for every element type.
    return row[begin : begin + _size(like)].clone().view(like.dtype)
