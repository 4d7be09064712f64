"""Samplers that give all ranks samples of similar cost in each step, so that no rank waits for the slowest.

1. Sort the samples by complexity.
2. Cut the sorted list into chunks of one sample per rank: within a chunk, costs are similar.
3. Shuffle the chunks. In step i, each rank takes its sample of chunk i.

The method is that of the original Bagua. In addition, complexities are computed once, and every rank yields the same
number of batches in every case.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import Dataset, Sampler

from .. import env

__all__ = ["LoadBalancingDistributedBatchSampler", "LoadBalancingDistributedSampler"]


class LoadBalancingDistributedSampler(Sampler[int]):
    """Yields this rank's indices, one per step. In each step all ranks get samples of similar complexity.

    - ``dataset``: A map-style data set of constant size.
    - ``complexity_fn``: Returns the computational cost of a sample, an integer in any unit. Called once per sample. A
      fraction raises TypeError.
    - ``num_replicas``, ``rank``: Number of ranks that share the data set, and this rank. The defaults are those of
      torch.distributed if it is initialised, else WORLD_SIZE and RANK.
    - ``shuffle``: Shuffles the steps, and the distribution of samples of equal complexity. See ``random_level``.
    - ``seed``: Seed of the shuffling, equal on all ranks.
    - ``drop_last``: True leaves out the most complex samples that do not fill a step. False repeats the least complex
      ones to fill it. Either way, every rank gets the same number of indices.
    - ``random_level``: 0 gives the best balance and the same neighbours in every epoch; 1 is nearly random. Before
      sorting, a random integer up to this fraction of the range of complexities is added to each complexity.
    - ``complexities``: Known complexities in the order of the data set, such as :attr:`complexities` of another
      sampler. ``complexity_fn`` is not called then.

    Call :meth:`set_epoch` before each epoch to change the order.
    Raises ValueError for unusable arguments.
    """

    def __init__(
        self,
        dataset: Dataset[Any] | Sequence[Any],
        complexity_fn: Callable[[Any], int] | None,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        random_level: float = 0,
        *,
        complexities: Sequence[int] | np.ndarray[Any, Any] | torch.Tensor | None = None,
    ) -> None:
        together = dist.is_available() and dist.is_initialized()
        if num_replicas is None:
            num_replicas = dist.get_world_size() if together else env.get_world_size()
        if rank is None:
            rank = dist.get_rank() if together else env.get_rank()
        if num_replicas < 1:
            raise ValueError(f"num_replicas is {num_replicas}; it must be positive")
        if not 0 <= rank < num_replicas:
            raise ValueError(f"rank {rank} is not one of {num_replicas} replicas")
        if not 0 <= random_level <= 1:
            raise ValueError(f"random_level is {random_level}; it must be between 0 and 1")
        self.dataset = dataset
        self.num_replicas = num_replicas
        self.rank = rank
        self.shuffle = shuffle
        self.seed = seed
        self.drop_last = drop_last
        self.random_level = random_level
        self.epoch = 0
        length = len(dataset)  # type: ignore[arg-type]
        #: Number of indices that each rank yields in an epoch.
        self.num_samples = length // num_replicas if drop_last else math.ceil(length / num_replicas)
        #: Number of indices that all ranks together yield in an epoch.
        self.total_size = self.num_samples * num_replicas
        #: Complexity of each sample: int64 [samples], in the order of the data set.
        self.complexities = _complexities(dataset, length, complexity_fn, complexities)

    def chunks(self) -> list[list[int]]:
        """Returns one list per step of this epoch, with one index for each rank."""
        count = len(self.complexities)
        if self.num_samples == 0:
            return []
        draw = torch.Generator()
        draw.manual_seed(self.seed + self.epoch)
        costs = self.complexities
        if self.shuffle:
            reach = int((int(costs.max()) - int(costs.min())) * self.random_level + 1)
            costs = costs + torch.randint(reach, (count,), generator=draw).numpy()
        order = np.argsort(costs, kind="stable")
        # Repeats a small data set until the steps are full. With drop_last, total_size is smaller than count.
        steps = order[np.arange(self.total_size) % count].reshape(self.num_samples, self.num_replicas)
        if self.shuffle:
            steps = steps[torch.randperm(self.num_samples, generator=draw).numpy()]
        chosen: list[list[int]] = steps.tolist()
        return chosen

    def __iter__(self) -> Iterator[int]:
        return iter([step[self.rank] for step in self.chunks()])

    def __len__(self) -> int:
        """Returns the number of indices in an epoch."""
        return self.num_samples

    def set_epoch(self, epoch: int) -> None:
        """Chooses the epoch, which must be equal on all ranks. With ``shuffle``, each epoch has its own order."""
        self.epoch = epoch


class LoadBalancingDistributedBatchSampler(Sampler[list[int]]):
    """Yields batches of varying size, cut from another sampler's indices. Every rank yields the same number of batches.

    - ``sampler``: The sampler that yields the indices. Its own ``drop_last`` must be False.
    - ``batch_fn``: Takes the list of a rank's indices in an epoch and returns a list of batches. Every rank calls it
      for all ranks, so it must be deterministic.
    - ``drop_last``: True leaves out the last batches of ranks that have more than others. False repeats the first
      batches of ranks that have fewer.

    Raises ValueError if the sampler drops samples itself, or if a rank has no batch to repeat.
    """

    def __init__(
        self,
        sampler: LoadBalancingDistributedSampler,
        batch_fn: Callable[[list[int]], list[list[int]]],
        drop_last: bool = False,
    ) -> None:
        if not isinstance(sampler, LoadBalancingDistributedSampler):
            raise TypeError(f"sampler is a {type(sampler).__name__}, not a LoadBalancingDistributedSampler")
        if sampler.drop_last:
            raise ValueError("the sampler has drop_last=True: give drop_last to the batch sampler instead")
        self.sampler = sampler
        self.batch_fn = batch_fn
        self.drop_last = drop_last
        # Number and batches of the epoch that was cut last.
        self._known: tuple[int, list[list[int]]] | None = None

    def _batches(self) -> list[list[int]]:
        if self._known is None or self._known[0] != self.sampler.epoch:
            steps = self.sampler.chunks()
            by_rank = [
                [list(batch) for batch in self.batch_fn([step[rank] for step in steps])]
                for rank in range(self.sampler.num_replicas)
            ]
            counts = [len(batches) for batches in by_rank]
            total = min(counts) if self.drop_last else max(counts)
            if total and 0 in counts:
                raise ValueError(
                    f"batch_fn made {total} batches for one rank but none, which could be repeated, for rank "
                    f"{counts.index(0)}"
                )
            mine = by_rank[self.sampler.rank]
            self._known = self.sampler.epoch, [mine[number % len(mine)] for number in range(total)]
        return self._known[1]

    def __iter__(self) -> Iterator[list[int]]:
        return iter([list(batch) for batch in self._batches()])

    def __len__(self) -> int:
        """Returns the number of batches in an epoch, the same on every rank."""
        return len(self._batches())

    def set_epoch(self, epoch: int) -> None:
        """Like :meth:`LoadBalancingDistributedSampler.set_epoch`."""
        self.sampler.set_epoch(epoch)


def _complexities(
    dataset: Any, length: int, function: Callable[[Any], int] | None, known: Any
) -> np.ndarray[Any, np.dtype[np.int64]]:
    if known is not None:
        return _integers(known, length, "complexities")
    if function is None:
        raise ValueError("complexity_fn is None, and no complexities are given")
    found = [function(dataset[index]) for index in range(length)]
    for index, cost in enumerate(found):
        if int(cost) != cost:
            raise TypeError(f"complexity_fn returned {cost!r} for sample {index} instead of an integer")
    return _integers([int(cost) for cost in found], length, "what complexity_fn returned")


def _integers(values: Any, length: int, what: str) -> np.ndarray[Any, np.dtype[np.int64]]:
    found = np.asarray(values)
    if found.size == 0:
        found = found.astype(np.int64)
    if found.shape != (length,):
        raise ValueError(f"{what}: shape {found.shape} instead of ({length},), one integer per sample")
    if found.dtype.kind not in "iu":
        raise TypeError(f"{what}: {found.dtype} instead of integers")
    return found.astype(np.int64)
