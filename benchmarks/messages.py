"""Measures messages between two ranks of one host: send and recv beside torch.distributed on gloo, in turn, in one run.

    python benchmarks/messages.py

"latency" is half of a round trip of blocking calls; "crossing" is both ranks sending and receiving at the same time, by
asynchronous calls. The figure is the median over pairs of neighbouring batches of gloo's time over ours.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common import Barrier, add_rank_options, percentile, run_ranks, save_if_asked, show_size, this_rank, write_row

RANKS = 2
SIZES = (8, 1 << 10, 64 << 10, 1 << 20, 8 << 20)


def measure(options: dict[str, Any]) -> None:
    """One rank: times batches of both in turn; rank 0 writes the rows."""
    import torch
    import torch.distributed as dist

    import bagua

    rank, folder = this_rank(), options["folder"]
    peer = 1 - rank
    group = bagua.init(rank, RANKS, f"file://{Path(folder, 'rendezvous')}", local_rank=rank, local_world_size=RANKS)
    dist.init_process_group("gloo", f"file://{Path(folder, 'gloo')}", rank=rank, world_size=RANKS)
    barrier = Barrier(folder, rank, RANKS)

    def turns(send: Callable[..., Any], recv: Callable[..., Any], out: torch.Tensor, into: torch.Tensor) -> None:
        if rank == 0:
            send(out, peer)
            recv(into, peer)
        else:
            recv(into, peer)
            send(out, peer)

    def ours_crossing(out: torch.Tensor, into: torch.Tensor) -> None:
        sent = group.send(out, peer, async_op=True)
        group.recv(into, peer)
        sent.wait()

    def gloo_crossing(out: torch.Tensor, into: torch.Tensor) -> None:
        sent = dist.isend(out, peer)
        dist.recv(into, peer)
        assert sent is not None, "this process is in the group"
        sent.wait()

    contenders: dict[str, dict[str, Callable[..., Any]]] = {
        "latency": {
            "ours": lambda out, into: turns(group.send, group.recv, out, into),
            "gloo": lambda out, into: turns(dist.send, dist.recv, out, into),
        },
        "crossing": {"ours": ours_crossing, "gloo": gloo_crossing},
    }

    def batch(exchange: Callable[..., Any], size: int, calls: int, seed: int) -> float:
        out = torch.full((size,), (seed + rank) % 251, dtype=torch.uint8)
        into = torch.zeros(size, dtype=torch.uint8)
        barrier.wait()
        begun = time.perf_counter_ns()
        for _ in range(calls):
            exchange(out, into)
        taken = (time.perf_counter_ns() - begun) / calls
        if not bool((into == (seed + peer) % 251).all()):
            raise AssertionError("a wrong message")
        return taken

    for what, pair in contenders.items():
        for size in SIZES:
            calls = max(2, min(200, (16 << 20) // size))
            times: dict[str, list[float]] = {name: [] for name in pair}
            for turn in range(options["pairs"] + 1):
                for name in sorted(pair, reverse=turn % 2 == 0):
                    taken = batch(pair[name], size, calls, turn)
                    # The first pair warms up.
                    if turn:
                        times[name].append(taken / (2 if what == "latency" else 1))
            ratios = [theirs / ours for ours, theirs in zip(times["ours"], times["gloo"], strict=True)]
            if rank == 0:
                row = {
                    "what": what,
                    "bytes": size,
                    "ours_us": statistics.median(times["ours"]) / 1e3,
                    "gloo_us": statistics.median(times["gloo"]) / 1e3,
                    "ratio": statistics.median(ratios),
                    "ratio_p25": percentile(ratios, 0.25),
                    "ratio_p75": percentile(ratios, 0.75),
                }
                write_row(options, row)
    dist.destroy_process_group()
    bagua.shutdown()


def main() -> None:
    """Prints a line per kind and size, and saves them if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_rank_options(parser)
    args = parser.parse_args()
    if args.child:
        measure(json.loads(args.child))
        return
    rows = run_ranks(__file__, RANKS, {"pairs": 2 if args.quick else 30}, limit=args.limit)
    for row in rows:
        times = f"ours {row['ours_us']:9.1f} us, gloo {row['gloo_us']:9.1f} us"
        quartiles = f"quartiles {row['ratio_p25']:.2f} to {row['ratio_p75']:.2f}"
        print(f"{row['what']:9} {show_size(row['bytes']):>8}: {times}, gloo / ours {row['ratio']:.2f} ({quartiles})")
    save_if_asked(args, "messages", rows)


if __name__ == "__main__":
    main()
