"""A data set that computes each sample once."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torch.utils.data import DataLoader, Dataset, IterableDataset

from ..env import get_local_rank, get_local_size, get_rank, get_world_size
from .cache_loader import CacheLoader

__all__ = ["CachedDataset"]


class CachedDataset(Dataset[Any]):
    """A map-style data set whose samples are cached by index.

    - ``dataset``: The data set to wrap. It must return the same sample for an index every time. Apply random
      augmentation after the cache; otherwise the first result is kept.
    - ``backend``, ``dataset_name``, ``writer_buffer_size``: As in :class:`CacheLoader`, which also takes the other
      keyword arguments.

    Works in DataLoader workers. A DataLoader reads a whole batch in one round trip. Raises the errors of
    :class:`CacheLoader`.
    """

    #: The loader that caches the samples.
    cache_loader: CacheLoader

    def __init__(
        self,
        dataset: Dataset[Any],
        backend: str = "redis",
        dataset_name: str = "",
        writer_buffer_size: int = 20,
        **kwargs: Any,
    ) -> None:
        if isinstance(dataset, IterableDataset):
            raise TypeError("an IterableDataset has no indices to cache its samples by")
        self.dataset = dataset
        self.cache_loader = CacheLoader(backend, dataset_name, writer_buffer_size, **kwargs)

    def __getitem__(self, item: Any) -> Any:
        return self.cache_loader.get(self._index(item), self.dataset.__getitem__)

    def __getitems__(self, indices: Sequence[Any]) -> list[Any]:
        """Returns the samples of a batch, read in one round trip per server. DataLoader calls this method."""
        many = getattr(self.dataset, "__getitems__", None)
        load = many if callable(many) else lambda missing: [self.dataset[index] for index in missing]
        return self.cache_loader._get_many([self._index(index) for index in indices], load)

    def __len__(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]

    def _index(self, item: Any) -> Any:
        """Returns one index per sample, so that -1 and a tensor of one element share a cache entry with the plain
        index.
        """
        try:
            index = operator.index(item)
        except TypeError:
            return item
        return index + len(self) if index < 0 and hasattr(self.dataset, "__len__") else index

    def warm_up(
        self,
        indices: Iterable[int] | None = None,
        *,
        batch_size: int = 64,
        num_workers: int = 0,
        progress: bool = True,
    ) -> int:
        """Computes and stores the samples that are not cached yet, and returns the number of samples computed.

        - ``indices``: Indices of the samples. By default the ranks that share the store divide all indices among them.
        - ``batch_size``: Number of samples per round trip.
        - ``num_workers``: Number of processes that compute samples; 0 computes them in this process.
        - ``progress``: Shows a progress bar if tqdm is installed.

        Does not wait for other ranks.
        """
        if indices is None:
            share, shares = {
                "job": (get_rank(), get_world_size()),
                "host": (get_local_rank(), get_local_size()),
                "process": (0, 1),
            }[self.cache_loader.store.shared_by]
            indices = range(share, len(self), shares)
        chosen = list(indices)
        before = self.cache_loader.stats()["misses"]
        batches = [chosen[start : start + batch_size] for start in range(0, len(chosen), batch_size)]
        # The workers return counts instead of samples, which only the store needs.
        loader: DataLoader[int] = DataLoader(
            _Touch(self), batch_sampler=batches, num_workers=num_workers, collate_fn=_first
        )
        with _bar(len(chosen), progress) as bar:
            for count in loader:
                bar(count)
        self.cache_loader.flush()
        return int(self.cache_loader.stats()["misses"] - before)

    def stats(self) -> dict[str, float]:
        """Returns :meth:`CacheLoader.stats`."""
        return self.cache_loader.stats()


class _Touch(Dataset[int]):
    """Reads batches into the cache and returns their sizes."""

    def __init__(self, dataset: CachedDataset) -> None:
        self._dataset = dataset

    def __getitem__(self, index: int) -> int:
        return len(self._dataset.__getitems__([index]))

    def __getitems__(self, indices: list[int]) -> list[int]:
        return [len(self._dataset.__getitems__(indices))]


def _first(counts: list[int]) -> int:
    return sum(counts)


@contextlib.contextmanager
def _bar(total: int, wanted: bool) -> Iterator[Any]:
    """Yields a function that advances a progress bar, or does nothing."""
    if wanted:
        try:
            from tqdm import tqdm
        except ImportError:
            pass
        else:
            with tqdm(total=total, desc="caching", unit="sample") as shown:
                yield shown.update
            return
    yield lambda count: None
