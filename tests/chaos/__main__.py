"""Runs the matrix: every action while every fault happens, by 2 and 4 ranks, over shared memory, TCP and both.

    sudo python -m tests.chaos                                   # all cells, at most 10 minutes on 2 cores
    sudo python -m tests.chaos --actions training --faults SIGKILL "link down"
    sudo python -m tests.chaos --ranks 20 --transports shm hier  # more ranks than have a connection to every other
    sudo python -m tests.chaos --record                          # saves the table in benchmarks/record

A cell is right when no rank hangs, every error names the rank that the fault hit (or an end of the line that it hit), a
delay and a slow line change no result, and no process, thread, descriptor or file is left. The exit code is 1 when a
cell is wrong. Cells that cannot exist are in the table too, with the reason.
"""

from __future__ import annotations

import argparse
import os
import queue
import re
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.chaos import network
from tests.chaos.actions import ACTIONS, ELASTIC
from tests.chaos.cell import Cell, Row, run
from tests.chaos.faults import FAULTS
from tests.chaos.network import Network
from tests.chaos.rank import nothing, work
from tests.world import World

#: Cells that run at once. Most of a cell's time is spent waiting for a heartbeat that does not come.
AT_ONCE = 6
RANKS = (2, 4)
#: On as many hosts as there are in a network of the tests.
MANY = 20
HOSTS = 4
TRANSPORTS = ("shm", "tcp", "hier")


def why_left_out(cell: Cell, no_network: str) -> str:
    """The reason why there is no such cell; "" when there is."""
    if cell.transport == "hier" and cell.ranks == 2:
        return "hier needs two hosts, and two ranks on one of them"
    if len(cell.hosts) > HOSTS:
        return f"{len(cell.hosts)} hosts: there are {HOSTS}"
    if cell.transport == "shm" and FAULTS[cell.fault].on_the_network:
        return "ranks that share memory have no line between them"
    return no_network if cell.transport != "shm" else ""


def words(row: Row) -> dict[str, Any]:
    """The row of the table."""
    fault = FAULTS[row.cell.fault]
    latency = list(row.latency.values())
    # Without what the ranks printed, and without where this machine keeps files.
    wrong = [
        re.sub(r"; flight record: \S+|(; )?rank \d+ was still running.*|\s*--- rank.*", "", " ".join(each.split()))
        for each in row.wrong
    ]
    outcome = "right result" if fault.harmless else "goes on" if row.unnoticed or not row.kinds else "error"
    return {
        "outcome": "wrong: " + "; ".join(filter(None, wrong)) if row.wrong else outcome,
        "hit": row.cell.victim,
        "errors": " ".join(sorted(row.kinds)),
        "named": " ".join(f"{rank}:{'+'.join(map(str, names)) or '-'}" for rank, names in sorted(row.named.items())),
        "median_seconds": round(statistics.median(latency), 4) if latency else "",
        "worst_seconds": round(max(latency), 4) if latency else "",
        "left_behind": "; ".join(row.left) or "nothing",
    }


def files() -> set[str]:
    """Shared memory that has a name."""
    return {path.name for path in Path("/dev/shm").iterdir() if "bagua" in path.name}


def main() -> int:
    """Runs the cells that are asked for; the exit code."""
    actions = (*ACTIONS, *ELASTIC)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--actions", nargs="+", default=actions, choices=actions, metavar="ACTION")
    parser.add_argument("--faults", nargs="+", default=tuple(FAULTS), choices=tuple(FAULTS), metavar="FAULT")
    parser.add_argument("--ranks", nargs="+", type=int, default=RANKS, choices=(*RANKS, MANY))
    parser.add_argument("--transports", nargs="+", default=TRANSPORTS, choices=TRANSPORTS)
    parser.add_argument("--record", action="store_true", help="save the table in benchmarks/record/")
    parser.add_argument("--verbose", action="store_true", help="print everything that is known of a wrong cell")
    args = parser.parse_args()
    no_network = network.why_not()
    cells = [
        Cell(action, fault, ranks, transport)
        for fault in args.faults
        for action in args.actions
        for transport in args.transports
        for ranks in args.ranks
    ]
    before, begun = files(), time.monotonic()
    # Torch is imported before any time is taken.
    World(2, timeout=300.0).run(nothing)
    networks: queue.SimpleQueue[Network | None] = queue.SimpleQueue()
    at_once = max(1, AT_ONCE * max(RANKS) // max(*RANKS, *args.ranks))
    for number in range(at_once):
        networks.put(None if no_network else Network(HOSTS, number))
    rows: dict[Cell, dict[str, Any]] = {}

    def one(cell: Cell) -> None:
        if reason := why_left_out(cell, no_network):
            rows[cell] = {"outcome": f"left out: {reason}"}
            return
        own = networks.get()
        try:
            row = run(cell, None if cell.transport == "shm" else own, work)
        except Exception as error:
            row = Row(cell, wrong=[f"{type(error).__name__}: {error}"])
        finally:
            networks.put(own)
        rows[cell] = words(row)
        shown = rows[cell]
        print(
            f"{cell}: {shown['outcome']}", shown["named"], shown["median_seconds"], shown["worst_seconds"], flush=True
        )
        if row.left:
            print(f"    left behind: {shown['left_behind']}", flush=True)
        if args.verbose and row.wrong:
            print(*row.wrong, sep="\n", flush=True)

    # The faults take turns, so that cells that compute run beside cells that wait.
    by_turns = sorted(cells, key=lambda cell: (cells.index(cell) % (len(cells) // len(args.faults)), cell.fault))
    with ThreadPoolExecutor(at_once) as pool:
        list(pool.map(one, by_turns))
    while not networks.empty():
        own = networks.get()
        if own is not None:
            own.close()
    wrong = [cell for cell in cells if rows[cell]["outcome"].startswith("wrong") or not is_clean(rows[cell])]
    left_out = sum(rows[cell]["outcome"].startswith("left out") for cell in cells)
    taken = time.monotonic() - begun
    print(f"{len(cells) - left_out} cells in {taken:.0f} s, {left_out} left out; wrong: {len(wrong)}")
    for cell in wrong:
        print(f"  {cell}: {rows[cell]}")
    if more := files() - before:
        print(f"left in /dev/shm: {sorted(more)}")
    if args.record:
        sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
        import common

        fields = ("action", "fault", "ranks", "transport")
        table = [{**{name: getattr(cell, name) for name in fields}, **rows[cell]} for cell in cells]
        print(f"written: {common.save('chaos', table, common.HERE / 'record')}")
    return 1 if wrong or more else 0


def is_clean(row: dict[str, Any]) -> bool:
    """Returns True if nothing was left behind."""
    return row.get("left_behind", "nothing") == "nothing"


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    # What torch imported says more at the interpreter's end than this program has to say.
    os._exit(code)
