"""Compares ``fuse_step`` with torch's own loop, ``foreach=True`` and ``fused=True``, on many small parameters.

python benchmarks/fused_optimizer.py [--parameters 1000] [--elements 64] [--rounds 15]

Half of the parameters are vectors and half are matrices, alternately, in one group. Ratios are taken within one run:
the methods alternate, each step has new gradient tensors as after ``zero_grad()``, and the figure is the median of the
rounds. At the end the parameters of each method are compared with those of the loop. A cell is empty where torch lacks
the method for an optimizer or a device.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from common import add_output_options, save_if_asked
from torch import optim

from bagua.torch_api.contrib import fuse_optimizer

OPTIMIZERS: dict[str, tuple[type[optim.Optimizer], dict[str, Any]]] = {
    "SGD": (optim.SGD, {"lr": 0.01}),
    "SGD momentum": (optim.SGD, {"lr": 0.01, "momentum": 0.9}),
    "Adam": (optim.Adam, {"lr": 0.001}),
    "AdamW": (optim.AdamW, {"lr": 0.001}),
    "NAdam": (optim.NAdam, {"lr": 0.001}),
    "RAdam": (optim.RAdam, {"lr": 0.001}),
    "Adamax": (optim.Adamax, {"lr": 0.001}),
    "Adagrad": (optim.Adagrad, {"lr": 0.01}),
    "Adadelta": (optim.Adadelta, {"lr": 1.0}),
    "RMSprop": (optim.RMSprop, {"lr": 0.001}),
    "Rprop": (optim.Rprop, {"lr": 0.001}),
    "ASGD": (optim.ASGD, {"lr": 0.001}),
}

Step = Callable[[], Any]


class Run:
    """One method of stepping, with its own parameters."""

    def __init__(self, start: list[torch.Tensor], make: Callable[[list[torch.nn.Parameter]], Step]) -> None:
        self.params = [torch.nn.Parameter(values.clone()) for values in start]
        self.step = make(self.params)
        self.times: list[float] = []

    def measure(self, grads: list[torch.Tensor]) -> None:
        """One timed step with these gradients."""
        for param, grad in zip(self.params, grads, strict=True):
            param.grad = grad.clone()
        synchronise(grads[0])
        started = time.perf_counter()
        self.step()
        synchronise(grads[0])
        self.times.append(time.perf_counter() - started)


def synchronise(tensor: torch.Tensor) -> None:
    """Waits for the device."""
    if tensor.is_cuda:
        torch.cuda.synchronize()


def fused(optimizer: optim.Optimizer) -> Step:
    """The `fuse_step` of an optimizer."""
    step: Step = fuse_optimizer(optimizer).fuse_step  # type: ignore[attr-defined]
    return step


def ways(kind: type[optim.Optimizer], options: dict[str, Any]) -> dict[str, Callable[[Any], Step]]:
    """The methods, by name."""
    return {
        "plain": lambda params: kind(params, foreach=False, **options).step,  # type: ignore[call-arg]
        "foreach": lambda params: kind(params, foreach=True, **options).step,  # type: ignore[call-arg]
        "fused": lambda params: kind(params, fused=True, **options).step,  # type: ignore[call-arg]
        "fuse_step": lambda params: fused(kind(params, foreach=False, **options)),  # type: ignore[call-arg]
        "fuse_step of fused": lambda params: fused(kind(params, fused=True, **options)),  # type: ignore[call-arg]
    }


def measure(name: str, start: list[torch.Tensor], rounds: int) -> dict[str, float]:
    """Median seconds per step by method."""
    runs = {}
    for way, make in ways(*OPTIMIZERS[name]).items():
        try:
            runs[way] = Run(start, make)
        except (RuntimeError, TypeError):
            # Not offered for this optimizer or device.
            continue
    # The first steps create states and plans.
    for i in range(rounds + 3):
        generator = torch.Generator().manual_seed(i)
        grads = [torch.randn(values.shape, generator=generator).to(values.device) for values in start]
        for run in runs.values():
            run.measure(grads)
    for way, run in runs.items():
        for one, other in zip(run.params, runs["plain"].params, strict=True):
            if way == "fuse_step":
                assert torch.equal(one, other), f"{name}: {way} differs from plain"
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    return {way: statistics.median(run.times[3:]) for way, run in runs.items()}


def main() -> int:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=int, default=1000)
    parser.add_argument("--elements", type=int, default=64, help="of each parameter, a multiple of 8")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--only", nargs="*", default=list(OPTIMIZERS))
    add_output_options(parser)
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.parameters, arguments.rounds, arguments.only = 50, 3, ["SGD", "AdamW"]
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    shapes = [(arguments.elements,), (8, arguments.elements // 8)]
    start = [torch.randn(shapes[i % 2], generator=generator).to(arguments.device) for i in range(arguments.parameters)]
    print(
        f"torch {torch.__version__}, {arguments.device}, {arguments.parameters} parameters of {arguments.elements}, "
        "times faster than each\n"
    )
    print(
        "| optimizer | fuse_step, us | than plain | than foreach | than fused | fuse_step of fused=True, than fused |"
    )
    print("|---|---|---|---|---|---|")
    rows = []
    for name in arguments.only:
        took = measure(name, start, arguments.rounds)
        ours = took["fuse_step"]
        cells = [f"{took[way] / ours:.1f}" if way in took else "" for way in ("plain", "foreach", "fused")]
        both = took.get("fuse_step of fused")
        cells.append("" if both is None else f"{took['fused'] / both:.1f}")
        print(f"| {name} | {ours * 1e6:.0f} | {' | '.join(cells)} |", flush=True)
        task = {"device": arguments.device, "parameters": arguments.parameters, "elements": arguments.elements}
        rows += [{**task, "optimizer": name, "way": way, "us": f"{took[way] * 1e6:.0f}"} for way in took]
    save_if_asked(arguments, "fused_optimizer", rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
