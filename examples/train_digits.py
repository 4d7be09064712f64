"""Trains a small CNN on the handwritten digits that ship with scikit-learn, on all ranks that torchrun starts.

torchrun --standalone --nproc-per-node 2 examples/train_digits.py
torchrun --standalone --nproc-per-node 4 examples/train_digits.py --algorithm bytegrad --compression onebit
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import time
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler
from tqdm import tqdm

import bagua
import bagua.torch_api as bt
from bagua.torch_api.algorithms import Algorithm, AsyncModelAverageAlgorithmImpl, GlobalAlgorithmRegistry
from bagua.torch_api.algorithms.q_adam import QAdamOptimizer

#: Algorithms that leave ranks with different weights between exchanges, some also after an exchange.
APART = ("decentralized", "local_sgd", "diloco", "async")


def digits() -> tuple[TensorDataset, TensorDataset]:
    """Loads 1797 images of 8 x 8 pixels: four fifths for training, the rest for testing, the same on every rank."""
    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16.0
    labels = torch.tensor(data.target, dtype=torch.int64)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    test, train = order.split([len(labels) // 5, len(labels) - len(labels) // 5])
    return TensorDataset(images[train], labels[train]), TensorDataset(images[test], labels[test])


def network() -> nn.Module:
    """Two convolutions and a classifier, 120 thousand parameters."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1, bias=False),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1, bias=False),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * 4 * 4, 96),
        nn.ReLU(),
        nn.Linear(96, 10),
    )


def training(model: nn.Module, arguments: argparse.Namespace) -> tuple[torch.optim.Optimizer, Algorithm]:
    """Returns the optimizer and the algorithm that the options select.

    Sets `hierarchical=False`, so that the ranks of one host exchange encoded values and gossip with each other.
    """
    name = arguments.algorithm
    options: dict[str, object] = {}
    # With one bit per element, error feedback delays much of a gradient. A smaller rate compensates for that.
    lr = arguments.lr or (0.01 if arguments.compression == "onebit" else 2e-3 if name == "qadam" else 0.05)
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr, momentum=0.9, weight_decay=1e-4)
    if name == "qadam":
        optimizer = QAdamOptimizer(model.parameters(), lr, warmup_steps=30)
        options["q_adam_optimizer"] = optimizer
    if name == "async":
        # Average several times in each epoch of this small model. By default rounds are half a second apart.
        options["sync_interval_ms"], options["warmup_steps"] = 20, 20
    elif name not in ("gradient_allreduce", "powersgd"):
        options["hierarchical"] = False
    if name == "diloco":
        options["communication_interval"] = 10
    if arguments.compression is not None:
        codec = arguments.compression
        # Of each 4096 gradients, 205 are sent, which is about 5 %.
        sparse: dict[str, dict[str, Any]] = {"top_k": {"k": 0.05}, "top_k_chunks": {"k": 205, "chunk": 4096, "bits": 2}}
        options["compression"] = bagua.Codec("top_k", **sparse[codec]) if codec in sparse else codec
        # These codecs lose much in each step. Error feedback sends it later.
        if codec in ("onebit", "int4", "random_k", *sparse) and name in ("bytegrad", "local_sgd", "diloco"):
            options["error_feedback"] = True
    return optimizer, Algorithm.init(name, **options)


def accuracy(model: nn.Module, data: TensorDataset) -> float:
    """Returns the fraction of right answers; each rank counts its share."""
    images, labels = (part[bt.get_rank() :: bt.get_world_size()] for part in data.tensors)
    model.eval()
    with torch.no_grad():
        right = torch.tensor([(model(images).argmax(1) == labels).sum(), len(labels)])
    model.train()
    bt.allreduce_inplace(right)
    return float(right[0] / right[1])


def weights_are_equal(model: nn.Module) -> bool:
    """Compares a hash of every rank's parameters."""
    weights = hashlib.sha256()
    for parameter in model.parameters():
        weights.update(parameter.detach().contiguous().numpy().tobytes())
    mine = torch.frombuffer(bytearray(weights.digest()), dtype=torch.uint8)
    everybody = torch.empty(bt.get_world_size() * len(mine), dtype=torch.uint8)
    bt.allgather(mine, everybody)
    return bool((everybody.view(-1, len(mine)) == mine).all())


def mebibytes(count: float) -> str:
    """Formats a number of bytes for people."""
    return f"{count / 2**20:.1f} MiB"


def main() -> int:
    """Trains, tests, and reports. Returns 1 if the ranks' weights differ."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--batch", type=int, default=32, help="images per rank and step")
    parser.add_argument("--algorithm", default="gradient_allreduce", choices=GlobalAlgorithmRegistry)
    parser.add_argument("--lr", type=float, help="learning rate (default: one that fits the algorithm)")
    parser.add_argument("--compression", help="a codec, for the algorithms that take one")
    arguments = parser.parse_args()

    bt.init_process_group()
    rank, ranks = bt.get_rank(), bt.get_world_size()
    train, test = digits()
    # A different seed on each rank: with_bagua makes the weights equal.
    torch.manual_seed(rank)
    model = network()
    optimizer, algorithm = training(model, arguments)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, arguments.epochs)
    bt.with_bagua(model, [optimizer], algorithm)

    sampler = DistributedSampler(train, ranks, rank, drop_last=True)
    loader = DataLoader(train, arguments.batch, sampler=sampler, drop_last=True)
    seen, started = 0, time.perf_counter()
    with tqdm(total=arguments.epochs * len(loader), unit="step", disable=rank != 0) as bar:
        for epoch in range(arguments.epochs):
            sampler.set_epoch(epoch)
            for images, labels in loader:
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(model(images), labels)
                loss.backward()
                optimizer.step()
                seen += len(labels) * ranks
                bar.update()
            schedule.step()
            bar.set_postfix(epoch=epoch + 1, loss=f"{loss.item():.4f}")
    seconds = time.perf_counter() - started

    if arguments.algorithm == "async":
        # The ranks made their last steps at different times. One more round makes their weights equal.
        asynchronous = bt.algorithm_of(model, AsyncModelAverageAlgorithmImpl)
        asynchronous.synchronize(model)
        asynchronous.abort(model)
    equal, apart = weights_are_equal(model), arguments.algorithm.endswith(APART)
    right = accuracy(model, test)
    stats = bagua.stats()["groups"]["world"]
    if rank == 0:
        operations = stats["ops"].values()
        payload = sum(operation["payload_bytes"] for operation in operations)
        wire = sum(operation["wire_bytes_sent"] + operation["wire_bytes_received"] for operation in operations)
        transports = sorted(set(stats["transports"].values()))
        print(f"test accuracy    {right:.4f}")
        print(f"throughput       {seen / seconds:.0f} images/s over {ranks} rank(s)")
        print(f"transport        {stats['collective']} ({', '.join(transports)})")
        print(f"payload          {mebibytes(payload)} on rank 0")
        shared = "shared memory: nothing crosses a socket"
        print(f"on the wire      {f'{mebibytes(wire)} on rank 0' if wire else shared}")
        differ = "differ between ranks, as this algorithm's may" if apart else "DIFFER BETWEEN RANKS"
        print(f"weights          {'bitwise equal on all ranks' if equal else differ}")
    bt.destroy_process_group()
    return 0 if equal or apart else 1


if __name__ == "__main__":
    sys.exit(main())
