"""Compares training by with_bagua with torch's DDP on gloo: samples per second, communication, CPU, memory; and
measures the hand-over of an operation to the communication thread.

    python benchmarks/train.py                      # four models, then memory and hand-over; DDP on "bagua" and gloo
    python benchmarks/train.py --models mlp --parts throughput

Every rank holds three copies of a model (with_bagua, DDP, DDP with the bf16 compression hook), which start with the
same parameters and train on the same samples. The copies train in alternation, one block of steps at a time, in another
order each round. A block's time is that of its slowest rank; figures are medians over blocks.

The time blocked in communication is measured equally for all: a step's time less that of the same step in
`no_sync()`, which communicates nothing and runs with a learning rate of 0 here, so that the parameters stay as they
are. `wait_s` of bagua.stats() is the time per step that our communication thread waited for peers, hidden behind the
backward pass or not. CPU seconds are those of all threads.

The part "backend" compares torch's DDP with itself, on the backend "bagua" and on gloo, whose weights must be equal in
the end. The ranks of a world have both groups.

The part "weights" compares steps after set_weight() with those of a copy that has no weights. `cost` is the median of
the ratios of blocks beside each other, less 1. Goal: at most 1 %.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from common import (
    Barrier,
    add_rank_options,
    machine,
    percentile,
    run_ranks,
    save_if_asked,
    this_rank,
    write_row,
)

MODELS = ("mlp", "transformer", "batchnorm", "cnn")
#: Those of the part "backend".
BACKEND_MODELS = ("mlp", "layers", "cnn")
PARTS = ("throughput", "memory", "handover", "backend", "weights")
#: Samples per rank and step.
BATCH = {"mlp": 4, "transformer": 4, "batchnorm": 16, "cnn": 16, "layers": 4}
OURS = "bagua"


def build(name: str) -> Any:
    """A model, and a function from its output and the targets to the loss."""
    from torch import nn

    if name == "mlp":  # 25 million parameters, hardly any arithmetic: communication decides
        return nn.Sequential(nn.Linear(1024, 4096), nn.ReLU(), nn.Linear(4096, 4096), nn.ReLU(), nn.Linear(4096, 1000))
    if name in ("cnn", "batchnorm"):  # with BatchNorm a step also carries the buffers of rank 0
        norm = nn.BatchNorm2d if name == "batchnorm" else nn.Identity
        return nn.Sequential(
            *(nn.Conv2d(3, 32, 3, padding=1), norm(32), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(32, 64, 3, padding=1), norm(64), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Flatten(), nn.Linear(64 * 8 * 8, 128), nn.ReLU(), nn.Linear(128, 10)),
        )
    if name == "layers":  # 300 small layers: the cost of a bucket decides
        return nn.Sequential(*(layer for _ in range(300) for layer in (nn.Linear(32, 32), nn.Tanh())))
    return language_model(words=2000, width=192, layers=4)


def language_model(words: int, width: int, layers: int) -> Any:
    """A small causal transformer without dropout, whose random numbers would make losses differ."""
    import torch
    from torch import nn

    class LanguageModel(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(words, width)
            layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
            self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
            self.head = nn.Linear(width, words)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
            logits: torch.Tensor = self.head(self.layers(self.embed(tokens), mask=mask, is_causal=True))
            return logits.flatten(0, 1)

    return LanguageModel()


def samples(name: str, rank: int) -> Iterator[tuple[Any, Any]]:
    """Batches without end, different on every rank, the same in every run."""
    import torch

    random, batch = torch.Generator().manual_seed(100 + rank), BATCH[name]
    while True:
        if name == "mlp":
            yield torch.randn(batch, 1024, generator=random), torch.randint(1000, (batch,), generator=random)
        elif name in ("cnn", "batchnorm"):
            yield torch.randn(batch, 3, 32, 32, generator=random), torch.randint(10, (batch,), generator=random)
        elif name == "layers":
            yield torch.randn(batch, 32, generator=random), torch.randint(32, (batch,), generator=random)
        else:
            tokens = torch.randint(2000, (batch, 65), generator=random)
            yield tokens[:, :-1], tokens[:, 1:].flatten()


class Trainer:
    """One contender's copy of a model, its optimizer and its iterator over the data."""

    def __init__(self, contender: str, model: str, rank: int, group: Any = None) -> None:
        import torch

        torch.manual_seed(17)
        self.module: Any = build(model)
        self.optimizer = torch.optim.SGD(self.module.parameters(), lr=0.01)
        self.data = samples(model, rank)
        self.losses: list[float] = []
        self.no_sync: Callable[[], Any]
        if contender == OURS:
            from bagua.torch_api import no_sync
            from bagua.torch_api.algorithms.gradient_allreduce import GradientAllReduceAlgorithm

            self.module = self.module.with_bagua([self.optimizer], GradientAllReduceAlgorithm())
            self.no_sync = lambda: no_sync(self.module)
        elif contender.startswith("ddp"):
            from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
            from torch.nn.parallel import DistributedDataParallel

            self.module = DistributedDataParallel(self.module, process_group=group)
            self.no_sync = self.module.no_sync
            if contender == "ddp-bf16":
                self.module.register_comm_hook(None, bf16_compress_hook)

    def steps(self, count: int) -> None:
        """Trains and appends the losses."""
        from torch.nn.functional import cross_entropy

        for _ in range(count):
            x, y = next(self.data)
            loss: Any = cross_entropy(self.module(x), y)
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.losses.append(float(loss.detach()))

    def steps_without_communication(self, count: int) -> None:
        """The same work in `no_sync()`, without effect on parameters, losses and data."""
        rate = self.optimizer.param_groups[0]["lr"]
        losses, data = list(self.losses), self.data
        self.optimizer.param_groups[0]["lr"] = 0.0
        batch = next(self.data)
        self.data = iter(lambda: batch, None)
        with self.no_sync():
            self.steps(count)
        self.optimizer.param_groups[0]["lr"] = rate
        self.losses, self.data = losses, data


def waited() -> float:
    """Seconds that this rank's operations have waited for peers so far, in all groups."""
    import bagua

    groups = bagua.stats()["groups"].values()
    return sum(float(op["wait_s"]) for group in groups for op in group["ops"].values())


def throughput(options: dict[str, Any], rank: int, ranks: int, barrier: Barrier) -> None:
    """Trains one model by each contender; rank 0 writes a row for each."""
    import torch.distributed as dist

    model, rounds, block = options["model"], int(options["rounds"]), int(options["block"])
    trainers = {name: Trainer(name, model, rank) for name in (OURS, "ddp", "ddp-bf16")}
    for trainer in trainers.values():  # the first steps build buckets and allocate memory
        trainer.steps(3)
        trainer.steps_without_communication(1)
    blocks: dict[str, list[tuple[float, float, float, float]]] = {name: [] for name in trainers}
    order = list(trainers)
    for _ in range(rounds):
        order.append(order.pop(0))
        for name in order:
            trainer = trainers[name]
            barrier.wait()
            wait, cpu, begun = waited(), time.process_time(), time.perf_counter()
            trainer.steps(block)
            times = (time.perf_counter() - begun, time.process_time() - cpu, waited() - wait)
            barrier.wait()
            begun = time.perf_counter()
            trainer.steps_without_communication(block)
            blocks[name].append((*times, time.perf_counter() - begun))
    everyone: list[Any] = [None] * ranks
    dist.all_gather_object(everyone, (blocks, {name: trainer.losses for name, trainer in trainers.items()}))
    if rank == 0:
        check_losses([losses for _, losses in everyone])
        for name in trainers:
            by_rank = list(zip(*(rows[name] for rows, _ in everyone), strict=True))
            step, alone = (statistics.median(max(r[i] for r in b) for b in by_rank) / block for i in (0, 3))
            cpu, wait = (statistics.median(max(r[i] for r in b) for b in by_rank) / block for i in (1, 2))
            row = {"model": model, "ranks": ranks, "contender": name, "samples_per_s": BATCH[model] * ranks / step}
            row |= {"step_s": step, "blocked_s": max(0.0, step - alone), "cpu_s": cpu}
            write_row(options, row | ({"wait_s": wait} if name == OURS else {}))


def backend(options: dict[str, Any], rank: int, ranks: int, barrier: Barrier) -> None:
    """Trains one model by DDP on "bagua" and on gloo; rank 0 writes a row for each."""
    import torch
    import torch.distributed as dist

    import bagua.c10d  # noqa: F401  registers the backend

    model, rounds, block = options["model"], int(options["rounds"]), int(options["block"])
    groups = {"ddp on bagua": dist.new_group(backend="bagua"), "ddp on gloo": dist.group.WORLD}
    trainers = {name: Trainer("ddp", model, rank, group) for name, group in groups.items()}
    for trainer in trainers.values():
        trainer.steps(3)
    blocks: dict[str, list[tuple[float, float]]] = {name: [] for name in trainers}
    order = list(trainers)
    for _ in range(rounds):
        order.append(order.pop(0))
        for name in order:
            barrier.wait()
            cpu, begun = time.process_time(), time.perf_counter()
            trainers[name].steps(block)
            blocks[name].append((time.perf_counter() - begun, time.process_time() - cpu))
    ours, theirs = (trainer.module.state_dict() for trainer in trainers.values())
    if ranks == 2 and not all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items()):
        raise AssertionError(f"rank {rank}: DDP on bagua and on gloo have different weights after {rounds} blocks")
    everyone: list[Any] = [None] * ranks
    dist.all_gather_object(everyone, blocks)
    if rank == 0:
        # A block's time is that of its slowest rank; the ratio is that of blocks beside each other.
        slowest = {
            name: [max(r[0] for r in b) for b in zip(*(of[name] for of in everyone), strict=True)] for name in blocks
        }
        pairs = zip(slowest["ddp on gloo"], slowest["ddp on bagua"], strict=True)
        ratio = statistics.median(gloo / bagua for gloo, bagua in pairs)
        for name, times in slowest.items():
            step = statistics.median(times) / block
            cpu = statistics.median(max(r[name][i][1] for r in everyone) for i in range(rounds)) / block
            row = {"model": model, "ranks": ranks, "contender": name, "samples_per_s": BATCH[model] * ranks / step}
            row |= {"step_s": step, "cpu_s": cpu, "over_gloo": ratio if name == "ddp on bagua" else 1.0}
            write_row(options, row | {"load": os.getloadavg()[0]})
    dist.barrier()
    dist.destroy_process_group(groups["ddp on bagua"])


def weights(options: dict[str, Any], rank: int, ranks: int, barrier: Barrier) -> None:
    """Trains copies of one model with and without weights; rank 0 writes a row for each algorithm."""
    import torch
    import torch.distributed as dist

    from bagua.torch_api import set_weight
    from bagua.torch_api.algorithms import ByteGradAlgorithm, GradientAllReduceAlgorithm

    model, rounds, block = options["model"], int(options["rounds"]), int(options["block"])
    algorithms: dict[str, Callable[[], Any]] = {
        "gradient_allreduce": GradientAllReduceAlgorithm,
        "bytegrad": lambda: ByteGradAlgorithm(False),
    }
    for name, make in algorithms.items():
        plain, weighted = (Trainer("plain", model, rank) for _ in range(2))
        for trainer in (plain, weighted):
            trainer.module = trainer.module.with_bagua([trainer.optimizer], make())

        def timed(trainer: Trainer, weighted: Trainer = weighted) -> float:
            barrier.wait()
            begun = time.perf_counter()
            for _ in range(block):
                if trainer is weighted:
                    # Equal on all ranks and a power of two, so that gradient_allreduce has the bits of the plain mean.
                    set_weight(trainer.module, 2.0)
                trainer.steps(1)
            return time.perf_counter() - begun

        times = []
        for number in range(rounds + 1):
            order = (plain, weighted) if number % 2 else (weighted, plain)
            found = {trainer: timed(trainer) for trainer in order}
            times.append((found[plain], found[weighted]))
        ours, theirs = (trainer.module.state_dict() for trainer in (weighted, plain))
        if name == "gradient_allreduce" and not all(torch.equal(ours[key], theirs[key]) for key in ours):
            raise AssertionError(f"rank {rank}: equal weights have changed the parameters of {model}")
        everyone: list[Any] = [None] * ranks
        # The first round builds buckets and allocates memory.
        dist.all_gather_object(everyone, times[1:])
        if rank == 0:
            slowest = [[max(way) for way in zip(*of_ranks, strict=True)] for of_ranks in zip(*everyone, strict=True)]
            cost = statistics.median(with_weight / without for without, with_weight in slowest) - 1
            step = statistics.median(without for without, _ in slowest) / block
            write_row(options, {"model": model, "ranks": ranks, "algorithm": name, "step_s": step, "cost": cost})


def check_losses(everyone: list[dict[str, list[float]]]) -> None:
    """AssertionError unless the losses of all contenders agree: float32 closely, the bf16 hook roughly."""
    mean = {
        name: [statistics.fmean(step) for step in zip(*(r[name] for r in everyone), strict=True)]
        for name in everyone[0]
    }
    for name, allowed in ((OURS, 1e-3), ("ddp-bf16", 5e-2)):
        worst = max(abs(a - b) / max(abs(b), 1e-6) for a, b in zip(mean[name], mean["ddp"], strict=True))
        if worst > allowed:
            raise AssertionError(
                f"the losses of {name} differ from those of DDP by {worst:.2g} of them, more than {allowed}"
            )


def proportional_set_size() -> int:
    """Bytes of memory in use by this process; a page that n processes map counts as an n-th."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("Pss:"))) * 1024


def memory(options: dict[str, Any], rank: int, ranks: int, barrier: Barrier) -> None:
    """The memory that training of the MLP takes, with the same imports and groups for every contender."""
    import torch.distributed as dist

    barrier.wait()
    before = proportional_set_size()
    trainer = Trainer(options["contender"], "mlp", rank)
    trainer.steps(4)
    # Memory is at its maximum between backward and step, while the gradients exist.
    from torch.nn.functional import cross_entropy

    x, y = next(trainer.data)
    loss: Any = cross_entropy(trainer.module(x), y)
    loss.backward()
    barrier.wait()
    grown = proportional_set_size() - before
    barrier.wait()
    gradients = sum(p.numel() * p.element_size() for p in trainer.module.parameters())
    everyone: list[Any] = [None] * ranks
    dist.all_gather_object(everyone, grown)
    if rank == 0:
        row = {
            "contender": options["contender"],
            "grown_bytes": statistics.fmean(everyone),
            "gradient_bytes": gradients,
        }
        write_row(options, row)


def handover(options: dict[str, Any], rank: int, ranks: int, barrier: Barrier) -> None:
    """The cost of handing an operation on a bucket of 1 KiB to the communication thread instead of calling it."""
    import numpy as np
    import torch

    from bagua import Bucket, Engine
    from bagua.group import default

    group = default(required=True)
    bucket = np.full(256, rank, dtype=np.float32)
    alone = bucket.copy()
    matrix = torch.randn(160, 160)

    def compute() -> None:
        for _ in range(12):
            torch.mm(matrix, matrix)

    ways: dict[str, list[float]] = {
        "blocking": [],
        "handed over": [],
        "mark_ready": [],
        "compute": [],
        "compute beside": [],
        "wait": [],
    }
    with Engine("handover") as engine:
        engine.register([Bucket("b", {"x": bucket}).append_centralized()])

        def timed(way: str, function: Callable[[], Any]) -> None:
            begun = time.perf_counter()
            function()
            ways[way].append(time.perf_counter() - begun)

        def hand_over() -> None:
            engine.mark_ready("x")
            engine.wait()

        for _ in range(int(options["calls"])):
            barrier.wait()
            timed("blocking", lambda: group.all_reduce(alone, "avg"))
            barrier.wait()
            timed("handed over", hand_over)
            barrier.wait()
            timed("compute", compute)
            barrier.wait()
            timed("mark_ready", lambda: engine.mark_ready("x"))
            timed("compute beside", compute)
            timed("wait", engine.wait)
    expected = (ranks - 1) / 2
    if not (np.all(bucket == expected) and np.all(alone == expected)):
        raise AssertionError(f"rank {rank} has {bucket[0]} and {alone[0]} instead of the average {expected}")
    if rank == 0:
        for way, times in ways.items():
            write_row(
                options, {"what": way, "p50_us": percentile(times, 0.5) * 1e6, "p99_us": percentile(times, 0.99) * 1e6}
            )


def child(options: dict[str, Any]) -> None:
    """One rank of one part."""
    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import FileStore

    import bagua.torch_api as api

    torch.set_num_threads(1)
    rank, ranks, folder = this_rank(), int(options["ranks"]), str(options["folder"])
    dist.init_process_group("gloo", store=FileStore(f"{folder}/torch", ranks), rank=rank, world_size=ranks)
    api.init_process_group(FileStore(f"{folder}/ours", ranks), rank, ranks, ranks)
    barrier = Barrier(folder, rank, ranks)
    parts = {"throughput": throughput, "memory": memory, "handover": handover, "backend": backend, "weights": weights}
    parts[options["part"]](options, rank, ranks, barrier)
    dist.barrier()
    api.destroy_process_group()


def show_throughput(rows: list[Any]) -> None:
    """The table of one model."""
    step = {row["contender"]: row["step_s"] for row in rows}
    for row in rows:
        wait = f"{row['wait_s'] * 1e3:>10.2f}" if "wait_s" in row else f"{'-':>10}"
        print(
            f"{row['model']:<12}{row['contender']:<10}{row['samples_per_s']:>11.1f}{row['step_s'] * 1e3:>10.2f}"
            f"{row['blocked_s'] * 1e3:>12.2f}{wait}{row['cpu_s'] * 1e3:>10.2f}{row['step_s'] / step[OURS]:>12.2f}"
        )


def show_backend(rows: list[Any]) -> None:
    """The table of one model."""
    for row in rows:
        print(
            f"{row['model']:<10}{row['contender']:<14}{row['samples_per_s']:>11.1f}{row['step_s'] * 1e3:>10.2f}"
            f"{row['cpu_s'] * 1e3:>10.2f}{row['over_gloo']:>12.2f}{row['load']:>8.1f}"
        )


def main() -> None:
    """Parses the command line, runs the parts, prints, keeps."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_rank_options(parser)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--models", nargs="+", choices=(*MODELS, "layers"), default=list(MODELS))
    parser.add_argument("--backend-models", nargs="+", choices=BACKEND_MODELS, default=list(BACKEND_MODELS))
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--rounds", type=int, default=15, help="blocks of each contender")
    parser.add_argument("--block", type=int, default=5, help="steps of a block")
    args = parser.parse_args()
    if args.child:
        child(json.loads(args.child))
        return
    calls = 3000
    if args.quick:
        args.models, args.rounds, args.block, calls = args.models[-1:], 2, 1, 20
        args.backend_models = args.backend_models[-1:]

    def run(part: str, **options: Any) -> list[Any]:
        env = {"MASTER_ADDR": "127.0.0.1"} if "MASTER_ADDR" not in os.environ else {}
        return run_ranks(__file__, args.ranks, {"part": part, **options}, limit=args.limit, env=env)

    print(f"{machine()}, {args.ranks} ranks")
    if "throughput" in args.parts:
        columns = (
            ("samples/s", 11),
            ("ms/step", 10),
            ("blocked ms", 12),
            ("wait ms", 10),
            ("CPU ms", 10),
            ("step/ours", 12),
        )
        print(f"{'model':<22}" + "".join(f"{name:>{width}}" for name, width in columns))
        rows = []
        for model in args.models:
            found = run("throughput", model=model, rounds=args.rounds, block=args.block)
            show_throughput(found)
            rows += found
        save_if_asked(args, "train", rows)
    if "backend" in args.parts:
        heads = (("samples/s", 11), ("ms/step", 10), ("CPU ms", 10), ("over gloo", 12), ("load", 8))
        print(f"{'model':<24}" + "".join(f"{name:>{width}}" for name, width in heads))
        rows = []
        for model in args.backend_models:
            found = run("backend", model=model, rounds=args.rounds, block=args.block)
            show_backend(found)
            rows += found
        save_if_asked(args, "ddp_backend", rows)
    if "weights" in args.parts:
        rows = []
        for model in args.models:
            rows += run("weights", model=model, rounds=args.rounds, block=args.block)
            for row in rows[-2:]:
                print(f"{model:<12}{row['algorithm']:<20}{row['step_s'] * 1e3:>8.2f} ms, weights {row['cost']:+.2%}")
        save_if_asked(args, "weights", rows)
    if "memory" in args.parts:
        rows = [run("memory", contender=name)[0] for name in ("plain", OURS, "ddp")]
        for row in rows:
            row["over_plain"] = (row["grown_bytes"] - rows[0]["grown_bytes"]) / row["gradient_bytes"]
            print(f"memory, {row['contender']:<6}: {row['over_plain']:+.2f} of the gradients' size beyond plain torch")
        save_if_asked(args, "memory", rows)
    if "handover" in args.parts:
        rows = run("handover", calls=calls)
        for row in rows:
            print(f"hand-over, {row['what']:<15} p50 {row['p50_us']:>9.1f} us   p99 {row['p99_us']:>9.1f} us")
        p50 = {row["what"]: row["p50_us"] for row in rows}
        print(f"hand-over beyond the collective: {p50['handed over'] - p50['blocking']:.1f} us (median less median)")
        print(f"compute slowed by {(p50['compute beside'] / p50['compute'] - 1) * 100:+.1f} %")
        save_if_asked(args, "handover", rows)


if __name__ == "__main__":
    main()
