"""Lightning under one of its two names, and a small model for it."""

from __future__ import annotations

import functools
import importlib
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

SAMPLES, FEATURES = 52, 12


class Kit:
    """The classes of a namespace."""

    def __init__(self, namespace: str) -> None:
        import bagua.lightning

        self.namespace = namespace
        self.pl = importlib.import_module("lightning.pytorch" if namespace == "lightning" else namespace)
        self.fabric = importlib.import_module("lightning.fabric" if namespace == "lightning" else "lightning_fabric")
        self.strategy, self.fabric_strategy = bagua.lightning.strategies(namespace)
        exceptions = importlib.import_module(f"{self.pl.__name__}.utilities.exceptions")
        self.misconfigured: type[Exception] = exceptions.MisconfigurationException
        self.model = make_model(self.pl.LightningModule)
        self.recorder = make_recorder(self.pl.Callback)

    def trainer(self, strategy: Any, folder: Path, **options: Any) -> Any:
        """A Trainer that is quiet."""
        warnings.filterwarnings("ignore")
        defaults = {
            "accelerator": "cpu",
            "devices": 2,
            "max_epochs": 1,
            "default_root_dir": str(folder),
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "num_sanity_val_steps": 0,
        }
        return self.pl.Trainer(strategy=strategy, **{**defaults, **options})

    def fit(self, strategy: Any, folder: Path, model: Any = None, **options: Any) -> tuple[Any, Any]:
        """Trains a model, and returns it with the trainer."""
        model = self.model() if model is None else model
        validated = options.pop("validated", False)
        trainer = self.trainer(strategy, folder, **options)
        trainer.fit(model, loader(), loader() if validated else None)
        return model, trainer


def loader(batch_size: int = 4) -> Any:
    """The same samples everywhere; the ranks' shares differ."""
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(SAMPLES, FEATURES, generator=generator)
    y = torch.randint(0, 3, (SAMPLES,), generator=generator)
    return DataLoader(TensorDataset(x, y), batch_size)


def weights(model: nn.Module) -> torch.Tensor:
    """All parameters as one vector of float64."""
    return torch.cat([value.detach().double().view(-1) for value in model.state_dict().values()])


@functools.cache
def make_model(base: Any) -> Any:
    """A LightningModule class of this base, which can be pickled."""

    class Model(base):  # type: ignore[misc]
        """Two layers, and one that may be left out."""

        def __init__(
            self,
            optimizer: str = "sgd",
            manual: bool = False,
            unused: bool = False,
            seed: int = 3,
            lr: float = 0.1,
            local_first: bool = False,
        ) -> None:
            super().__init__()
            torch.manual_seed(seed)
            self.network = nn.Sequential(nn.Linear(FEATURES, 17), nn.BatchNorm1d(17), nn.ReLU(), nn.Linear(17, 3))
            if unused:
                self.alone = nn.Linear(2, 2)
            self.automatic_optimization = not manual
            self.local_first = local_first
            self.optimizer, self.lr = optimizer, lr
            self.fail_at: int | None = None
            self.steps = 0

        def loss(self, batch: Any) -> torch.Tensor:
            """Cross entropy of a batch."""
            x, y = batch
            return nn.functional.cross_entropy(self.network(x.to(self.network[0].weight.dtype)), y)

        def training_step(self, batch: Any, index: int) -> Any:
            """One batch."""
            self.steps += 1
            if self.fail_at == index:
                raise FloatingPointError(f"batch {index}")
            loss = self.loss(batch)
            self.log("loss", loss, sync_dist=True)
            if self.automatic_optimization:
                return loss
            optimizer = self.optimizers()
            optimizer.zero_grad()
            if self.local_first:
                # Only the last pass communicates.
                with optimizer.toggle_model(sync_grad=False):
                    self.manual_backward(self.loss(batch))
            self.manual_backward(loss)
            total = sum(parameter.grad.sum() for parameter in self.parameters())
            self.log("gmin", total, sync_dist=True, reduce_fx="min")
            self.log("gmax", total, sync_dist=True, reduce_fx="max")
            # A second pass of the same step, as with several losses.
            self.manual_backward(self.loss(batch) * 0.5)
            optimizer.step()
            return None

        def validation_step(self, batch: Any, index: int) -> None:
            """The loss again."""
            self.log("val", self.loss(batch), sync_dist=True)

        def test_step(self, batch: Any, index: int) -> None:
            """The loss again."""
            self.log("test", self.loss(batch), sync_dist=True)

        def predict_step(self, batch: Any, index: int) -> Any:
            """The answers."""
            return self.network(batch[0]).argmax(1)

        def configure_optimizers(self) -> Any:
            """Returns the optimizer that the test asked for."""
            parameters = self.parameters()
            if self.optimizer == "adam":
                return torch.optim.Adam(parameters, lr=0.01)
            if self.optimizer == "qadam":
                from bagua.torch_api.algorithms.q_adam import QAdamOptimizer

                return QAdamOptimizer(parameters, lr=0.01, warmup_steps=3)
            if self.optimizer == "scheduled":
                made = torch.optim.SGD(parameters, lr=self.lr, momentum=0.9)
                return [made], [torch.optim.lr_scheduler.StepLR(made, 1)]
            return torch.optim.SGD(parameters, lr=self.lr, momentum=0.9 if self.optimizer == "momentum" else 0.0)

    Model.__qualname__ = f"Model_{base.__module__.partition('.')[0]}"
    return Model


def __getattr__(name: str) -> Any:
    if not name.startswith("Model_"):
        raise AttributeError(name)
    return Kit(name.removeprefix("Model_")).model


def make_recorder(base: Any) -> Any:
    """A callback that keeps what happened."""

    class Recorder(base):  # type: ignore[misc]
        """The steps, and a function's value at each batch's end."""

        def __init__(self, look: Any) -> None:
            self.look, self.found = look, []

        def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
            """Looks."""
            self.found.append(self.look(trainer, module))

    return Recorder
