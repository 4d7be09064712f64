"""Cells of elastic jobs: no rank raises; the ranks that are left go on averaging, and admit a rank that returns."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import bagua.torch_api
from bagua.torch_api.algorithms import AsyncModelAverageAlgorithm

if TYPE_CHECKING:
    from tests.chaos.cell import Row, RunningCell
    from tests.chaos.faults import Fault
    from tests.chaos.rank import Notes

#: Seconds until all of a few ranks are in the averaging again once a fault is over: they come one after the other.
BACK_WITHIN = 15.0
#: Rounds that a harmless fault must let pass.
ROUNDS = 3


class Model(torch.nn.Module):
    """Weights that every rank pulls towards its own rank, and the average holds together."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(2000))

    def forward(self) -> torch.Tensor:
        """A loss."""
        return self.weight.square().mean()


def work(rank: int, folder: Path, notes: Notes) -> None:
    """A rank: trains until it gets the order to stop, and reports the members whenever they change."""
    bagua.torch_api.init_process_group(elastic=f"file://{folder}/book")
    notes.say("entered")
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model.with_bagua([optimizer], AsyncModelAverageAlgorithm(sync_interval_ms=20))
    notes.say("wrapped", joined=bagua.torch_api.rejoined())
    shown: tuple[Any, ...] = ()
    while not Path(folder, "stop").exists():
        optimizer.zero_grad()
        model().backward()
        optimizer.step()
        stats: dict[str, Any] = model.bagua_algorithm.stats()
        now = (stats["ranks"], sorted(map(int, stats["lost"])))
        if now != shown:
            shown = now
            notes.say("ranks", ranks=now[0], lost=now[1], rounds=stats["rounds"])
        notes.count(stats["rounds"])
        time.sleep(0.002)
    notes.say("ended", kind="", text="", named=[])


def play(stage: RunningCell, fault: Fault, row: Row) -> None:
    """The whole cell. For "join", the fault hits a process that is about to come back into the job."""
    cell = stage.cell
    everybody = list(range(cell.ranks))
    others = [rank for rank in everybody if rank != cell.victim]
    if stage.await_all("wrapped", everybody) or not stage.until(lambda: all_in(stage, everybody, everybody)):
        row.wrong.append("the job was never formed")
        return
    stage.formed_at = time.monotonic()
    if cell.action == "join":
        os.kill(stage.run.ranks[cell.victim].pid, 9)
        if not stage.until(lambda: all_in(stage, others, others)):
            row.wrong.append("the others did not go on without the first process")
            return
        (stage.folder / f"said{cell.victim}").unlink()
        stage.run.start(cell.victim)
        if fault.harmless:
            at = fault.strike(stage)
            if stage.await_all("wrapped", [cell.victim]):
                row.wrong.append("the joining rank was not admitted")
        else:
            if stage.await_all("entered", [cell.victim]):
                row.wrong.append("the joining rank did not find the job")
                return
            at = fault.strike(stage)
    else:
        at = fault.strike(stage)
    if fault.harmless:
        _stays(stage, row, everybody)
    else:
        _goes_on(stage, fault, row, at)
    fault.end(stage)
    again = others if fault.kills else everybody
    # A joining rank that finds no other rank any more looks for the others until BAGUA_TIMEOUT.
    ended = others if cell.action == "join" else again
    if fault.errors and not stage.await_all("left", ended, 3.0):
        if hung := stage.await_all("left", again):
            row.wrong.append(f"ranks {hung} never left")
        _judge_errors(stage, fault, row, ended, at)
        return
    if not stage.until(lambda: all_in(stage, again, again), BACK_WITHIN * cell.slowness):
        row.wrong.append(f"not all are in again: {[last(stage, rank) for rank in again]}")
    row.took = time.monotonic() - at
    (stage.folder / "stop").touch()
    if hung := stage.await_all("left", again):
        row.wrong.append(f"ranks {hung} never left, or raised")
    for rank in again:
        if (left := stage.said(rank, "left")) and left["left"]:
            row.left += [f"rank {rank}: {what}" for what in left["left"]]
        end = stage.said(rank, "ended")
        if end and end["kind"]:
            row.kinds.add(end["kind"])
            row.wrong.append(f"rank {rank} raised {end['kind']}: {end['text']}")


def _judge_errors(stage: RunningCell, fault: Fault, row: Row, ranks: list[int], at: float) -> None:
    """A message that cannot be understood ends the averaging on all ranks, with the error of the other actions."""
    row.unnoticed = False
    row.took = time.monotonic() - at
    for rank in ranks:
        ended, left = stage.said(rank, "ended"), stage.said(rank, "left")
        row.left += [f"rank {rank}: {what}" for what in (left or {}).get("left", [])]
        if ended is None:
            continue
        row.kinds.add(ended["kind"])
        row.latency[rank], row.named[rank] = ended["at"] - at, ended["named"]
        if ended["kind"] not in fault.errors or not set(ended["named"]) <= fault.may_be_named(stage.cell, rank):
            row.wrong.append(f"rank {rank} raised {ended['kind']}: {ended['text']}")


def _stays(stage: RunningCell, row: Row, everybody: list[int]) -> None:
    before = stage.steps()
    if not stage.until(lambda: all(now >= then + ROUNDS for now, then in zip(stage.steps(), before, strict=True))):
        row.wrong.append(f"no rounds: {before} before, {stage.steps()} after")
    if stage.cell.action == "averaging":
        for rank in everybody:
            if any(set(words["lost"]) for words in stage.all_said(rank, "ranks") if words["at"] > stage.formed_at):
                row.wrong.append(f"rank {rank} lost a rank: {last(stage, rank)}")


def _goes_on(stage: RunningCell, fault: Fault, row: Row, at: float) -> None:
    """Waits until those that are left have made a round, and notes whom they call lost and since when."""
    cell = stage.cell
    # One that is left out looks for the job, and does not say so.
    gone = fault.left_out(cell) | ({cell.victim} if cell.action == "join" else set())
    others = [rank for rank in range(cell.ranks) if rank not in gone]

    def apart(rank: int) -> dict[str, Any] | None:
        later = (words for words in stage.all_said(rank, "ranks") if words["at"] > at)
        return next((words for words in later if len(words["ranks"]) < cell.ranks), None)

    if cell.action == "join":
        # Whether the joining rank was in already when it was hit is not said; the others go on in either case.
        before = stage.steps()
        stage.until(
            lambda: all(stage.steps()[rank] >= before[rank] + ROUNDS or stage.said(rank, "ended") for rank in others)
        )
        if any(stage.said(rank, "ended") is None and stage.steps()[rank] < before[rank] + ROUNDS for rank in others):
            row.wrong.append(f"the others did not go on: {[last(stage, rank) for rank in others]}")
    else:
        within = 2.0 if fault.may_go_unnoticed or fault.errors else 10.0
        stage.until(lambda: all(apart(rank) for rank in others), within)
    for rank in others:
        words = apart(rank)
        if words is None:
            row.unnoticed = row.unnoticed or fault.may_go_unnoticed or bool(fault.errors)
            if cell.action == "averaging" and not row.unnoticed:
                row.wrong.append(f"rank {rank} noticed nothing")
            continue
        row.latency[rank] = words["at"] - at
        row.named[rank] = words["lost"]
        # The first process of a joining rank was killed.
        allowed = fault.may_be_named(cell, rank) | ({cell.victim} if cell.action == "join" else set())
        # A rank that the others leave behind loses all of them.
        if not set(words["lost"]) <= allowed and rank not in allowed:
            row.wrong.append(f"rank {rank} may lose {sorted(allowed)}: {words}")


def last(stage: RunningCell, rank: int) -> dict[str, Any] | None:
    """Returns the last message of a rank about the ranks that take part."""
    return next(reversed(stage.all_said(rank, "ranks")), None)


def all_in(stage: RunningCell, ranks: list[int], expected: list[int]) -> bool:
    """Returns True if these ranks report that exactly the expected ranks take part."""
    return all((words := last(stage, rank)) is not None and words["ranks"] == expected for rank in ranks)
