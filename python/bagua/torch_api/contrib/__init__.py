"""What training needs beside communication: cached samples and balanced batches."""

from .cache_loader import CacheLoader
from .cached_dataset import CachedDataset
from .load_balancing_data_loader import LoadBalancingDistributedBatchSampler, LoadBalancingDistributedSampler

__all__ = [
    "CacheLoader",
    "CachedDataset",
    "LoadBalancingDistributedBatchSampler",
    "LoadBalancingDistributedSampler",
]
