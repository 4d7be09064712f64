"""Compares the time to wrap a model of many small parameters by Bagua with that of torch's DDP on gloo.

    python benchmarks/wrapping.py [--parameters 1000 10000] [--ranks 2] [--rounds 7]

Every wrap gets a model and an optimizer of its own, built before. `first` is the first wrap of a process, so each
contender has a process in which it comes first. `warm` are the later ones, by all contenders in alternation, in another
order each round. CPU seconds are those of all threads of rank 0, `gc` those of its garbage collections; figures are
medians.
After each wrap one step is trained, whose gradients must be those of DDP.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

from common import add_rank_options, run_ranks, save_if_asked, this_rank, write_row

DDP = "DDP"
CONTENDERS = (DDP, "with_bagua", "DistributedDataParallel")
FIGURES = ("cpu_s", "wall_s", "gc_s")


def contenders() -> dict[str, Callable[[Any, Any], Any]]:
    """Returns functions, by name, that wrap a model, given its optimizer."""
    from torch.nn.parallel import DistributedDataParallel

    import bagua.torch_api as api
    from bagua.torch_api.data_parallel import DistributedDataParallel as OurWrapper

    def with_bagua(model: Any, optimizer: Any) -> Any:
        return api.with_bagua(model, [optimizer], "gradient_allreduce")

    return {
        DDP: lambda model, _: DistributedDataParallel(model),
        "with_bagua": with_bagua,
        "DistributedDataParallel": lambda model, _: OurWrapper(model),
    }


def build(parameters: int) -> Any:
    """A model of linear layers side by side, so that no gradient vanishes."""
    import torch
    from torch import nn

    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(parameters // 2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.stack([layer(x) for layer in self.layers]).square().sum()

    torch.manual_seed(0)
    return Wide()


class Collections:
    """Seconds of garbage collections so far."""

    def __init__(self) -> None:
        self.seconds = self._begun = 0.0
        gc.callbacks.append(self._called)

    def _called(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self._begun = time.process_time()
        else:
            self.seconds += time.process_time() - self._begun


def wraps(options: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Figures of each wrap on this rank."""
    import torch

    made, rank = contenders(), this_rank()
    order = sorted(CONTENDERS, key=lambda name: name != options["first"])
    collections = Collections()
    for number in range(options["rounds"] + 1):
        gradients: dict[str, list[torch.Tensor]] = {}
        for name in order:
            model = build(options["parameters"])
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            # What an earlier wrap has left belongs to none of the contenders.
            gc.collect()
            torch.distributed.barrier()
            before = time.process_time(), time.perf_counter(), collections.seconds
            wrapped = made[name](model, optimizer)
            after = time.process_time(), time.perf_counter(), collections.seconds
            wrapped(torch.full((2, 4), 1.0 + rank)).backward()
            gradients[name] = [param.grad.clone() for param in model.parameters()]
            figures = dict(zip(FIGURES, (b - a for a, b in zip(before, after, strict=True)), strict=True))
            if number > 0 or name == options["first"]:
                yield {"contender": name, "kind": "warm" if number else "first", **figures}
            del model, wrapped, optimizer
        for name in CONTENDERS:
            torch.testing.assert_close(gradients[name], gradients[DDP])
        order = [*order[1:], order[0]]


def child(options: dict[str, Any]) -> None:
    """One rank."""
    import torch
    from torch._C._distributed_c10d import FileStore

    import bagua.torch_api as api

    torch.set_num_threads(1)
    store = FileStore(f"{options['folder']}/store", options["ranks"])
    api.init_process_group(store, this_rank(), options["ranks"], options["ranks"])
    for row in wraps(options):
        if this_rank() == 0:
            write_row(options, row)
    api.destroy_process_group()


def measure(parameters: int, ranks: int, rounds: int, limit: float) -> list[dict[str, Any]]:
    """Medians for each contender, first and warm, and the ratio of CPU seconds to DDP's."""
    found: list[dict[str, Any]] = []
    for first in CONTENDERS:
        found += run_ranks(__file__, ranks, {"parameters": parameters, "rounds": rounds, "first": first}, limit=limit)
    rows: list[dict[str, Any]] = []
    for kind in ("first", "warm"):
        for name in CONTENDERS:
            same = [row for row in found if (row["contender"], row["kind"]) == (name, kind)]
            medians = {figure: statistics.median(row[figure] for row in same) for figure in FIGURES}
            rows.append({"ranks": ranks, "parameters": parameters, "kind": kind, "contender": name, **medians})
        ddp = rows[-len(CONTENDERS)]["cpu_s"]
        for row in rows[-len(CONTENDERS) :]:
            row["ratio"] = row["cpu_s"] / ddp
    return rows


def main() -> None:
    """Prints the table, and saves it if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=int, nargs="+", help="default: 1000 10000")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, help="warm wraps of each contender in a process; default: 7")
    add_rank_options(parser)
    args = parser.parse_args()
    if args.child:
        child(json.loads(args.child))
        return
    rows = []
    print("| ranks | parameters | wrap | contender | CPU ms | of it gc | wall ms | CPU over DDP's |")
    print("|---|---|---|---|---|---|---|---|")
    for parameters in args.parameters or ([20] if args.quick else [1000, 10000]):
        measured = measure(parameters, args.ranks, args.rounds or (2 if args.quick else 7), args.limit)
        for row in measured:
            cpu, wall, collecting = (f"{1000 * row[figure]:.0f}" for figure in FIGURES)
            which = f"{row['ranks']} | {row['parameters']} | {row['kind']} | {row['contender']}"
            print(f"| {which} | {cpu} | {collecting} | {wall} | {row['ratio']:.1f} |", flush=True)
        rows += measured
    save_if_asked(args, "wrapping", rows)


if __name__ == "__main__":
    main()
