"""One cell of the matrix: an action, a fault, so many ranks, over one transport."""

from __future__ import annotations

import json
import math
import tempfile
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.chaos import averaging
from tests.chaos.actions import ACTIONS, ELASTIC
from tests.chaos.faults import FAULTS, Fault
from tests.chaos.network import Network
from tests.world import RankFailed, Run, World

#: Seconds; shorter than the default, because every frozen rank costs as much.
HEARTBEAT_TIMEOUT = 1.5
#: Seconds within which a closed stream that an operation needs is noticed: 400 ms are for a better explanation.
NOTICED_WITHIN = 2.0
#: Seconds after which a cell hangs; twice as many for a fault that only makes it slow: with 200 ms of delay each way,
#: forming a group of four and gloo's take 30 round trips.
LIMIT = 30.0
#: The most ranks for which these times are; all of more take longer to start, and to form gloo's groups.
FEW = 4


@dataclass(frozen=True)
class Cell:
    """Which cell."""

    action: str
    fault: str
    ranks: int
    transport: str

    def __str__(self) -> str:
        return f"{self.action}, {self.fault}, {self.ranks} ranks, {self.transport}"

    @property
    def victim(self) -> int:
        """The rank that the fault hits: another one in each cell, always the same one in this."""
        return zlib.crc32(str(self).encode()) % self.ranks

    @property
    def slowness(self) -> float:
        """How many times as long it takes to start the ranks, and to form groups, as it does with a few."""
        return max(1.0, self.ranks / FEW)

    @property
    def hosts(self) -> list[list[int]]:
        """The ranks of each host."""
        if self.transport == "shm":
            return [list(range(self.ranks))]
        if self.transport == "tcp":
            return [[rank] for rank in range(self.ranks)]
        each = max(2, self.ranks // 4)
        return [list(range(first, first + each)) for first in range(0, self.ranks, each)]

    def host_of(self, rank: int) -> int:
        """The number of its host."""
        return next(host for host, ranks in enumerate(self.hosts) if rank in ranks)


@dataclass
class Row:
    """The outcome of a cell."""

    cell: Cell
    #: Seconds from the fault to the error, of each rank that raised; of a rank that goes on, until it has rebuilt.
    latency: dict[int, float] = field(default_factory=dict)
    #: The ranks that each rank's error named.
    named: dict[int, list[int]] = field(default_factory=dict)
    #: The classes of the errors.
    kinds: set[str] = field(default_factory=set)
    #: Seconds from the fault until the last rank was done.
    took: float = 0.0
    #: The operations went on, because none needed what the fault broke.
    unnoticed: bool = False
    #: What was left behind.
    left: list[str] = field(default_factory=list)
    #: What is wrong; empty when nothing is.
    wrong: list[str] = field(default_factory=list)


class RunningCell:
    """A cell while it runs: its processes, its network, and what its ranks say."""

    def __init__(self, cell: Cell, run: Run, network: Network | None, folder: Path) -> None:
        self.cell, self.run, self.network, self.folder = cell, run, network, folder
        self._until = time.monotonic() + LIMIT * (2 if FAULTS[cell.fault].harmless else 1) * cell.slowness
        #: How often each rank had done its action a while after a fault that may go unnoticed.
        self.before: list[int] | None = None
        #: The moment from which the fault may happen.
        self.formed_at = 0.0

    def said(self, rank: int, what: str) -> dict[str, Any] | None:
        """The line in which a rank said that, if it has."""
        return next(iter(self.all_said(rank, what)), None)

    def goes_on(self) -> bool:
        """Returns True if all ranks continued after a fault that may go unnoticed."""
        return self.before is not None and all(
            now >= then + 5 for now, then in zip(self.steps(), self.before, strict=True)
        )

    def steps(self) -> list[int]:
        """How often each rank has done its action."""
        paths = [self.folder / f"steps{rank}" for rank in range(self.cell.ranks)]
        return [int.from_bytes(path.read_bytes(), "little") if path.exists() else 0 for path in paths]

    def all_said(self, rank: int, what: str) -> list[dict[str, Any]]:
        """All such lines of a rank."""
        path = self.folder / f"said{rank}"
        lines = path.read_text().splitlines() if path.exists() else []
        return [words for words in map(_parsed, lines) if words.get("what") == what]

    def until(self, holds: Callable[[], bool], within: float = math.inf) -> bool:
        """Waits until that holds; whether it did in time."""
        until = min(self._until, time.monotonic() + within)
        while not holds():
            if time.monotonic() > until:
                return False
            time.sleep(0.005)
        return True

    def await_all(self, what: str, ranks: list[int], within: float = math.inf) -> list[int]:
        """Waits until these ranks have said that. Those that have not when the time is over or they ended."""
        until = min(self._until, time.monotonic() + within)
        while True:
            silent = [rank for rank in ranks if self.said(rank, what) is None]
            running = [rank for rank in silent if self.run.ranks[rank].poll() is None]
            if not running or time.monotonic() > until or self.goes_on():
                # What one said just before it ended.
                return [rank for rank in silent if self.said(rank, what) is None]
            time.sleep(0.005)


def _parsed(line: str) -> dict[str, Any]:
    try:
        words: dict[str, Any] = json.loads(line)
    except json.JSONDecodeError:
        # Not all of it has been written.
        return {}
    return words


def run(cell: Cell, network: Network | None, work: Callable[..., None]) -> Row:
    """Runs a cell. `network` has as many hosts as the cell needs; None for one without."""
    fault = FAULTS[cell.fault]()
    row = Row(cell)
    timeout = ACTIONS[cell.action].timeout if cell.action in ACTIONS else LIMIT / 2
    env = {
        # A joining rank that finds no other rank any more has to give up before the cell does.
        "BAGUA_TIMEOUT": str(timeout * cell.slowness),
        # The name of this machine means nothing in a namespace, and gloo would look it up.
        "GLOO_SOCKET_IFNAME": "lo" if network is None else "line",
    }
    # Where 75 connections share a line whose queue holds six packets, most of them are lost, those with heartbeats too.
    if not (fault.harmless and cell.ranks > FEW):
        env["BAGUA_HEARTBEAT_TIMEOUT"] = str(HEARTBEAT_TIMEOUT)
    namespaces = None
    if network is not None:
        network.set({})
        namespaces = [network.namespaces[cell.host_of(rank)] for rank in range(cell.ranks)]
        env["MASTER_ADDR"] = network.addresses[0]
    world = World(
        cell.ranks,
        env=env,
        hosts=cell.hosts,
        namespaces=namespaces,
        expect_exit={cell.victim: -9} if fault.kills else {},
        timeout=20.0 * cell.slowness,
    )
    with tempfile.TemporaryDirectory(prefix="bagua-chaos-") as folder:
        arguments = (cell.ranks, cell.action, folder, fault.harmless)
        with world.running(work, *arguments) as started:
            stage = RunningCell(cell, started, network, Path(folder))
            if cell.action in ELASTIC:
                averaging.play(stage, fault, row)
            else:
                _play(stage, fault, row)
            try:
                if cell.action in ELASTIC or not row.unnoticed:
                    started.results()
            except RankFailed as failure:
                row.wrong.append(str(failure))
    return row


def _play(stage: RunningCell, fault: Fault, row: Row) -> None:
    cell = stage.cell
    everybody = list(range(cell.ranks))
    others = [rank for rank in everybody if rank != cell.victim]
    try:
        if silent := stage.await_all("ready", everybody):
            texts = {words["text"] for rank in silent if (words := stage.said(rank, "ended"))}
            row.wrong.append(f"ranks {silent} never came to the action: {sorted(texts)}")
            return
        at = fault.strike(stage)
        Path(stage.folder, "go").touch()
        if fault.may_go_unnoticed:
            stage.await_all("ended", everybody, within=NOTICED_WITHIN)
            stage.before = stage.steps()
        noticing = others if fault.kills or fault.freezes else everybody
        hung = stage.await_all("ended", noticing)
        if hung and stage.goes_on():
            row.unnoticed = True
            return
        if hung:
            row.wrong.append(f"ranks {hung} hung, or ended without a word")
    finally:
        fault.end(stage)
    running = others if fault.kills else everybody
    if hung := stage.await_all("left", running):
        row.wrong.append(f"ranks {hung} never left")
    row.took = max((words["at"] for rank in running if (words := stage.said(rank, "ended"))), default=at) - at
    for rank in running:
        _judge(stage, fault, row, rank, at)
    results = {words["text"] for rank in running if (words := stage.said(rank, "ended")) and not words["kind"]}
    if len(results) > 1:
        row.wrong.append(f"ranks have different results: {results}")


def _judge(stage: RunningCell, fault: Fault, row: Row, rank: int, at: float) -> None:
    cell = stage.cell
    if (left := stage.said(rank, "left")) and left["left"]:
        row.left += [f"rank {rank}: {what}" for what in left["left"]]
    ended = stage.said(rank, "ended")
    if ended is None:
        return
    kind, names = ended["kind"], set(ended["named"])
    if not kind:
        if not fault.harmless:
            row.wrong.append(f"rank {rank} noticed nothing")
        return
    row.kinds.add(kind)
    row.named[rank] = ended["named"]
    allowed = fault.may_be_named(cell, rank)
    action = ACTIONS[cell.action]
    if not (fault.freezes and rank == cell.victim):
        row.latency[rank] = ended["at"] - at
    if action.joins and (kind == "BaguaTimeoutError" or (fault.freezes and rank == cell.victim)):
        # A rank also misses those that have given up before it; one that was frozen misses any.
        right = bool(names & allowed) or rank == cell.victim
    elif kind == "GoesOn" and fault.freezes and rank == cell.victim:
        # The others had no quorum, or were away for so long.
        right = bool(names)
    elif kind in ("quorum", "store"):
        right = not names
    else:
        right = bool(names) and names <= allowed
    if fault.harmless or kind not in action.errors + fault.errors or not right:
        row.wrong.append(f"rank {rank} may name {sorted(allowed)}: {kind}: {ended['text']}")
