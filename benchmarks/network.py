"""all_reduce between two network namespaces: ours, torch gloo and a bare pair of sockets, at full and at limited rates.

Needs root and the tools ``ip`` and ``tc``: it makes two network namespaces joined by a veth pair, one rank in each, and
takes them away again. Nothing outside of them is touched::

    sudo python benchmarks/network.py                          # unlimited, 10, 1 and 0.1 Gbit/s
    sudo python benchmarks/network.py --rates 1gbit --sizes 16MiB --record

A limited rate is ``tc qdisc add dev X root tbf rate R burst 256kb latency 50ms`` on both ends. The contenders take
turns, call by call, in the same two processes; buffers are rewritten before every call and every answer is checked. A
call's time is that of its slower rank, the figure is the median over calls. Between two ranks an all_reduce must move
as many bytes each way as the tensor has, and so many the bare sockets move, both ways at once, without any protocol:
what they reach is what the network gives to one connection.

Columns: milliseconds, gigabytes of the tensor per second, and how many times faster ours is than gloo and than the bare
sockets.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import json
import os
import platform
import select
import shutil
import signal
import socket
import statistics
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
ADDRESSES = ("10.77.0.1", "10.77.0.2")
TALK_PORT, GLOO_PORT, OURS_PORT = 29701, 29702, 29703
UNLIMITED = "unlimited"
#: Sizes that take neither too short nor too long to be measured at a rate.
SIZES = {
    UNLIMITED: ("64KiB", "1MiB", "16MiB", "64MiB"),
    "10gbit": ("1MiB", "16MiB", "64MiB"),
    "1gbit": ("1MiB", "16MiB"),
    "100mbit": ("1MiB", "4MiB"),
}
UNITS = {"MiB": 1 << 20, "KiB": 1 << 10}
#: A case is over after so many seconds, but not before so many calls of each contender.
LONG_ENOUGH = (6.0, 5)
#: Most that a bare socket is given or asked for at a time.
BLOCK = 256 << 10


def parse_size(text: str) -> int:
    """Turn ``"16MiB"`` into bytes."""
    unit = text[-3:]
    if unit not in UNITS:
        raise argparse.ArgumentTypeError(f"{text!r} is neither so many KiB nor MiB")
    return int(text[:-3]) * UNITS[unit]


class Line:
    """Two connections between the ranks: one to talk by, one to move bytes without any protocol."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        if rank == 0:
            with socket.create_server((ADDRESSES[0], TALK_PORT)) as server:
                self.talk, self.bare = server.accept()[0], server.accept()[0]
        else:
            self.talk, self.bare = connect(), connect()
        for one in (self.talk, self.bare):
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.bare.setblocking(False)

    def swap(self, mine: float) -> float:
        """Tell the other rank a number and hear its."""
        self.talk.sendall(struct.pack("<d", mine))
        theirs = self.talk.recv(8, socket.MSG_WAITALL)
        if len(theirs) < 8:
            raise ConnectionError("the other rank is gone")
        return float(struct.unpack("<d", theirs)[0])

    def move(self, out: memoryview, into: memoryview) -> None:
        """Send and receive at once."""
        sent = got = 0
        poller = select.poll()
        while sent < len(out) or got < len(into):
            wanted = (select.POLLOUT if sent < len(out) else 0) | (select.POLLIN if got < len(into) else 0)
            poller.register(self.bare, wanted)
            poller.poll()
            try:
                while sent < len(out):
                    sent += self.bare.send(out[sent : sent + BLOCK])
            except BlockingIOError:
                pass
            try:
                while got < len(into):
                    count = self.bare.recv_into(into[got : got + BLOCK])
                    if count == 0:
                        raise ConnectionError("the other rank is gone")
                    got += count
            except BlockingIOError:
                pass


def connect() -> socket.socket:
    """Connect to rank 0, which may not listen yet."""
    until = time.monotonic() + 30
    while True:
        try:
            return socket.create_connection((ADDRESSES[0], TALK_PORT), timeout=None)
        except ConnectionRefusedError:
            if time.monotonic() > until:
                raise
            time.sleep(0.05)


def run_rank(rank: int, sizes: Sequence[int]) -> None:
    """Measure on one rank; rank 0 writes one line of JSON per size."""
    import torch
    import torch.distributed as dist

    import bagua

    line = Line(rank)
    dist.init_process_group("gloo", init_method=f"tcp://{ADDRESSES[0]}:{GLOO_PORT}", rank=rank, world_size=2)
    group = bagua.init(rank, 2, f"tcp://{ADDRESSES[0]}:{OURS_PORT}")
    for size in sizes:
        ours, theirs = torch.zeros(size // 4), torch.zeros(size // 4)
        out, into = bytearray(size), bytearray(size)
        calls: dict[str, tuple[Callable[[], object], Callable[[float], bool]]] = {
            "ours": (
                lambda ours=ours: group.all_reduce(ours, out=ours),  # type: ignore[misc]
                lambda total, ours=ours: bool((ours == total).all()),  # type: ignore[misc]
            ),
            "gloo": (
                lambda theirs=theirs: dist.all_reduce(theirs),  # type: ignore[misc]
                lambda total, theirs=theirs: bool((theirs == total).all()),  # type: ignore[misc]
            ),
            "bare": (
                lambda out=out, into=into: line.move(memoryview(out), memoryview(into)),  # type: ignore[misc]
                lambda _total, into=into: into[0] == into[-1] == 2 - rank,  # type: ignore[misc]
            ),
        }
        times: dict[str, list[float]] = {name: [] for name in calls}
        start = time.monotonic()
        turn = 0
        while True:
            values = (turn % 5 + 1.0, turn % 3 + 7.0)
            for name, (call, is_right) in calls.items():
                ours.fill_(values[rank])
                theirs.fill_(values[rank])
                out[:] = bytes([rank + 1]) * size
                into[:] = bytes(size)
                line.swap(0)
                began = time.perf_counter()
                call()
                took = time.perf_counter() - began
                took = max(took, line.swap(took))
                if not is_right(sum(values)):
                    raise AssertionError(f"{name} gave a wrong answer for {size} bytes")
                # The first turn opens connections and windows.
                if turn > 0:
                    times[name].append(took)
            turn += 1
            over = float(time.monotonic() - start > LONG_ENOUGH[0] and turn > LONG_ENOUGH[1])
            heard = line.swap(over)
            if (over if rank == 0 else heard) > 0:
                break
        if rank == 0:
            medians = {name: statistics.median(taken) for name, taken in times.items()}
            print(json.dumps({"bytes": size, "calls": turn - 1, **medians}), flush=True)
    bagua.shutdown()
    dist.destroy_process_group()


class Namespaces:
    """Two network namespaces joined by a veth pair."""

    def __init__(self) -> None:
        self.names = [f"bagua-bench-{os.getpid()}-{rank}" for rank in range(2)]

    def __enter__(self) -> Namespaces:
        try:
            for name in self.names:
                command("ip", "netns", "add", name)
            ends = [["name", "bench", "netns", name] for name in self.names]
            command("ip", "link", "add", *ends[0], "type", "veth", "peer", *ends[1])
            for rank, name in enumerate(self.names):
                command("ip", "-n", name, "addr", "add", f"{ADDRESSES[rank]}/24", "dev", "bench")
                command("ip", "-n", name, "link", "set", "bench", "up")
                command("ip", "-n", name, "link", "set", "lo", "up")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for name in self.names:
            # One that was never made is no error.
            subprocess.run(["ip", "netns", "del", name], check=False, stderr=subprocess.DEVNULL)

    def limit(self, rate: str) -> None:
        """Shape what leaves both ends."""
        for name in self.names:
            inside = ["tc", "-n", name, "qdisc"]
            subprocess.run([*inside, "del", "dev", "bench", "root"], check=False, stderr=subprocess.DEVNULL)
            if rate != UNLIMITED:
                shape = ["rate", rate, "burst", "256kb", "latency", "50ms"]
                command(*inside, "add", "dev", "bench", "root", "tbf", *shape)

    def run(self, sizes: Sequence[int]) -> list[dict[str, float]]:
        """Run both ranks and return what rank 0 measured."""
        environment = {**os.environ, "GLOO_SOCKET_IFNAME": "bench", "OMP_NUM_THREADS": "1"}
        ranks = []
        for rank, name in enumerate(self.names):
            program = [sys.executable, str(HERE / "network.py"), "--rank", str(rank), "--bytes", *map(str, sizes)]
            ranks.append(
                subprocess.Popen(
                    ["ip", "netns", "exec", name, *program], stdout=subprocess.PIPE, env=environment, text=True
                )
            )
        try:
            lines = [rank.communicate()[0] for rank in ranks]
        finally:
            for process in ranks:
                process.kill()
        if any(rank.returncode for rank in ranks):
            raise SystemExit("a rank failed; its own words stand above")
        return [json.loads(line) for line in lines[0].splitlines() if line.startswith("{")]


def command(*words: str) -> None:
    """Run a command that must work."""
    subprocess.run(words, check=True)


def commit() -> str:
    """Which version is measured."""
    found = subprocess.run(["git", "-C", str(HERE), "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    return found.stdout.strip() or "unknown"


def main() -> None:
    """Measure every rate and print the table."""
    parser = argparse.ArgumentParser(description="all_reduce between two network namespaces")
    parser.add_argument("--rates", nargs="+", default=list(SIZES), help="unlimited, or rates as tc writes them")
    parser.add_argument("--sizes", nargs="+", type=parse_size, help="the same sizes at every rate, e.g. 16MiB")
    parser.add_argument("--record", action="store_true", help="add the table to benchmarks/record/network.csv")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--bytes", nargs="+", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        run_rank(options.rank, options.bytes)
        return
    if os.geteuid() != 0 or not (shutil.which("ip") and shutil.which("tc")):
        raise SystemExit("this benchmark makes network namespaces: it needs root, ip and tc")
    rows = []
    # Ended from outside, it takes the namespaces away all the same.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    heads = ("ours ms", "gloo ms", "bare ms", "ours GB/s")
    print(f"{'rate':>10} {'bytes':>9}", *(f"{head:>9}" for head in heads), f"{'x gloo':>7} {'x bare':>7}")
    with Namespaces() as namespaces:
        for rate in options.rates:
            namespaces.limit(rate)
            sizes = options.sizes or [parse_size(size) for size in SIZES.get(rate, SIZES["1gbit"])]
            for row in namespaces.run(sizes):
                ours, gloo, bare = row["ours"], row["gloo"], row["bare"]
                speed = row["bytes"] / ours / 1e9
                print(
                    f"{rate:>10} {row['bytes']:>9} {ours * 1e3:>9.2f} {gloo * 1e3:>9.2f} {bare * 1e3:>9.2f} "
                    f"{speed:>9.3f} {gloo / ours:>7.2f} {bare / ours:>7.2f}",
                    flush=True,
                )
                rows.append({"rate": rate, **row, "x_gloo": gloo / ours, "x_bare": bare / ours})
    if options.record:
        path = HERE / "record" / "network.csv"
        path.parent.mkdir(exist_ok=True)
        about = {
            "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
            "commit": commit(),
            "machine": f"{platform.machine()}, {os.cpu_count()} cores, Linux {platform.release()}",
        }
        is_new = not path.exists()
        with path.open("a", newline="") as file:
            writer = csv.DictWriter(file, [*about, *rows[0]])
            if is_new:
                writer.writeheader()
            writer.writerows({**about, **row} for row in rows)


if __name__ == "__main__":
    main()
