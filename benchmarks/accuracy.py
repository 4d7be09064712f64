"""Accuracy over time of the algorithms and torch's DDP between two hosts (network namespaces) at a limited rate.

    sudo python benchmarks/accuracy.py --record
    python benchmarks/chart.py                      # draws docs/images/accuracy.svg from the record

Needs root and the tools `ip` and `tc`; see network.py, whose namespaces it uses. One rank on each host trains the
network of examples/train_digits.py on the digits, by each contender from the same weights. After each epoch both ranks
test their model on half of the test images; the time of that is not counted. Seconds are those of the slower rank.
"""

from __future__ import annotations

import argparse
import importlib
import json
import signal
import sys
import time
from pathlib import Path
from typing import Any

from bandwidth import PORT, ddp, groups
from common import HERE, Barrier, add_rank_options, machine, run_ranks, save_if_asked, write_row
from network import ADDRESSES, Namespaces, missing

sys.path.insert(0, str(HERE.parent / "examples"))

CONTENDERS = (
    "ddp",
    "ddp-bf16",
    "gradient_allreduce",
    "bytegrad",
    "bytegrad-onebit",
    "powersgd",
    "local_sgd",
    "diloco",
    "decentralized",
    "async",
)


def train(name: str, epochs: int, barrier: Barrier) -> list[tuple[float, float]]:
    """Seconds of training and the accuracy after each epoch of this rank."""
    import torch
    from torch.utils.data import DataLoader
    from torch.utils.data.distributed import DistributedSampler

    import bagua.torch_api as bt

    example: Any = importlib.import_module("train_digits")
    rank, ranks = bt.get_rank(), bt.get_world_size()
    data, test = example.digits()
    torch.manual_seed(0)
    model: Any = example.network()
    theirs = name.startswith("ddp")
    kind, _, codec = ("gradient_allreduce", "", "") if theirs else name.partition("-")
    arguments = argparse.Namespace(algorithm=kind, lr=None, compression=codec or None)
    optimizer, algorithm = example.training(model, arguments)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)
    model = ddp(model, name) if theirs else model.with_bagua([optimizer], algorithm)
    sampler: Any = DistributedSampler(data, ranks, rank, drop_last=True)
    loader = DataLoader(data, 32, sampler=sampler, drop_last=True)
    found, seconds = [], 0.0
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        barrier.wait()
        begun = time.perf_counter()
        for images, labels in loader:
            optimizer.zero_grad()
            loss: Any = torch.nn.functional.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
        seconds += time.perf_counter() - begun
        schedule.step()
        found.append((seconds, example.accuracy(model.module if theirs else model, test)))
    if name == "async":
        model.bagua_algorithm.abort(model)
    barrier.wait()
    return found


def child(options: dict[str, Any]) -> None:
    """One rank; rank 0 writes a row per contender and epoch."""
    import torch.distributed as dist

    with groups(options) as (rank, ranks, barrier):
        for name in options["contenders"]:
            everyone: list[Any] = [None] * ranks
            dist.all_gather_object(everyone, train(name, int(options["epochs"]), barrier))
            if rank == 0:
                for epoch, found in enumerate(zip(*everyone, strict=True), start=1):
                    seconds = max(seconds for seconds, _ in found)
                    write_row(options, {"contender": name, "epoch": epoch, "seconds": seconds, "accuracy": found[0][1]})
                print(f"  {name}: {found[0][1]:.4f} after {seconds:.1f} s", file=sys.stderr, flush=True)


def main() -> None:
    """Trains by every contender, prints where each ends, saves the curves."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_rank_options(parser)
    parser.add_argument("--rate", default="100mbit", help="as tc writes it")
    parser.add_argument("--contenders", nargs="+", default=list(CONTENDERS), choices=CONTENDERS)
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--if-possible", action="store_true", help="print the reason where it cannot measure")
    args = parser.parse_args()
    if args.child:
        child(json.loads(args.child))
        return
    if why := missing():
        if args.if_possible or args.quick:
            print(f"nothing measured between network namespaces: {why}")
            return
        raise SystemExit(why)
    if args.quick:
        args.contenders, args.epochs = ["ddp", "bytegrad"], 1
    # SIGTERM removes the namespaces too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    print(machine())
    with Namespaces() as namespaces:
        namespaces.limit(args.rate)
        through = [["ip", "netns", "exec", name] for name in namespaces.names]
        env = {"GLOO_SOCKET_IFNAME": "bench", "MASTER_ADDR": ADDRESSES[0], "MASTER_PORT": str(PORT)}
        options = {"contenders": args.contenders, "epochs": args.epochs}
        rows = run_ranks(__file__, len(through), options, limit=args.limit, env=env, through=through)
    rows = [{"rate": args.rate, **row} for row in rows]
    last = {row["contender"]: row for row in rows}
    for name, row in last.items():
        print(f"{name:20} {row['seconds']:>8.1f} s {row['accuracy']:>8.4f}")
    save_if_asked(args, Path(__file__).stem, rows)


if __name__ == "__main__":
    main()
