"""Caches samples that are slow to prepare, and balances batches of very different lengths.

    python examples/cached_dataset.py                                      one process
    torchrun --standalone --nproc-per-node 2 examples/cached_dataset.py    two ranks that share one cache

In the first epoch each sample is prepared once in the whole job. The second epoch reads all samples from the cache. If
redis-server is installed, the job starts and ends its own server; otherwise each process caches in its own memory.
"""

from __future__ import annotations

import argparse
import shutil
import time
from collections.abc import Callable

import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset

import bagua.torch_api as bagua
from bagua.torch_api.contrib import (
    CachedDataset,
    LoadBalancingDistributedBatchSampler,
    LoadBalancingDistributedSampler,
)


class Sentences(Dataset[tuple[torch.Tensor, int]]):
    """Sequences of very different lengths that take a while to prepare."""

    def __init__(self, length: int, cost_s: float) -> None:
        lengths = torch.empty(length).log_normal_(3.0, 0.8, generator=torch.Generator().manual_seed(0))
        self.lengths = lengths.long().clamp(4, 400).tolist()
        self.cost_s = cost_s
        self.prepared = 0

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        self.prepared += 1
        time.sleep(self.cost_s)  # decoding, resampling, tokenising
        draw = torch.Generator().manual_seed(index)
        return torch.randn(self.lengths[index], 8, generator=draw), index % 2


def batches_of(tokens: int, lengths: list[int]) -> Callable[[list[int]], list[list[int]]]:
    """Cuts indices into batches with at most a given number of tokens."""

    def cut(indices: list[int]) -> list[list[int]]:
        batches: list[list[int]] = []
        filled = tokens + 1
        for index in indices:
            filled += lengths[index]
            if filled > tokens:
                batches.append([])
                filled = lengths[index]
            batches[-1].append(index)
        return batches

    return cut


def collate(samples: list[tuple[torch.Tensor, int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Pads the sequences of a batch."""
    sequences, labels = zip(*samples, strict=True)
    return pad_sequence(list(sequences), batch_first=True), torch.tensor(labels)


def main() -> None:
    """Runs two epochs, and prints the time of each and how many samples were prepared."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=400)
    parser.add_argument("--cost-ms", type=float, default=5.0)
    chosen = parser.parse_args()
    bagua.init_process_group()
    inner = Sentences(chosen.samples, chosen.cost_ms / 1000)
    backend = "memory" if shutil.which("redis-server") is None else "redis"
    dataset = CachedDataset(inner, backend, "sentences", capacity_per_node=1 << 28)
    # The lengths are known, so no sample has to be prepared to measure it.
    sampler = LoadBalancingDistributedSampler(dataset, None, complexities=inner.lengths)
    batches = LoadBalancingDistributedBatchSampler(sampler, batches_of(2000, inner.lengths))
    model = torch.nn.Linear(8, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model = bagua.with_bagua(model, [optimizer], "gradient_allreduce")
    for epoch in range(2):
        batches.set_epoch(epoch)
        begun = time.perf_counter()
        for sequences, labels in DataLoader(dataset, batch_sampler=batches, collate_fn=collate):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(sequences).mean(1), labels).backward()
            optimizer.step()
        dataset.cache_loader.flush()
        bagua.barrier()
        print(
            f"rank {bagua.get_rank()} epoch {epoch}: {len(batches)} batches in {time.perf_counter() - begun:.2f} s,"
            f" so far {inner.prepared} samples prepared"
        )
    bagua.barrier()
    dataset.cache_loader.close()
    bagua.destroy_process_group()


if __name__ == "__main__":
    main()
