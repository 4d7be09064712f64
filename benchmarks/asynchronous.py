"""The gain of asynchronous model averaging with a slow rank, and its cost with an equal one.

    python benchmarks/asynchronous.py --csv out
    python benchmarks/asynchronous.py --parts cost --rounds 20

speed: rank 1 sleeps after each step until it has taken `--slower` times as long as rank 0. The figure is the steps per
second of rank 0, relative to training alone (unwrapped) beside the same slow rank: with the algorithm async, and with
gradient_allreduce, where every step waits for rank 1.

cost: all ranks train the MLP of 25 million parameters, with the averaging at its default interval, aborted, and without
it. `wait` is what the training thread waited for the weight lock, which the averaging thread holds to copy a snapshot
and to write an update: the cost of lock and copies. The step's time beyond that of an unwrapped model also has what
that thread takes away from the processors and the memory, as it adds up the weights of all ranks beside the training.

spare: as cost, but rank 0 alone trains, and the other ranks only average: with two ranks on two cores the averaging
threads have a core to themselves, and what is left of the cost is the lock and the copies.

The contenders take turns in blocks of steps, in another order each round; figures are medians over blocks.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common import (
    Barrier,
    add_rank_options,
    machine,
    pyplot,
    run_ranks,
    save_if_asked,
    this_rank,
    write_row,
)
from train import build, samples

ALONE, ASYNC, ABORTED, SYNCHRONOUS = "alone", "async", "async aborted", "gradient_allreduce"
PARTS = {"speed": (ALONE, ASYNC, SYNCHRONOUS), "cost": (ALONE, ASYNC, ABORTED), "spare": (ALONE, ASYNC, ABORTED)}


class Trainer:
    """One contender's copy of the model."""

    def __init__(self, contender: str, model: str, rank: int) -> None:
        import torch

        from bagua.torch_api.algorithms import GradientAllReduceAlgorithm
        from bagua.torch_api.algorithms.async_model_average import AsyncModelAverageAlgorithm

        torch.manual_seed(17)
        self.module: Any = build(model)
        self.contender = contender
        self.optimizer = torch.optim.SGD(self.module.parameters(), lr=0.01)
        self.data = samples(model, rank)
        if contender == SYNCHRONOUS:
            self.module.with_bagua([self.optimizer], GradientAllReduceAlgorithm())
        elif contender in (ASYNC, ABORTED):
            self.module.with_bagua([self.optimizer], AsyncModelAverageAlgorithm())
            self.module.bagua_algorithm.abort(self.module)

    def steps(self, count: int, pause: float = 0.0) -> float:
        """Seconds of so many steps, each with a pause after it."""
        from torch.nn.functional import cross_entropy

        begun = time.perf_counter()
        for _ in range(count):
            x, y = next(self.data)
            loss: Any = cross_entropy(self.module(x), y)
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            if pause:
                time.sleep(pause)
        return time.perf_counter() - begun

    def numbers(self) -> dict[str, Any]:
        """The averaging's, or those of a model without."""
        if self.contender not in (ASYNC, ABORTED):
            return {"rounds": 0, "lock_wait_s": 0.0, "round_s": 0.0}
        found: dict[str, Any] = self.module.bagua_algorithm.stats()
        return found

    def rest(self, barrier: Barrier) -> None:
        """Averages without training, if that is this contender's, until the others have trained."""
        if self.contender == ASYNC:
            self.module.bagua_algorithm.resume(self.module)
        barrier.wait()
        if self.contender == ASYNC:
            self.module.bagua_algorithm.abort(self.module)

    def block(self, count: int, pause: float) -> dict[str, float]:
        """Trains, with the averaging if it is that contender's."""
        running = self.contender == ASYNC
        if running:
            self.module.bagua_algorithm.resume(self.module)
        before = self.numbers()
        seconds = self.steps(count, pause)
        after = self.numbers()
        if running:
            self.module.bagua_algorithm.abort(self.module)
        return {
            "step_s": seconds / count,
            "wait_share": (after["lock_wait_s"] - before["lock_wait_s"]) / seconds,
            "rounds": after["rounds"] - before["rounds"],
            "round_s": after["round_s"],
        }


def measure(options: dict[str, Any], rank: int, barrier: Barrier) -> None:
    """Trains by each contender of the part in turn; rank 0 writes a row for each."""
    part, steps, slower = options["part"], int(options["steps"]), float(options["slower"])
    trainers = {name: Trainer(name, options["model"], rank) for name in PARTS[part]}
    for trainer in trainers.values():
        trainer.steps(3)
    barrier.wait()
    # How long the slow rank rests: by the median of its steps beside other ranks that compute.
    pause, mine = 0.0, steps
    if part == "speed":
        alone = statistics.median(trainers[ALONE].steps(1) for _ in range(min(100, steps)))
        if rank == 1:
            pause, mine = (slower - 1) * alone, max(1, round(steps / slower))
    blocks: dict[str, list[dict[str, float]]] = {name: [] for name in trainers}
    order = list(trainers)
    for _ in range(int(options["rounds"])):
        order.append(order.pop(0))
        for name in order:
            barrier.wait()
            if part == "spare" and rank > 0:
                trainers[name].rest(barrier)
                continue
            # Gradients travel in every step: all ranks make as many.
            count = steps // round(slower) if name == SYNCHRONOUS else mine
            blocks[name].append(trainers[name].block(count, pause))
            if part == "spare":
                barrier.wait()
    barrier.wait()
    if rank == 0:
        found = {name: {k: statistics.median(b[k] for b in of) for k in of[0]} for name, of in blocks.items()}
        for name, figures in found.items():
            speed = found[ALONE]["step_s"] / figures["step_s"]
            write_row(
                options,
                {
                    "part": part,
                    "model": options["model"],
                    "ranks": options["ranks"],
                    "contender": name,
                    "relative_speed": speed,
                    **figures,
                },
            )


def child(options: dict[str, Any]) -> None:
    """One rank."""
    import torch
    from torch._C._distributed_c10d import FileStore

    import bagua.torch_api as bagua

    torch.set_num_threads(1)
    rank, ranks, folder = this_rank(), int(options["ranks"]), str(options["folder"])
    bagua.init_process_group(FileStore(f"{folder}/ours", ranks), rank, ranks, ranks)
    barrier = Barrier(folder, rank, ranks)
    measure(options, rank, barrier)
    barrier.wait()
    bagua.destroy_process_group()


def plot(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """A bar of the fast rank's steps per second for each contender."""
    if (plt := pyplot()) is None:
        return
    figure, axes = plt.subplots(figsize=(6, 3.5))
    axes.barh([row["contender"] for row in rows], [1 / row["step_s"] for row in rows])
    axes.set(xlabel="steps per second of the fast rank", title=f"one of {rows[0]['ranks']} ranks slowed")
    axes.invert_yaxis()
    figure.tight_layout()
    figure.savefig(path)
    print(f"written: {path}")


def main() -> None:
    """Parses the command line, runs the parts, prints, keeps."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_rank_options(parser)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--rounds", type=int, default=7, help="blocks of each contender")
    parser.add_argument("--slower", type=float, default=4.0, help="how many times as long the slow rank takes")
    args = parser.parse_args()
    if args.child:
        child(json.loads(args.child))
        return
    models = {"speed": "cnn", "cost": "mlp", "spare": "mlp"}
    steps = {"speed": 200, "cost": 16, "spare": 16}
    if args.quick:
        models, args.rounds = dict.fromkeys(PARTS, "cnn"), 2
        steps = {"speed": 12, "cost": 4, "spare": 4}
    env = {"MASTER_ADDR": "127.0.0.1"} if "MASTER_ADDR" not in os.environ else {}
    print(f"{machine()}, {args.ranks} ranks")
    for part in args.parts:
        options = {"part": part, "model": models[part], "steps": steps[part]}
        options |= {"slower": args.slower, "rounds": args.rounds}
        rows = run_ranks(__file__, args.ranks, options, limit=args.limit, env=env)
        print(f"{part:<22}{'ms/step':>10}{'steps/s to alone':>18}{'lock wait':>11}{'rounds':>8}{'ms/round':>10}")
        for row in rows:
            print(
                f"{row['contender']:<22}{row['step_s'] * 1e3:>10.2f}{row['relative_speed']:>18.2f}"
                f"{row['wait_share']:>11.1%}{row['rounds']:>8.1f}{row['round_s'] * 1e3:>10.1f}"
            )
        for path in save_if_asked(args, f"asynchronous-{part}", rows):
            if part == "speed":
                plot(rows, path.with_suffix(".png"))


if __name__ == "__main__":
    main()
