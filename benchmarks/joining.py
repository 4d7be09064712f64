"""Many more ranks than cores, on one machine: seconds to join, descriptors, memory, whether all stay, and a loss.

    python benchmarks/joining.py
    python benchmarks/joining.py --ranks 256 1024 --hosts 8 --idle 60
    python benchmarks/joining.py --ranks 64 256 --kill 0           # or --kill 5 6, --freeze 9
    python benchmarks/joining.py --ranks 64 256 --kill 9 --shrink --idle 1

Each rank is a fork of this process, which has imported NumPy and bagua only. It joins, does nothing for `--idle`
seconds but exchange heartbeats, and sums tensors of `--sizes` with the others, each twice: `first_ms` and `second_ms`
are the times of the slowest rank, and the first opens the streams that there are not yet. A healthy rank that another
one lost is an error. `joined_s` is the time from the first fork to the last rank that has joined, `cpu_s` the processor
time of all ranks until then, `root_cpu_s` that of rank 0, with which all register. `descriptors` are those that joining
has added to the rank that has most of them, and after a `+` what each size has added. `own_mib` is the memory that
joining and the operations have added to the rank that has most of it: pages of its own, and its part of those that
ranks share. With `--kill` or `--freeze` these ranks end or stop while all others wait for them in an all_reduce:
`lost_s` is the time until the last one has raised PeerLostError; all must name one of these ranks. With `--shrink` the
others go on in a smaller group, and end when all have it: `view_first_s` and `view_last_s` are the times from the loss
until the first and the last of them has it, with a lane that has passed a barrier; `messages` and `kbytes` those that
they sent to agree, in all, and `view_cpu_s` their processor time from the loss on. A rank that raises writes a flight
record before, unless `BAGUA_TRACE_DIR` is empty.
"""

from __future__ import annotations

import argparse
import gc
import json
import mmap
import os
import resource
import signal
import socket
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

import numpy as np
from common import Barrier, add_output_options, machine, parse_size, save_if_asked

import bagua

#: How far a rank is: it has counted its descriptors, and waits for the end or for those that are to be lost; it is in
#: the smaller group, or has failed.
WAITS, SMALLER = 1, 2


def main() -> None:
    """Parses the command line, measures, prints, keeps."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_output_options(parser)
    parser.add_argument("--ranks", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--hosts", type=int, default=1, help="make this machine look like so many hosts")
    parser.add_argument("--idle", type=float, default=20.0, help="seconds without an operation")
    parser.add_argument("--sizes", nargs="+", type=parse_size, default=[1 << 10], help="bytes to sum, in turn")
    parser.add_argument("--kill", type=int, nargs="+", default=[], help="ranks that end by SIGKILL in the end")
    parser.add_argument("--freeze", type=int, nargs="+", default=[], help="ranks that stop by SIGSTOP in the end")
    parser.add_argument("--shrink", action="store_true", help="the other ranks go on without those")
    args = parser.parse_args()
    if args.quick:
        args.ranks, args.idle, args.kill, args.shrink = [4], 0.5, [1], True
    print(machine())
    columns: tuple[str, ...] = (
        "ranks",
        "hosts",
        "joined_s",
        "cpu_s",
        "root_cpu_s",
        "descriptors",
        "threads",
        "own_mib",
    )
    columns += ("first_ms", "second_ms", "lost_s")
    columns += ("view_first_s", "view_last_s", "messages", "kbytes", "view_cpu_s") if args.shrink else ()
    print("".join(f"{name:>14}" for name in columns))
    rows = []
    for ranks in args.ranks:
        with tempfile.TemporaryDirectory() as folder, socket.socket() as reserved:
            # Bound and not listening: no other process gets the port before rank 0 listens there.
            reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            reserved.bind(("127.0.0.1", 0))
            rows.append(measure(ranks, args, reserved.getsockname()[1], folder))
        print("".join(f"{shown(rows[-1][name]):>14}" for name in columns), flush=True)
    save_if_asked(args, Path(__file__).stem, rows)


def shown(value: Any) -> str:
    """A figure in few characters."""
    return value if isinstance(value, str) else "" if value is None else f"{value:.4g}"


def measure(ranks: int, args: argparse.Namespace, port: int, folder: str) -> dict[str, Any]:
    """Forks the ranks, which join at this port, and waits for them; RuntimeError when one of them failed."""
    # A byte for each rank, how far it is: see `WAITS`.
    waits = mmap.mmap(-1, ranks)
    leaves, may_leave = os.pipe()
    # A collection in a rank would copy the pages that it shares with this process; ranks of a job share none.
    gc.freeze()
    before = memory_of_python()
    begun, pipes, ids = time.monotonic(), list[int](), list[int]()
    for rank in range(ranks):
        reads, writes = os.pipe()
        child = os.fork()
        if child == 0:
            for other in (reads, may_leave, *pipes):
                os.close(other)
            os._exit(run(rank, ranks, args, port, folder, waits, leaves, writes))
        os.close(writes)
        pipes.append(reads)
        ids.append(child)
    victims = {*args.kill, *args.freeze}
    lost_at = lose(ids, args, waits) if victims else None
    wait_for(SMALLER if victims and args.shrink else WAITS, ids, args, waits)
    os.close(may_leave)
    os.close(leaves)
    said = []
    for rank, pipe in enumerate(pipes):
        with open(pipe) as lines:
            said.append("" if rank in victims else lines.read())
    for rank in args.freeze:
        os.kill(ids[rank], signal.SIGKILL)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in ids]
    good = [rank for rank in range(ranks) if rank not in victims]
    bad = [f"rank {rank} ended with {codes[rank]}: {said[rank][-300:]}" for rank in good if codes[rank] != 0]
    if bad:
        raise RuntimeError(f"{len(bad)} of {ranks} ranks failed:\n" + "\n".join(bad[:5]))
    found = [json.loads(said[rank]) for rank in good]
    row = {key: max(each[key] for each in found) for key in ("threads", "own_mib")}
    row["own_mib"] -= before
    for call in ("first_ms", "second_ms"):
        times = zip(*(each[call] for each in found), strict=True)
        row[call] = "+".join(f"{max(of_ranks):.3g}" for of_ranks in times)
    row |= {"ranks": ranks, "hosts": args.hosts, "joined_s": max(each["joined"] for each in found) - begun}
    row |= {"cpu_s": sum(each["cpu_s"] for each in found)}
    row |= {"root_cpu_s": found[0]["cpu_s"] if good[0] == 0 else None}
    row["descriptors"] = max((each["descriptors"] for each in found), key=lambda counts: counts[-1] - counts[0])
    first, *later = [after - before for before, after in zip(row["descriptors"], row["descriptors"][1:], strict=False)]
    row["descriptors"] = "+".join(map(str, [first, *later]))
    row["lost_s"] = None if lost_at is None else max(each["raised"] for each in found) - lost_at
    if lost_at is not None and args.shrink:
        opened = [each["opened"] - lost_at for each in found]
        row |= {"view_first_s": min(opened), "view_last_s": max(opened)}
        row |= {key: sum(each[key] for each in found) for key in ("messages", "kbytes", "view_cpu_s")}
    if lost_at is not None and (wrong := {each["named"] for each in found} - victims):
        raise RuntimeError(f"ranks {sorted(wrong)} were named as lost, and {sorted(victims)} are")
    return row


def lose(ids: list[int], args: argparse.Namespace, waits: mmap.mmap) -> float:
    """Ends and stops the ranks of the command line, when all others wait for them; the time at which it did."""
    wait_for(WAITS, ids, args, waits)
    time.sleep(0.5)
    begun = time.monotonic()
    for rank in args.kill:
        os.kill(ids[rank], signal.SIGKILL)
    for rank in args.freeze:
        os.kill(ids[rank], signal.SIGSTOP)
    return begun


def wait_for(state: int, ids: list[int], args: argparse.Namespace, waits: mmap.mmap) -> None:
    """Waits until all but the ranks of the command line are so far, or for two minutes."""
    victims, limit = {*args.kill, *args.freeze}, time.monotonic() + 120
    while any(waits[rank] < state for rank in range(len(ids)) if rank not in victims) and time.monotonic() < limit:
        time.sleep(0.001)


def run(
    rank: int,
    ranks: int,
    args: argparse.Namespace,
    port: int,
    folder: str,
    waits: mmap.mmap,
    leaves: int,
    pipe: int,
) -> int:
    """One rank: writes what it saw into a pipe, and returns its exit code."""
    with open(pipe, "w") as says:
        try:
            if args.hosts > 1:
                os.environ["BAGUA_HOST_ID"] = f"pretended-host-{rank * args.hosts // ranks}"
            meeting = Barrier(folder, rank, ranks)
            counts = [len(os.listdir("/proc/self/fd"))]
            bagua.init(rank=rank, world_size=ranks, init_method=f"tcp://127.0.0.1:{port}")
            row: dict[str, Any] = {"joined": time.monotonic()}
            row |= {"cpu_s": processor_time(), "first_ms": [], "second_ms": []}
            time.sleep(args.idle)
            counts.append(len(os.listdir("/proc/self/fd")))
            for size in args.sizes:
                for call in ("first_ms", "second_ms"):
                    x = np.ones(max(1, size // 4), np.float32)
                    meeting.wait()
                    begun = time.monotonic()
                    bagua.all_reduce(x, op="sum")
                    row[call].append(1e3 * (time.monotonic() - begun))
                    if not (x == ranks).all():
                        raise AssertionError(f"{x[0]} is not the sum of {ranks} ones")
                counts.append(len(os.listdir("/proc/self/fd")))
            row |= {"descriptors": counts, "threads": len(os.listdir("/proc/self/task"))}
            row["own_mib"] = own_memory()
            loses = bool(args.kill or args.freeze)
            if loses:
                row |= wait_for_a_loss(rank, args, waits)
            if args.shrink or not loses:
                # Who leaves needs a processor, which the others need for their views, and they replace its connections.
                waits[rank] = SMALLER if args.shrink else WAITS
                os.read(leaves, 1)
            bagua.shutdown()
            json.dump(row, says)
            return 0
        except BaseException:
            traceback.print_exc(file=says)
            sys.stderr.flush()
            waits[rank] = SMALLER
            return 1


def wait_for_a_loss(rank: int, args: argparse.Namespace, waits: mmap.mmap) -> dict[str, Any]:
    """Waits in an all_reduce for ranks that do not come; who is named as lost, and when. Does not return on those."""
    if rank in args.kill or rank in args.freeze:
        while True:
            time.sleep(60)
    group, begun = bagua.group.default(required=True), processor_time()
    waits[rank] = WAITS
    try:
        bagua.all_reduce(np.ones(256, np.float32), op="sum")
    except bagua.PeerLostError as error:
        row: dict[str, Any] = {"raised": time.monotonic(), "named": error.rank}
    else:
        raise AssertionError("an all_reduce without all ranks has returned")
    if args.shrink:
        view = group.shrink(quorum="any")
        row |= {"opened": time.monotonic(), "view_cpu_s": processor_time() - begun}
        lost = set(range(group.size)) - set(view.former_ranks or [])
        if lost != {*args.kill, *args.freeze}:
            raise AssertionError(f"the view is without {sorted(lost)}")
        agreement = view.stats()["agreement"]
        row |= {"messages": agreement["messages"], "kbytes": agreement["bytes"] / 1e3}
    return row


def processor_time() -> float:
    """Seconds of all threads of this process."""
    times = resource.getrusage(resource.RUSAGE_SELF)
    return times.ru_utime + times.ru_stime


def own_memory() -> float:
    """MiB that only this process has, and its part of what processes share: of a page that n of them map an n-th."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()[1:]
    kib = {name: int(value.split()[0]) for name, value in (line.split(":") for line in lines)}
    return (kib["Private_Dirty"] + kib["Pss_Shmem"]) / 1024


def memory_of_python() -> float:
    """`own_memory` of a fork of this process that has not joined: the pages that Python has written to there."""
    reads, writes = os.pipe()
    child = os.fork()
    if child == 0:
        os.listdir("/proc/self/fd")
        os.write(writes, repr(own_memory()).encode())
        os._exit(0)
    os.close(writes)
    os.waitpid(child, 0)
    with open(reads) as said:
        return float(said.read())


if __name__ == "__main__":
    main()
