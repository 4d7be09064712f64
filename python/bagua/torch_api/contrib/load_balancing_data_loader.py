"""Samplers that give all ranks samples of similar cost at each step, so that no rank waits for the longest.

Samples are sorted by their complexity and cut into chunks of one sample per rank: the ranks hold neighbours in that
order at every step. The order of chunks is shuffled. This is the original's method; what it did not have is that the
complexities are computed once and may be kept or shared, that every rank yields equally many batches in every case,
and that an epoch can be resumed.
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
    """The indices of this rank, one per step, with similar complexity on all ranks at each step.

    Args:
        dataset: A map-style data set of constant size.
        complexity_fn: The computational cost of a sample, an integer; called once per sample. TypeError for a fraction.
        num_replicas, rank: How many ranks share the data set, and which this is. By default those of
            torch.distributed where it is initialised, else WORLD_SIZE and RANK.
        shuffle: Shuffles the steps, and which of equally complex samples goes where; see ``random_level``.
        seed: Of the shuffling; equal on all ranks.
        drop_last: The samples that do not fill a step, the most complex ones, are left out. Otherwise the least
            complex ones are repeated to fill it. The number of indices is the same on every rank either way.
        random_level: From 0, the best balance and the same neighbours in every epoch, to 1, nearly random: before
            sorting, each complexity is raised by a random integer up to this part of their range.
        complexities: The complexities in the order of the data set, if they are known; ``complexity_fn`` is not
            called then.
        complexity_cache: A file that keeps them between jobs, written when it is not there. It is refused if its
            number of samples is another.
        process_group: The ranks of this group compute a share each and gather them: every rank must construct its
            sampler. By default each rank computes all of them.

    :attr:`complexities` may be handed to another sampler. ValueError for arguments that cannot be used.

    ``set_epoch`` must be called before each epoch for another order.
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
        #: Indices that each rank yields in an epoch.
        self.num_samples = length // num_replicas if drop_last else math.ceil(length / num_replicas)
        #: Indices that all ranks yield together.
        self.total_size = self.num_samples * num_replicas
        #: Complexity of each sample, int64, in the order of the data set.
        self.complexities = _complexities(dataset, length, complexity_fn, complexities, complexity_cache, process_group)

    def chunks(self) -> list[list[int]]:
        """One list per step of this epoch, with one index for each rank."""
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
        # Around to the beginning, as often as a small data set needs it; or cut off, with drop_last.
        steps = order[np.arange(self.total_size) % count].reshape(self.num_samples, self.num_replicas)
        if self.shuffle:
            steps = steps[torch.randperm(self.num_samples, generator=draw).numpy()]
        chosen: list[list[int]] = steps.tolist()
        return chosen

    def __iter__(self) -> Iterator[int]:
        return self._position.walk([step[self.rank] for step in self.chunks()])

    def __len__(self) -> int:
        """Indices of a whole epoch, also when one is resumed."""
        return self.num_samples

    def set_epoch(self, epoch: int) -> None:
        """Chooses the epoch, and with it the order when ``shuffle`` is set. Equal on all ranks.

        Calling it with the epoch of a loaded state keeps the position in it.
        """
        if epoch != self.epoch:
            self._position = _Position()
        self.epoch = epoch

    def state_dict(self, consumed: int | None = None) -> dict[str, Any]:
        """The position in this epoch, for :meth:`load_state_dict` on a sampler with the same arguments.

        ``consumed`` is how many of this epoch's indices training has used. Without it, how many were taken from the
        sampler: more than were used, if DataLoader workers fetch ahead.
        """
        return {"epoch": self.epoch, "position": self._position.state(consumed, self.num_samples), **self._identity()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The next iteration yields the rest of that epoch. ValueError names arguments that differ."""
        _check_identity(state, self._identity())
        self.epoch = int(state["epoch"])
        self._position = _Position(int(state["position"]))

    def _identity(self) -> dict[str, Any]:
        """What must be equal for a position to mean the same. Not the rank: all of them are at the same step."""
        return {
            "length": len(self.complexities),
            "num_replicas": self.num_replicas,
            "shuffle": self.shuffle,
            "seed": self.seed,
            "drop_last": self.drop_last,
            "random_level": self.random_level,
        }


class LoadBalancingDistributedBatchSampler(Sampler[list[int]]):
    """Batches of varying size, cut by ``batch_fn`` from another sampler's indices, equally many on every rank.

    Args:
        sampler: Whose indices are cut; its own ``drop_last`` must be False.
        batch_fn: From the list of a rank's indices in an epoch to its list of batches. Every rank runs it for all
            ranks, so it must be deterministic.
        drop_last: Ranks with more batches than others leave out their last ones. Otherwise ranks with fewer repeat
            their first ones.

    ValueError for a sampler that drops samples itself, and when a rank has no batch that could be repeated.
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
        # Of one epoch, by its number.
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
                    f"batch_fn made no batch for rank {counts.index(0)} and {total} for another: none can be repeated"
                )
            mine = by_rank[self.sampler.rank]
            # Around to the first ones as often as needed; or cut off.
            self._known = self.sampler.epoch, [mine[number % len(mine)] for number in range(total)]
        return self._known[1]

    def __iter__(self) -> Iterator[list[int]]:
        return self._position.walk([list(batch) for batch in self._batches()])

    def __len__(self) -> int:
        """Batches of a whole epoch, also when one is resumed; the same on every rank."""
        return len(self._batches())

    def set_epoch(self, epoch: int) -> None:
        """As :meth:`LoadBalancingDistributedSampler.set_epoch`."""
        if epoch != self.sampler.epoch:
            self._position = _Position()
        self.sampler.set_epoch(epoch)

    def state_dict(self, consumed: int | None = None) -> dict[str, Any]:
        """As :meth:`LoadBalancingDistributedSampler.state_dict`, in batches."""
        position = self._position.state(consumed, len(self))
        return {"epoch": self.sampler.epoch, "position": position, **self._identity()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """As :meth:`LoadBalancingDistributedSampler.load_state_dict`."""
        _check_identity(state, self._identity())
        self.set_epoch(int(state["epoch"]))
        self._position = _Position(int(state["position"]))

    def _identity(self) -> dict[str, Any]:
        return {**self.sampler._identity(), "drop_last_batches": self.drop_last}


class _Position:
    """How far one epoch has come; the next walk begins there."""

    def __init__(self, start: int = 0) -> None:
        # Where the next walk begins: only the first one after a resume begins later.
        self._start = start
        # How many were given out, those before the start included.
        self._given = start

    def walk(self, items: Sequence[Any]) -> Iterator[Any]:
        self._given = self._start
        return self._steps(items)

    def _steps(self, items: Sequence[Any]) -> Iterator[Any]:
        # The start is taken with the first step: a DataLoader with workers makes two iterators, and uses the second.
        start, self._start = self._start, 0
        for place in range(start, len(items)):
            self._given = place + 1
            yield items[place]

    def state(self, consumed: int | None, total: int) -> int:
        if consumed is None:
            return self._given
        if not 0 <= consumed <= total:
            raise ValueError(f"consumed is {consumed}, and an epoch has {total}")
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
        # In one step, so that another process never reads half of it.
        part_file = Path(f"{cache}.{os.getpid()}.part")
        with open(part_file, "wb") as file:
            np.save(file, found)
        part_file.replace(cache)
    return found


def _agreed(present: bool, group: dist.ProcessGroup | None) -> bool:
    """Whether every rank of the group has it: otherwise some would wait for the others' shares for ever."""
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
