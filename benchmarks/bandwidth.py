"""Compares the training algorithms with torch's DDP between two hosts (network namespaces) at limited rates.

Needs root and the tools `ip` and `tc`; see network.py, whose namespaces it uses.

    sudo python benchmarks/bandwidth.py                          # 50 and 200 Mbit/s, 1 and 10 Gbit/s, unlimited
    sudo python benchmarks/bandwidth.py --rates 1gbit --contenders bytegrad ddp ddp-bf16 --record

One rank on each host trains an MLP of 25 million parameters on 4 samples a step. A contender trains alone: its blocks
of steps are those of one communication interval (one step for most), a block's time is that of its slowest rank, the
figure is the median time of a step. torch's DDP on gloo is measured first and last, so that a change of the machine
shows: `x ddp` is against the mean of both. MiB sent are those that left the first rank's host in a step, by the counter
of its network interface, so headers and acknowledgements are included.

`ddp-compressed` is torch's DDP on gloo with the hook of bagua.hooks, `ddp-int4` the same with int4 and error feedback.
`fsdp` is torch's FSDP2 on gloo, `fsdp-compressed` the same with bagua.fsdp.

Goals: at 1 Gbit/s ddp-compressed >= 2.2 x ddp, ddp-int4 >= 3 x ddp, bytegrad >= 3 x ddp and >= 1.6 x ddp-bf16;
unlimited, bytegrad-auto >= 0.95 x gradient_allreduce.
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from common import Barrier, add_rank_options, machine, pyplot, run_ranks, save_if_asked, this_rank, write_row
from network import ADDRESSES, UNLIMITED, Namespaces, missing
from train import BATCH, Trainer, build, samples

PORT = 29703
RATES = ("50mbit", "200mbit", "1gbit", "10gbit", UNLIMITED)
#: Steps of a block, for algorithms that do not communicate in every step.
INTERVALS = {"local_sgd": 8, "diloco": 20}
#: Steps before the measurement; "auto" tries both in the first ten communications.
WARM = {"bytegrad-auto": 12, "qadam": 3}
CONTENDERS = (
    "ddp",
    "gradient_allreduce",
    "bytegrad",
    "bytegrad-auto",
    "bytegrad-onebit",
    "bytegrad-top_k",
    "decentralized",
    "decentralized-shift_one",
    "low_precision_decentralized",
    "qadam",
    "powersgd",
    "local_sgd",
    "diloco",
    "ddp-bf16",
    "ddp-powersgd",
    "ddp-compressed",
    "ddp-int4",
    "fsdp",
    "fsdp-compressed",
    "ddp-again",
)


def algorithm(contender: str, parameters: Any) -> tuple[Any, Any]:
    """Optimizer and algorithm of one of ours."""
    import torch

    from bagua.torch_api.algorithms import Algorithm
    from bagua.torch_api.algorithms.q_adam import QAdamOptimizer

    name, _, variant = contender.partition("-")
    options: dict[str, Any] = {}
    if name == "bytegrad":
        options["compression"] = {"": "MinMaxUInt8", "auto": "auto", "onebit": "onebit", "top_k": "top_k"}[variant]
        options["error_feedback"] = variant in ("onebit", "top_k")
    if name == "decentralized" and variant:
        options["peer_selection_mode"] = variant
    if name in INTERVALS:
        options["communication_interval"] = INTERVALS[name]
    if name == "qadam":
        # A large eps: a warm-up of one step leaves second moments of 0.
        optimizer = QAdamOptimizer(parameters, lr=1e-4, warmup_steps=1, eps=1.0)
        return optimizer, Algorithm.init(name, q_adam_optimizer=optimizer, **options)
    return torch.optim.SGD(parameters, lr=0.01), Algorithm.init(name, **options)


class Contender(Trainer):
    """One copy of the model and its optimizer, by any of the algorithms."""

    def __init__(self, name: str, rank: int) -> None:
        import torch

        torch.manual_seed(17)
        self.module: Any = build("mlp")
        self.data = samples("mlp", rank)
        self.losses = []
        if name.startswith("fsdp"):
            self.module = fsdp(self.module, compressed=name == "fsdp-compressed")
        if name.startswith(("ddp", "fsdp")):
            self.optimizer: Any = torch.optim.SGD(self.module.parameters(), lr=0.01)
        else:
            self.optimizer, chosen = algorithm(name, self.module.parameters())
            self.module.with_bagua([self.optimizer], chosen)
        if name.startswith("ddp"):
            self.module = ddp(self.module, name)

    def close(self) -> None:
        """Ends the communication of this copy."""
        if hasattr(self.module, "with_bagua"):
            from bagua.torch_api.distributed import unwrap

            unwrap(self.module)


def ddp(module: Any, name: str) -> Any:
    """torch's DDP, with the hook that the name asks for."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
    from torch.nn.parallel import DistributedDataParallel

    # On gloo, that hook's collectives of several buckets come in another order on each rank.
    wrapped = DistributedDataParallel(module, bucket_cap_mb=1000 if name == "ddp-powersgd" else None)
    if name == "ddp-bf16":
        wrapped.register_comm_hook(None, default_hooks.bf16_compress_hook)
    if name == "ddp-powersgd":
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=2)
        wrapped.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    if name in ("ddp-compressed", "ddp-int4"):
        from bagua.hooks import CompressedState, compressed_hook

        int4 = name == "ddp-int4"
        compressed = CompressedState("int4" if int4 else "minmax_u8", error_feedback=int4)
        wrapped.register_comm_hook(compressed, compressed_hook)
    return wrapped


def fsdp(module: Any, *, compressed: bool) -> Any:
    """torch's FSDP2 of each layer, with gradients in minmax_u8 if asked."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    import bagua.fsdp

    mesh = init_device_mesh("cpu", (2,))
    for layer in [each for each in module if list(each.parameters())]:
        fully_shard(layer, mesh=mesh)
    fully_shard(module, mesh=mesh)
    if compressed:
        bagua.fsdp.compress(module)
    return module


def sent() -> int:
    """Bytes that this host has sent so far."""
    return int(Path("/sys/class/net/bench/statistics/tx_bytes").read_text())


def measure(name: str, options: dict[str, Any], rank: int, barrier: Barrier) -> dict[str, Any]:
    """Seconds of a step of this rank by block, and bytes of a step."""
    contender = Contender(name, rank)
    block = INTERVALS.get(name, 1)
    begun = time.perf_counter()
    contender.steps(WARM.get(name, max(2, block)))
    barrier.wait()
    begun = time.perf_counter()
    contender.steps(block)
    # Rank 0 chooses, because every rank must train as many steps.
    rounds = int(barrier.broadcast(max(3, min(30, float(options["budget"]) / (time.perf_counter() - begun)))))
    times, before = [], sent()
    for _ in range(rounds):
        barrier.wait()
        begun = time.perf_counter()
        contender.steps(block)
        times.append((time.perf_counter() - begun) / block)
        if not contender.losses[-1] < 20.0:
            raise AssertionError(f"{name} diverged: the loss is {contender.losses[-1]}")
    barrier.wait()
    steps, moved = rounds * block, sent() - before
    contender.close()
    return {"times": times, "steps": steps, "sent": moved / steps}


@contextmanager
def groups(options: dict[str, Any]) -> Iterator[tuple[int, int, Barrier]]:
    """Joins torch's group on gloo and ours, and leaves them: this rank, the number of ranks, and their barrier."""
    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import FileStore

    import bagua.torch_api as bt

    rank, ranks, folder = this_rank(), int(options["ranks"]), str(options["folder"])
    torch.set_num_threads(1)
    barrier = Barrier(folder, rank, ranks)
    dist.init_process_group("gloo", store=FileStore(f"{folder}/gloo", ranks), rank=rank, world_size=ranks)
    bt.init_process_group(FileStore(f"{folder}/bagua", ranks), rank, ranks, 1)
    yield rank, ranks, barrier
    bt.destroy_process_group()
    dist.destroy_process_group()


def child(options: dict[str, Any]) -> None:
    """One rank; rank 0 writes a row per contender."""
    import torch.distributed as dist

    with groups(options) as (rank, ranks, barrier):
        for name in options["contenders"]:
            found = measure(name, options, rank, barrier)
            everyone: list[Any] = [None] * ranks
            dist.all_gather_object(everyone, found)
            if rank == 0:
                slowest = [max(each) for each in zip(*(theirs["times"] for theirs in everyone), strict=True)]
                row = {"contender": name, "batch": BATCH["mlp"], "steps": found["steps"]}
                write_row(options, row | {"step_s": statistics.median(slowest), "bytes_sent": found["sent"]})
                print(f"  {name}: {statistics.median(slowest):.3f} s", file=sys.stderr, flush=True)


def plot(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """A line of steps per second over the rate for each contender."""
    if (plt := pyplot()) is None:
        return

    rates = list(dict.fromkeys(row["rate"] for row in rows))
    figure, axes = plt.subplots(figsize=(9, 5.5))
    for number, name in enumerate(dict.fromkeys(row["contender"] for row in rows)):
        of_name = {row["rate"]: 1 / row["step_s"] for row in rows if row["contender"] == name}
        axes.plot(
            rates, [of_name.get(rate, float("nan")) for rate in rates], "o-" if number < 10 else "s--", label=name
        )
    axes.set(yscale="log", xlabel="rate of the link", ylabel="steps per second")
    axes.legend(fontsize=7, ncols=2)
    figure.tight_layout()
    figure.savefig(path)
    print(f"written: {path}")


def main() -> None:
    """Measures every rate, prints the table, saves it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_rank_options(parser)
    parser.add_argument("--rates", nargs="+", default=list(RATES), help="unlimited, or rates as tc writes them")
    parser.add_argument("--contenders", nargs="+", default=list(CONTENDERS), choices=CONTENDERS)
    parser.add_argument("--budget", type=float, default=5.0, help="seconds per contender and rate, roughly")
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
        args.rates, args.contenders, args.budget = [UNLIMITED], ["ddp", "bytegrad"], 0.05
    rows: list[dict[str, Any]] = []
    # SIGTERM removes the namespaces too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    print(machine())
    for rate in args.rates:
        with Namespaces() as namespaces:
            namespaces.limit(rate)
            through = [["ip", "netns", "exec", name] for name in namespaces.names]
            env = {"GLOO_SOCKET_IFNAME": "bench", "MASTER_ADDR": ADDRESSES[0], "MASTER_PORT": str(PORT)}
            options = {"contenders": args.contenders, "budget": args.budget}
            found = run_ranks(__file__, len(through), options, limit=args.limit, env=env, through=through)
        rows += [{"rate": rate, **row} for row in found]
        show(rate, found)
    for path in save_if_asked(args, Path(__file__).stem, rows):
        plot(rows, path.with_suffix(".png"))


def show(rate: str, rows: Sequence[dict[str, Any]]) -> None:
    """Prints the rows of one rate."""
    steps = {row["contender"]: row["step_s"] for row in rows}
    peers = {
        "ddp": statistics.fmean(steps[name] for name in ("ddp", "ddp-again") if name in steps)
        if steps.keys() & {"ddp", "ddp-again"}
        else float("nan"),
        "ddp-bf16": steps.get("ddp-bf16", float("nan")),
        "gradient_allreduce": steps.get("gradient_allreduce", float("nan")),
    }
    print(f"{rate:>9} {'':28} {'ms':>9} {'MiB sent':>9}", *(f"{'x ' + peer:>20}" for peer in peers))
    for row in rows:
        ratios = (f"{seconds / row['step_s']:>20.2f}" for seconds in peers.values())
        mebibytes = row["bytes_sent"] / 2**20
        print(f"{'':9} {row['contender']:28} {row['step_s'] * 1e3:>9.1f} {mebibytes:>9.2f}", *ratios)
    sys.stdout.flush()


if __name__ == "__main__":
    main()
