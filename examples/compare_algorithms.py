"""Trains one model with several algorithms, and prints loss, accuracy, speed and bytes of each.

torchrun --standalone --nproc-per-node 2 examples/compare_algorithms.py
torchrun --standalone --nproc-per-node 2 examples/compare_algorithms.py --task my_module:my_task \\
    --png loss.png --algorithms gradient_allreduce bytegrad:compression=onebit,error_feedback=True

To compare the algorithms on your own model, edit ``task`` below, or name a function like it with ``--task``. Ranks of
one host exchange through shared memory: set BAGUA_TRANSPORT=tcp to count bytes there.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import inspect
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import bagua
import bagua.torch_api as bt
from bagua.torch_api.algorithms import Algorithm, AsyncModelAverageAlgorithmImpl, GlobalAlgorithmRegistry
from bagua.torch_api.algorithms.q_adam import QAdamOptimizer

Batch = tuple[torch.Tensor, torch.Tensor]
Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

#: What ``--algorithms`` compares by default: exact, compressed, low-rank, decentralized, and periodic averages.
DEFAULTS = ["gradient_allreduce", "bytegrad", "powersgd", "decentralized", "local_sgd"]


def task() -> tuple[nn.Module, Batch, Batch, Loss]:
    """Returns a model, samples and targets for training and for testing, and the loss. Edit this.

    Every rank must return the same samples: each rank trains on its share of them.
    """
    torch.manual_seed(0)
    teacher = nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 10))
    samples = torch.randn(6144, 32)
    with torch.no_grad():
        labels = teacher(samples).argmax(1)
    model = nn.Sequential(nn.Linear(32, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
    return model, (samples[:4096], labels[:4096]), (samples[4096:], labels[4096:]), nn.functional.cross_entropy


@dataclass
class Run:
    """The training with one algorithm. Numbers are means over the ranks."""

    name: str
    #: Loss of each step.
    losses: list[float]
    seconds: float
    samples_per_second: float
    #: Bytes that a rank sent through sockets in each step.
    bytes_per_step: float
    test_loss: float
    #: Fraction of right answers; NaN if the targets are not classes.
    accuracy: float


def algorithm_from(text: str, optimizer: torch.optim.Optimizer) -> Algorithm:
    """Returns the algorithm of an argument such as ``bytegrad:compression=onebit``."""
    name, _, rest = text.partition(":")
    options: dict[str, Any] = {}
    # Otherwise the ranks of one host would exchange in full precision.
    if "hierarchical" in inspect.signature(GlobalAlgorithmRegistry.get(name)).parameters:
        options["hierarchical"] = False
    if name == "qadam":
        options["q_adam_optimizer"] = optimizer
    for option in filter(None, rest.split(",")):
        key, _, value = option.partition("=")
        try:
            options[key] = ast.literal_eval(value)
        except ValueError:
            options[key] = value
    return Algorithm.init(name, **options)


def bytes_sent(algorithm: Any) -> int:
    """Returns the bytes that this rank has sent through sockets so far."""
    operations = bagua.stats()["groups"]["world"]["ops"].values()
    sent = sum(operation["wire_bytes_sent"] for operation in operations)
    if isinstance(algorithm, AsyncModelAverageAlgorithmImpl):
        # Its thread averages outside the group's operations.
        sent += algorithm.stats()["wire_bytes_sent"]
    return int(sent)


def mean(values: list[float]) -> list[float]:
    """Returns the means over the ranks."""
    found = torch.tensor(values, dtype=torch.float64)
    bt.allreduce_inplace(found, op=bt.ReduceOp.AVG)
    return found.tolist()


def train(text: str, make: Callable[[], tuple[nn.Module, Batch, Batch, Loss]], arguments: argparse.Namespace) -> Run:
    """Trains a new model with one algorithm, and tests it."""
    model, (samples, targets), (test_samples, test_targets), loss_of = make()
    rank, ranks = bt.get_rank(), bt.get_world_size()
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), arguments.lr, momentum=0.9)
    if text.startswith("qadam"):
        optimizer = QAdamOptimizer(model.parameters(), arguments.lr / 10, warmup_steps=arguments.steps // 4)
    algorithm = bt.with_bagua(model, [optimizer], algorithm_from(text, optimizer)).bagua_algorithm
    samples, targets = samples[rank::ranks], targets[rank::ranks]
    draw = torch.Generator().manual_seed(rank)
    losses = []
    before, began = bytes_sent(algorithm), time.perf_counter()
    for _ in range(arguments.steps):
        chosen = torch.randint(len(samples), (arguments.batch,), generator=draw)
        optimizer.zero_grad()
        loss = loss_of(model(samples[chosen]), targets[chosen])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    seconds = time.perf_counter() - began
    sent = float(bytes_sent(algorithm) - before)
    if isinstance(algorithm, AsyncModelAverageAlgorithmImpl):
        # The ranks made their last steps at different times. One more round makes their weights equal.
        algorithm.synchronize(model)
        algorithm.abort(model)
    model.eval()
    with torch.no_grad():
        outputs = model(test_samples)
        test_loss = loss_of(outputs, test_targets).item()
    classes = not test_targets.is_floating_point() and test_targets.dim() == 1
    accuracy = (outputs.argmax(1) == test_targets).float().mean().item() if classes else float("nan")
    seconds, sent, test_loss, accuracy, *losses = mean([seconds, sent, test_loss, accuracy, *losses])
    speed = arguments.steps * arguments.batch * ranks / seconds
    return Run(text, losses, seconds, speed, sent / arguments.steps, test_loss, accuracy)


def table(runs: list[Run]) -> str:
    """Returns the results as text, one line per algorithm."""
    width = max(len(run.name) for run in runs)
    lines = [f"{'algorithm':{width}}  train loss  test loss  accuracy  samples/s  KiB sent/step"]
    for run in runs:
        last = run.losses[-10:]
        lines.append(
            f"{run.name:{width}}  {sum(last) / len(last):10.4f}  {run.test_loss:9.4f}  {run.accuracy:8.4f}  "
            f"{run.samples_per_second:9.0f}  {run.bytes_per_step / 1024:13.1f}"
        )
    return "\n".join(lines)


def draw_losses(runs: list[Run], path: str) -> None:
    """Draws each run's loss over its seconds, smoothed over 10 steps."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4))
    for run in runs:
        steps = len(run.losses)
        smooth = [sum(part) / len(part) for step in range(steps) if (part := run.losses[max(0, step - 9) : step + 1])]
        axes.plot([run.seconds * (step + 1) / steps for step in range(steps)], smooth, label=run.name)
    axes.set_xlabel("seconds")
    axes.set_ylabel("training loss, mean of the ranks")
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
    figure.savefig(path, bbox_inches="tight")


def main() -> None:
    """Trains with each algorithm, prints the table, and draws the losses."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", help="module:function, a function like task() in this file")
    parser.add_argument("--algorithms", nargs="+", default=DEFAULTS, help="NAME or NAME:OPTION=VALUE,...")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=32, help="samples per rank and step")
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--png", help="file for a plot of the losses, if matplotlib is installed")
    arguments = parser.parse_args()
    make = task
    if arguments.task is not None:
        sys.path.insert(0, os.getcwd())
        module, _, function = arguments.task.partition(":")
        make = getattr(importlib.import_module(module), function)
    bt.init_process_group()
    runs = [train(text, make, arguments) for text in arguments.algorithms]
    if bt.get_rank() == 0:
        print(table(runs))
        if arguments.png is not None:
            try:
                draw_losses(runs, arguments.png)
            except ImportError:
                print("no plot: matplotlib is not installed")
    bt.destroy_process_group()


if __name__ == "__main__":
    main()
