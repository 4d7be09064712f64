"""Ray Train on the backend "bagua": handwritten digits on two workers that Ray starts.

The training does not use Bagua directly: `TorchConfig` names the backend, and Ray does the rest.

python examples/ray_digits.py
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

import ray
import ray.train
import ray.train.torch
import torch
import torch.distributed as dist
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from tqdm import tqdm


def digits() -> tuple[TensorDataset, TensorDataset]:
    """Loads 1797 images of 8 x 8 pixels: four fifths for training, the rest for testing, the same on every worker."""
    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32).flatten(1) / 16.0
    labels = torch.tensor(data.target, dtype=torch.int64)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    test, train = order.split([len(labels) // 5, len(labels) - len(labels) // 5])
    return TensorDataset(images[train], labels[train]), TensorDataset(images[test], labels[test])


def train_loop(config: dict[str, Any]) -> None:
    """Trains on one worker."""
    torch.manual_seed(0)
    train, test = digits()
    model = ray.train.torch.prepare_model(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)))
    loader = ray.train.torch.prepare_data_loader(DataLoader(train, config["batch_size"], shuffle=True, drop_last=True))
    optimizer = torch.optim.SGD(model.parameters(), lr=config["lr"], momentum=0.9)
    rank = ray.train.get_context().get_world_rank()
    drawn: list[float] = []
    for epoch in range(config["epochs"]):
        if ray.train.get_context().get_world_size() > 1:
            loader.sampler.set_epoch(epoch)
        losses: list[float] = []
        for images, labels in tqdm(loader, desc=f"epoch {epoch + 1}", unit="step", disable=rank != 0):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
        mean = torch.tensor(losses)
        dist.all_reduce(mean, dist.ReduceOp.AVG)
        images, labels = test.tensors
        with torch.no_grad():
            accuracy = float((model(images).argmax(1) == labels).float().mean())
        weights = torch.cat([parameter.detach().view(-1) for parameter in model.parameters()])
        first = weights.clone()
        dist.broadcast(first, 0)
        differ = torch.tensor([int(not torch.equal(weights, first))])
        dist.all_reduce(differ, dist.ReduceOp.MAX)
        if rank == 0:
            drawn += mean.tolist()
            draw(drawn, Path(config["png"]))
        found = {
            "backend": dist.get_backend(),
            "workers": dist.get_world_size(),
            "loss": float(mean[-1]),
            "accuracy": accuracy,
            "equal": not differ.item(),
        }
        with tempfile.TemporaryDirectory() as folder:
            checkpoint = None
            if rank == 0:
                torch.save(model.state_dict(), Path(folder, "model.pt"))
                checkpoint = ray.train.Checkpoint.from_directory(folder)
            ray.train.report(found, checkpoint=checkpoint)


def draw(losses: list[float], path: Path) -> None:
    """Plots the loss of each step as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4))
    axes.plot(losses)
    axes.set(xlabel="step", ylabel="cross entropy, mean of the workers", yscale="log", title="Ray Train on Bagua")
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120, bbox_inches="tight")
    pyplot.close(figure)


def main() -> int:
    """Trains and tests. Returns 1 if the workers' weights differ or the network has not learnt."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--batch-size", type=int, default=32, help="images per worker and step")
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--backend", default="bagua", help="a backend of torch.distributed")
    parser.add_argument("--png", type=Path, default=Path("ray_digits.png"), help="where to draw the loss")
    arguments = parser.parse_args()

    ray.init(num_cpus=arguments.workers + 1)
    with tempfile.TemporaryDirectory() as storage:
        result = TorchTrainer(
            train_loop,
            train_loop_config={
                "epochs": arguments.epochs,
                "batch_size": arguments.batch_size,
                "lr": arguments.lr,
                "png": str(arguments.png.resolve()),
            },
            torch_config=TorchConfig(backend=arguments.backend),
            scaling_config=ScalingConfig(num_workers=arguments.workers),
            run_config=RunConfig(storage_path=storage),
        ).fit()
    ray.shutdown()
    found = result.metrics
    print(f"{found['workers']} workers on {found['backend']}: test accuracy {found['accuracy']:.4f}")
    print(f"loss {found['loss']:.4f} at the end, drawn in {arguments.png}")
    print(f"weights {'equal on all workers' if found['equal'] else 'DIFFER BETWEEN WORKERS'}")
    return 0 if found["equal"] and found["accuracy"] > 0.8 else 1


if __name__ == "__main__":
    sys.exit(main())
