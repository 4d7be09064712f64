"""Compares our all_reduce between two hosts (network namespaces) with torch's gloo and a bare pair of sockets, at full
and at limited rates.

Needs root and the tools `ip` and `tc`: it makes two network namespaces joined by a veth pair, and removes them at the
end. It changes nothing outside of them.

    sudo python benchmarks/network.py                          # unlimited, 10, 1 and 0.1 Gbit/s
    sudo python benchmarks/network.py --rates 1gbit --sizes 16MiB --record
    sudo python benchmarks/network.py --local-ranks 2          # two ranks on each host
    sudo python benchmarks/network.py --slow-stream            # one of two streams gets a tenth of the other's rate

A limited rate is `tc qdisc add dev X root tbf rate R burst 256kb latency 50ms` on both ends. The contenders alternate,
call by call, in the same processes; ranks rewrite the buffers before every call and check every result. A call's time
is that of its slowest rank, the figure is the median over calls. Between two hosts an all_reduce must move as many
bytes each way as the tensor has. The bare sockets move as many bytes, both ways at once, without any protocol: their
rate is the rate of one connection. A ratio above 1 says that ours is that many times faster.

With --slow-stream each connection has a rate of its own (`tc` classes), and one of our two streams has a tenth of it.
`x rates` is our share of the rates of both streams together, which is 1.1 times the rate of the bare sockets.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import select
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from common import (
    Barrier,
    add_rank_options,
    machine,
    parse_size,
    run_ranks,
    save_if_asked,
    show_size,
    this_rank,
    write_row,
)

ADDRESSES = ("10.77.0.1", "10.77.0.2")
BARE_PORT, OURS_PORT = 29701, 29702
UNLIMITED = "unlimited"
#: Sizes that can be measured at a rate in a reasonable time.
SIZES = {
    UNLIMITED: ("64KiB", "1MiB", "16MiB", "64MiB"),
    "10gbit": ("1MiB", "16MiB", "64MiB"),
    "1gbit": ("1MiB", "16MiB"),
    "100mbit": ("1MiB", "4MiB"),
}
#: With --slow-stream: Mbit/s of each connection, and of the slow one.
HEALTHY, SLOW = 500, 50
#: Limit for one send or receive of a bare socket.
BLOCK = 256 << 10


class Bare:
    """A connection between the first ranks of the hosts that moves bytes without any protocol."""

    def __init__(self, listens: bool) -> None:
        if listens:
            with socket.create_server((ADDRESSES[0], BARE_PORT)) as server:
                self.socket = server.accept()[0]
        else:
            self.socket = connect()
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket.setblocking(False)

    def move(self, out: memoryview, into: memoryview) -> None:
        """Sends and receives at the same time."""
        sent = got = 0
        poller = select.poll()
        while sent < len(out) or got < len(into):
            wanted = (select.POLLOUT if sent < len(out) else 0) | (select.POLLIN if got < len(into) else 0)
            poller.register(self.socket, wanted)
            poller.poll()
            try:
                while sent < len(out):
                    sent += self.socket.send(out[sent : sent + BLOCK])
            except BlockingIOError:
                pass
            try:
                while got < len(into):
                    count = self.socket.recv_into(into[got : got + BLOCK])
                    if count == 0:
                        raise ConnectionError("the other rank closed the connection")
                    got += count
            except BlockingIOError:
                pass


def connect() -> socket.socket:
    """Connects to rank 0, which may not listen yet."""
    until = time.monotonic() + 30
    while True:
        try:
            return socket.create_connection((ADDRESSES[0], BARE_PORT), timeout=None)
        except ConnectionRefusedError:
            if time.monotonic() > until:
                raise
            time.sleep(0.05)


def contenders(size: int, rank: int, ranks: int, bare: Bare | None, options: dict[str, Any]) -> dict[str, Any]:
    """By name: functions that rewrite the buffers of a call, make it, and check its result."""
    import torch
    import torch.distributed as dist

    import bagua

    tensor = torch.zeros(size // 4)
    array = tensor.numpy()
    group: Any = bagua.group.default(required=True)
    out, into = bytearray(size), bytearray(size)

    def rewrite(number: int) -> None:
        tensor.fill_(number % 5 + rank)

    def is_right(number: int) -> bool:
        return bool((tensor == number % 5 * ranks + ranks * (ranks - 1) // 2).all())

    def refill(number: int) -> None:
        out[:] = bytes([(number + rank) % 251]) * size
        into[:] = bytes(size)

    def move() -> None:
        if bare is not None:
            bare.move(memoryview(out), memoryview(into))

    def received(number: int) -> bool:
        other = (number + ranks // 2 - rank) % 251
        return bare is None or into[0] == into[-1] == other

    gloo = {} if options["slow"] else {"gloo": (rewrite, lambda: dist.all_reduce(tensor), is_right)}
    return {
        "ours": (rewrite, lambda: group.all_reduce(array, out=array), is_right),
        **gloo,
        "bare": (refill, move, received),
    }


def measure(
    calls: dict[str, tuple[Callable[[int], None], Callable[[], object], Callable[[int], bool]]],
    budget: float,
    barrier: Barrier,
) -> dict[str, list[float]]:
    """Seconds per call on this rank, of each contender."""
    times: dict[str, list[float]] = {name: [] for name in calls}

    def round_of_calls(number: int) -> None:
        for name, (rewrite, call, is_right) in calls.items():
            rewrite(number)
            barrier.wait()
            begun = time.perf_counter()
            call()
            times[name].append(time.perf_counter() - begun)
            if not is_right(number):
                raise AssertionError(f"{name} returned a wrong result")

    # The first calls open connections and windows.
    round_of_calls(1)
    begun = time.perf_counter()
    round_of_calls(2)
    # Rank 0 chooses, because every rank must make the same number of calls.
    rounds = int(barrier.broadcast(max(5, min(200, budget / (time.perf_counter() - begun)))))
    for taken in times.values():
        taken.clear()
    for number in range(rounds):
        round_of_calls(number)
    return times


def throttle(names: Sequence[str]) -> None:
    """Puts one of the two connections that have carried data into the slow class, in both directions."""
    shown = subprocess.run(["ss", "-tniHO"], check=True, capture_output=True, text=True).stdout
    found = []
    for line in shown.splitlines():
        ports = re.findall(r"[\d.]+:(\d+)\s", line)
        sent = re.search(r"bytes_sent:(\d+)", line)
        if len(ports) >= 2 and sent and int(sent[1]) > 1 << 20:
            found.append((ports[0], ports[1]))
    if len(found) != 2:
        raise RuntimeError(f"{len(found)} connections have carried data, not two:\n{shown}")
    here, there = found[0]
    for name, source, target in ((names[0], here, there), (names[1], there, here)):
        match = f"match ip sport {source} 0xffff match ip dport {target} 0xffff"
        command(f"tc -n {name} filter add dev bench parent 1: protocol ip u32 {match} flowid 1:20")


def child(options: dict[str, Any]) -> None:
    """One rank; rank 0 writes one row per size."""
    import torch.distributed as dist
    from torch._C._distributed_c10d import FileStore

    import bagua

    rank, ranks, folder = this_rank(), int(options["ranks"]), str(options["folder"])
    barrier = Barrier(folder, rank, ranks)
    bare = Bare(rank == 0) if rank in (0, ranks // 2) else None
    dist.init_process_group("gloo", store=FileStore(f"{folder}/gloo", ranks), rank=rank, world_size=ranks)
    bagua.init(rank, ranks, f"tcp://{ADDRESSES[0]}:{OURS_PORT}")
    if options["slow"]:
        import numpy as np

        group: Any = bagua.group.default(required=True)
        group.all_reduce(np.zeros(16 << 20, np.uint8))
        if rank == 0:
            throttle(options["slow"])
        barrier.wait()
    for size in options["sizes"]:
        times = measure(contenders(size, rank, ranks, bare, options), float(options["budget"]), barrier)
        gathered: list[Any] = [None] * ranks
        dist.all_gather_object(gathered, times)
        if rank == 0:
            slowest = {
                name: [max(each) for each in zip(*(theirs[name] for theirs in gathered), strict=True)] for name in times
            }
            medians = {f"{name}_seconds": statistics.median(taken) for name, taken in slowest.items()}
            write_row(options, {"bytes": size, "calls": len(slowest["ours"]), **medians})
    bagua.shutdown()
    dist.destroy_process_group()


class Namespaces:
    """Two network namespaces joined by a veth pair."""

    def __init__(self) -> None:
        self.names = [f"bagua-bench-{os.getpid()}-{host}" for host in range(2)]

    def __enter__(self) -> Namespaces:
        try:
            for name in self.names:
                command(f"ip netns add {name}")
            first, second = self.names
            command(f"ip link add name bench netns {first} type veth peer name bench netns {second}")
            for host, name in enumerate(self.names):
                command(f"ip -n {name} addr add {ADDRESSES[host]}/24 dev bench")
                command(f"ip -n {name} link set bench up")
                command(f"ip -n {name} link set lo up")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for name in self.names:
            # A namespace that was never made is no error.
            subprocess.run(["ip", "netns", "del", name], check=False, stderr=subprocess.DEVNULL)

    def limit(self, rate: str) -> None:
        """Limits the rate of both ends."""
        for name in self.names:
            if rate != UNLIMITED:
                command(f"tc -n {name} qdisc add dev bench root tbf rate {rate} burst 256kb latency 50ms")

    def classes(self) -> None:
        """A rate for each connection, and a lower one for the connection that :func:`throttle` picks."""
        for name in self.names:
            command(f"tc -n {name} qdisc add dev bench root handle 1: htb default 10")
            for number, rate in ((10, HEALTHY), (20, SLOW)):
                shape = f"htb rate {rate}mbit burst 256k cburst 256k quantum 60000"
                command(f"tc -n {name} class add dev bench parent 1: classid 1:{number} {shape}")
                # The bytes of 50 ms at this rate.
                command(f"tc -n {name} qdisc add dev bench parent 1:{number} bfifo limit {rate * 1_000_000 // 8 // 20}")

    def run(self, args: argparse.Namespace, sizes: Sequence[int]) -> list[dict[str, Any]]:
        """The rows of the ranks, `--local-ranks` of them on each host."""
        options = {"sizes": sizes, "budget": args.budget, "slow": self.names if args.slow_stream else []}
        through = [["ip", "netns", "exec", name] for name in self.names for _ in range(args.local_ranks)]
        env = {"GLOO_SOCKET_IFNAME": "bench"}
        return run_ranks(__file__, len(through), options, limit=args.limit, env=env, through=through)


def command(line: str) -> None:
    """Runs a command. OSError with its output when it fails."""
    done = subprocess.run(line.split(), check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        raise OSError(f"{line}: {done.stdout.strip()}")


def missing() -> str:
    """The reason why namespaces cannot be made; empty when they can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    for tool in ("ip", "tc", "ss"):
        if shutil.which(tool) is None:
            return f"{tool} is not installed (Debian: iproute2)"
    try:
        with Namespaces():
            return ""
    except OSError as error:
        return str(error)


def main() -> None:
    """Measures every rate, prints the table, saves it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_rank_options(parser)
    parser.add_argument("--rates", nargs="+", default=list(SIZES), help="unlimited, or rates as tc writes them")
    parser.add_argument("--sizes", nargs="+", type=parse_size, help="the same sizes at every rate, e.g. 16MiB")
    parser.add_argument("--budget", type=float, default=6.0, help="seconds per case, roughly")
    parser.add_argument("--local-ranks", type=int, default=1, help="ranks on each of the two hosts")
    parser.add_argument("--slow-stream", action="store_true", help="one of two streams has a tenth of the rate")
    parser.add_argument("--if-possible", action="store_true", help="print the reason where it cannot measure")
    args = parser.parse_args()
    if args.child:
        child(json.loads(args.child))
        return
    why = missing()
    if why and args.if_possible:
        print(f"nothing measured between network namespaces: {why}")
        return
    if why:
        raise SystemExit(why)
    if args.quick:
        args.rates, args.sizes, args.budget = args.rates[:1], [1 << 20], 0.05
    rows: list[dict[str, Any]] = []
    # SIGTERM removes the namespaces too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    print(machine())
    ratios = ("rates",) if args.slow_stream else ("gloo", "bare")
    heads = ("ours ms", "gloo ms", "bare ms", "ours GB/s", *(f"x {name}" for name in ratios))
    print(f"{'rate':>10} {'bytes':>7}", *(f"{head:>9}" for head in heads))
    for rate in [f"{HEALTHY}+{SLOW}mbit"] if args.slow_stream else args.rates:
        with Namespaces() as namespaces:
            namespaces.classes() if args.slow_stream else namespaces.limit(rate)
            sizes = args.sizes or [parse_size(size) for size in SIZES.get(rate, SIZES["1gbit"])]
            for row in namespaces.run(args, sizes):
                seconds = {name: row.get(f"{name}_seconds", float("nan")) for name in ("ours", "gloo", "bare")}
                ours, bare = seconds["ours"], seconds["bare"]
                against = {"gloo": seconds["gloo"], "bare": bare, "rates": bare / (1 + SLOW / HEALTHY)}
                found = {f"x_{name}": against[name] / ours for name in ratios}
                figures = [*(value * 1e3 for value in seconds.values()), row["bytes"] / ours / 1e9, *found.values()]
                cells = " ".join(f"{figure:>9.3g}" if figure < 0.1 else f"{figure:>9.2f}" for figure in figures)
                print(f"{rate:>10} {show_size(row['bytes']):>7} {cells}", flush=True)
                rows.append({"rate": rate, "ranks": 2 * args.local_ranks, **row, **found})
    save_if_asked(args, Path(__file__).stem, rows)


if __name__ == "__main__":
    main()
