"""Lightning with the strategy "bagua": handwritten digits on two processes of this machine's CPU.

python examples/lightning_digits.py
python examples/lightning_digits.py --algorithm bytegrad
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from lightning import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import TQDMProgressBar
from lightning.pytorch.loggers import CSVLogger
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from bagua.lightning import BaguaStrategy


def digits() -> tuple[TensorDataset, TensorDataset]:
    """Loads 1797 images of 8 x 8 pixels: four fifths for training, the rest for testing, the same on every rank."""
    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16.0
    labels = torch.tensor(data.target, dtype=torch.int64)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    test, train = order.split([len(labels) // 5, len(labels) - len(labels) // 5])
    return TensorDataset(images[train], labels[train]), TensorDataset(images[test], labels[test])


class Digits(LightningModule):
    """One convolution and a classifier. Nothing in this class is specific to Bagua."""

    def __init__(self, lr: float) -> None:
        super().__init__()
        self.lr = lr
        self.network = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(16 * 4 * 4, 64),
            nn.ReLU(),
            nn.Linear(64, 10),
        )

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        """Returns the loss of a batch."""
        images, labels = batch
        loss = nn.functional.cross_entropy(self.network(images), labels)
        self.log("loss", loss, prog_bar=True, sync_dist=True)
        return loss

    def test_step(self, batch: Any, index: int) -> None:
        """Logs the fraction of right answers."""
        images, labels = batch
        self.log("accuracy", (self.network(images).argmax(1) == labels).float().mean(), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Returns plain SGD with momentum."""
        return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)


class Losses(Callback):
    """Keeps the loss of each step, the mean of all ranks."""

    def __init__(self) -> None:
        self.found: list[float] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, index: int) -> None:
        """Appends the loss of this step."""
        self.found.append(float(trainer.callback_metrics["loss"]))


def draw(losses: list[float], path: Path) -> None:
    """Plots the loss of each step as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4))
    axes.plot(losses)
    axes.set(xlabel="step", ylabel="cross entropy, mean of the ranks", yscale="log", title="Lightning on Bagua")
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120, bbox_inches="tight")


def main() -> int:
    """Trains and tests. Returns 1 if the network has not learnt."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--algorithm", default="gradient_allreduce", help="gradient_allreduce, bytegrad, powersgd, ...")
    parser.add_argument("--devices", type=int, default=2, help="processes on this machine")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=32, help="images per rank and step")
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--png", type=Path, default=Path("lightning_digits.png"), help="where to draw the loss")
    arguments = parser.parse_args()

    seed_everything(0)
    train, test = digits()
    losses = Losses()
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            accelerator="cpu",
            devices=arguments.devices,
            # strategy="bagua" would do the same with gradient_allreduce.
            strategy=BaguaStrategy(arguments.algorithm),
            max_epochs=arguments.epochs,
            callbacks=[losses, TQDMProgressBar()],
            logger=CSVLogger(folder),
            enable_checkpointing=False,
        )
        # Lightning starts this script again for the other ranks.
        trainer.fit(Digits(arguments.lr), DataLoader(train, arguments.batch_size, shuffle=True, drop_last=True))
        (found,) = trainer.test(trainer.lightning_module, DataLoader(test, arguments.batch_size), verbose=False)
        if trainer.is_global_zero:
            draw(losses.found, arguments.png)
            print(f"test accuracy  {found['accuracy']:.4f} on {trainer.world_size} rank(s)")
            print(f"loss           {losses.found[0]:.3f} at first, {losses.found[-1]:.3f} at the end")
            print(f"drawn in {arguments.png}")
    return 0 if found["accuracy"] > 0.8 else 1


if __name__ == "__main__":
    sys.exit(main())
