"""A training script written for Horovod: handwritten digits, gradients in float16, two batches per step.

Only the import differs from a script for Horovod: ``import horovod.torch as hvd``.

torchrun --standalone --nproc-per-node 2 examples/horovod_digits.py
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler
from tqdm import tqdm

import bagua.horovod.torch as hvd


def digits() -> tuple[TensorDataset, TensorDataset]:
    """Loads 1797 images of 8 x 8 pixels: four fifths for training, the rest for testing, the same on every rank."""
    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16.0
    labels = torch.tensor(data.target, dtype=torch.int64)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    test, train = order.split([len(labels) // 5, len(labels) - len(labels) // 5])
    return TensorDataset(images[train], labels[train]), TensorDataset(images[test], labels[test])


def network() -> nn.Module:
    """One convolution and a classifier."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(16 * 4 * 4, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


def accuracy(model: nn.Module, test: TensorDataset) -> float:
    """Returns the fraction of right answers; each rank tests its share."""
    images, labels = (part[hvd.rank() :: hvd.size()] for part in test.tensors)
    model.eval()
    with torch.no_grad():
        right = torch.tensor([(model(images).argmax(1) == labels).sum(), len(labels)])
    model.train()
    right = hvd.allreduce(right, op=hvd.Sum, name="accuracy")
    return float(right[0] / right[1])


def draw(losses: list[float], path: Path) -> None:
    """Plots the loss of each step as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4))
    axes.plot(losses)
    axes.set(xlabel="step", ylabel="cross entropy, mean of the ranks", yscale="log", title="Handwritten digits")
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120, bbox_inches="tight")


def main() -> int:
    """Trains and tests. Returns 1 if the ranks' weights differ or the network has not learnt."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=16, help="images per rank and backward pass")
    parser.add_argument("--batches-per-allreduce", type=int, default=2, help="backward passes per step")
    parser.add_argument("--lr", type=float, default=0.0125, help="learning rate of one rank and one pass")
    parser.add_argument("--no-fp16-allreduce", action="store_true", help="send gradients as float32")
    parser.add_argument("--png", type=Path, default=Path("horovod_digits.png"), help="where to draw the loss")
    arguments = parser.parse_args()

    hvd.init()
    torch.manual_seed(hvd.rank())
    train, test = digits()
    passes = arguments.batches_per_allreduce
    sampler = DistributedSampler(train, num_replicas=hvd.size(), rank=hvd.rank())
    loader = DataLoader(train, arguments.batch_size * passes, sampler=sampler, drop_last=True)

    model = network()
    optimizer: torch.optim.Optimizer = torch.optim.SGD(
        model.parameters(), lr=arguments.lr * passes * hvd.size(), momentum=0.9, weight_decay=1e-4
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    optimizer = hvd.DistributedOptimizer(
        optimizer,
        named_parameters=model.named_parameters(),
        compression=hvd.Compression.none if arguments.no_fp16_allreduce else hvd.Compression.fp16,
        backward_passes_per_step=passes,
        op=hvd.Average,
    )
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, arguments.epochs)

    losses = []
    with tqdm(total=arguments.epochs * len(loader), unit="step", disable=hvd.rank() != 0) as bar:
        for epoch in range(arguments.epochs):
            sampler.set_epoch(epoch)
            for images, labels in loader:
                optimizer.zero_grad()
                total = 0.0
                for part, wanted in zip(images.chunk(passes), labels.chunk(passes), strict=True):
                    loss = nn.functional.cross_entropy(model(part), wanted) / passes
                    loss.backward()
                    total += loss.item()
                optimizer.step()
                losses.append(total)
                bar.update()
            schedule.step()
            bar.set_postfix(epoch=epoch + 1, loss=f"{total:.4f}")

    mean = hvd.allreduce(torch.tensor(losses), name="losses").tolist()
    right = accuracy(model, test)
    weights = torch.cat([parameter.detach().view(-1) for parameter in model.parameters()])
    equal = all(torch.equal(weights, row) for row in hvd.allgather(weights.unsqueeze(0)))
    if hvd.rank() == 0:
        draw(mean, arguments.png)
        print(f"test accuracy  {right:.4f} on {hvd.size()} rank(s)")
        print(f"loss           {mean[0]:.3f} at first, {mean[-1]:.3f} at the end, drawn in {arguments.png}")
        print(f"weights        {'equal on all ranks' if equal else 'DIFFER BETWEEN RANKS'}")
    hvd.shutdown()
    return 0 if equal and right > 0.8 else 1


if __name__ == "__main__":
    sys.exit(main())
