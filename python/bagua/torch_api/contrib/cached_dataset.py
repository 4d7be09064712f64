"""A data set that computes each sample once."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

from torch.utils.data import Dataset, IterableDataset

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
        """Returns one index per sample: -1 and a tensor of one element share a cache entry with the plain index."""
        try:
            index = operator.index(item)
        except TypeError:
            return item
        return index + len(self) if index < 0 and hasattr(self.dataset, "__len__") else index
