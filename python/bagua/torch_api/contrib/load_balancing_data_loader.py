"""Samplers that give all ranks samples of similar cost in each step, so that no rank waits for the slowest.

1. Sort the samples by complexity.
2. Cut the sorted list into chunks of one sample per rank: within a chunk, costs are similar.
3. Shuffle the chunks. In step i, each rank takes its sample of chunk i.

The method is that of the original Bagua. In addition, complexities are computed once and can be kept or shared, every
rank yields the same number of batches in every case, and an epoch can be resumed.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
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
    - ``complexities``: Known complexities in the order of the data set. ``complexity_fn`` is not called then.
    - ``complexity_cache``: Path of a file that keeps complexities between jobs. Written if it does not exist. Raises
      ValueError if it holds a different number of samples.
    - ``process_group``: Divides the computation of complexities among the ranks of this torch.distributed group; every
      rank must construct its sampler. By default each rank computes all of them.

    Call :meth:`set_epoch` before each epoch to change the order. :attr:`complexities` may be passed to another sampler.
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
        complexity_cache: str | os.PathLike[str] | None = None,
        process_group: dist.ProcessGroup | None = None,
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
        self._position = _Position()
        length = len(dataset)  # type: ignore[arg-type]
        #: Number of indices that each rank yields in an epoch.
        self.num_samples = length // num_replicas if drop_last else math.ceil(length / num_replicas)
        #: Number of indices that all ranks together yield in an epoch.
        self.total_size = self.num_samples * num_replicas
        #: Complexity of each sample: int64 [samples], in the order of the data set.
        self.complexities = _complexities(dataset, length, complexity_fn, complexities, complexity_cache, process_group)

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
        # Starts over as often as a small data set needs to fill the steps. With drop_last, total_size is smaller than
        # count.
        steps = order[np.arange(self.total_size) % count].reshape(self.num_samples, self.num_replicas)
        if self.shuffle:
            steps = steps[torch.randperm(self.num_samples, generator=draw).numpy()]
        chosen: list[list[int]] = steps.tolist()
        return chosen

    def __iter__(self) -> Iterator[int]:
        return self._position.walk([step[self.rank] for step in self.chunks()])

    def __len__(self) -> int:
        """Returns the number of indices in a whole epoch, also if the epoch was resumed."""
        return self.num_samples

    def set_epoch(self, epoch: int) -> None:
        """Chooses the epoch, which must be equal on all ranks. With ``shuffle``, each epoch has its own order.

        A call with the epoch of a loaded state keeps the position in that epoch.
        """
        if epoch != self.epoch:
            self._position = _Position()
        self.epoch = epoch

    def state_dict(self, consumed: int | None = None) -> dict[str, Any]:
        """Returns the position in this epoch, for :meth:`load_state_dict` of a sampler with the same arguments.

        ``consumed`` is the number of indices of this epoch that training has used. The default is the number taken from
        the sampler, which is larger if DataLoader workers fetch ahead.
        """
        return {"epoch": self.epoch, "position": self._position.state(consumed, self.num_samples), **self._identity()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Loads a position. The next iteration yields the rest of that epoch.

        Raises ValueError if the state's sampler had other arguments, and names them.
        """
        _check_identity(state, self._identity())
        self.epoch = int(state["epoch"])
        self._position = _Position(int(state["position"]))

    def _identity(self) -> dict[str, Any]:
        """Returns the arguments that determine the order. The rank is not one of them: all ranks are at the same
        step.
        """
        return {
            "length": len(self.complexities),
            "num_replicas": self.num_replicas,
            "shuffle": self.shuffle,
            "seed": self.seed,
            "drop_last": self.drop_last,
            "random_level": self.random_level,
        }


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
        self._position = _Position()
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
        return self._position.walk([list(batch) for batch in self._batches()])

    def __len__(self) -> int:
        """Returns the number of batches in a whole epoch, the same on every rank, also if the epoch was resumed."""
        return len(self._batches())

    def set_epoch(self, epoch: int) -> None:
        """Like :meth:`LoadBalancingDistributedSampler.set_epoch`."""
        if epoch != self.sampler.epoch:
            self._position = _Position()
        self.sampler.set_epoch(epoch)

    def state_dict(self, consumed: int | None = None) -> dict[str, Any]:
        """Like :meth:`LoadBalancingDistributedSampler.state_dict`, but counts batches."""
        position = self._position.state(consumed, len(self))
        return {"epoch": self.sampler.epoch, "position": position, **self._identity()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Like :meth:`LoadBalancingDistributedSampler.load_state_dict`."""
        _check_identity(state, self._identity())
        self.set_epoch(int(state["epoch"]))
        self._position = _Position(int(state["position"]))

    def _identity(self) -> dict[str, Any]:
        return {**self.sampler._identity(), "drop_last_batches": self.drop_last}


class _Position:
    """The position in one epoch, at which the next walk begins."""

    def __init__(self, start: int = 0) -> None:
        # Index at which the next walk begins. Only the first walk after a resume begins later than 0.
        self._start = start
        # Number of items given out, including those before the start.
        self._given = start

    def walk(self, items: Sequence[Any]) -> Iterator[Any]:
        self._given = self._start
        return self._steps(items)

    def _steps(self, items: Sequence[Any]) -> Iterator[Any]:
        # The first step consumes the start: a DataLoader with workers makes two iterators and uses the second.
        start, self._start = self._start, 0
        for place in range(start, len(items)):
            self._given = place + 1
            yield items[place]

    def state(self, consumed: int | None, total: int) -> int:
        if consumed is None:
            return self._given
        if not 0 <= consumed <= total:
            raise ValueError(f"consumed is {consumed}, but an epoch has {total}")
        return consumed


def _check_identity(state: dict[str, Any], own: dict[str, Any]) -> None:
    differing = [
        f"{name} {state.get(name)!r} instead of {value!r}" for name, value in own.items() if state.get(name) != value
    ]
    if differing:
        raise ValueError("the state belongs to another sampler: " + ", ".join(differing))


def _complexities(
    dataset: Any,
    length: int,
    function: Callable[[Any], int] | None,
    known: Any,
    cache: str | os.PathLike[str] | None,
    group: dist.ProcessGroup | None,
) -> np.ndarray[Any, np.dtype[np.int64]]:
    if known is not None:
        return _integers(known, length, "complexities")
    if cache is not None and _agreed(Path(cache).exists(), group):
        return _integers(np.load(cache, allow_pickle=False), length, f"the complexities in {cache}")
    if function is None:
        raise ValueError("complexity_fn is None, and neither complexities nor a complexity_cache with them is given")
    share, shares = (dist.get_rank(group), dist.get_world_size(group)) if group is not None else (0, 1)
    mine = [function(dataset[index]) for index in range(share, length, shares)]
    found = np.empty(length, dtype=np.int64)
    for index, cost in zip(range(share, length, shares), mine, strict=True):
        if int(cost) != cost:
            raise TypeError(f"complexity_fn returned {cost!r} for sample {index} instead of an integer")
    found[share::shares] = _integers([int(cost) for cost in mine], len(mine), "what complexity_fn returned")
    if group is not None:
        parts: list[Any] = [None] * shares
        dist.all_gather_object(parts, found[share::shares], group=group)
        for number, part in enumerate(parts):
            found[number::shares] = part
    if cache is not None and share == 0:
        # Renaming makes the file appear whole, so that another process never reads half of it.
        part_file = Path(f"{cache}.{os.getpid()}.part")
        with open(part_file, "wb") as file:
            np.save(file, found)
        part_file.replace(cache)
    return found


def _agreed(present: bool, group: dist.ProcessGroup | None) -> bool:
    """Returns True if the file exists on every rank of the group. Otherwise some ranks would wait for shares that the
    ranks with a file never send.
    """
    if group is None:
        return present
    everybody: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everybody, present, group=group)
    return all(everybody)


def _integers(values: Any, length: int, what: str) -> np.ndarray[Any, np.dtype[np.int64]]:
    found = np.asarray(values)
    if found.size == 0:
        found = found.astype(np.int64)
    if found.shape != (length,):
        raise ValueError(f"{what}: shape {found.shape} instead of ({length},), one integer per sample")
    if found.dtype.kind not in "iu":
        raise TypeError(f"{what}: {found.dtype} instead of integers")
    return found.astype(np.int64)
