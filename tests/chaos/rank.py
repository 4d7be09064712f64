"""One rank of a cell: repeats the action until an error, or a given number of times; reports what happened when."""

from __future__ import annotations

import contextlib
import gc
import itertools
import json
import os
import re
import time
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch._C._distributed_c10d import TCPStore

import bagua
from tests.chaos import averaging
from tests.chaos.actions import ACTIONS, ELASTIC, Action, GoesOn, Wrong

#: Seconds for threads and descriptors to go after the group was left.
GOES_WITHIN = 5.0


class Notes:
    """Lines of JSON for the process that made the fault."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._path = folder / f"said{rank}"
        self._steps = folder / f"steps{rank}"

    def say(self, what: str, **words: Any) -> None:
        """Adds a line, with the moment on the clock that all processes of the machine share."""
        with open(self._path, "a") as file:
            file.write(json.dumps({"what": what, "at": time.monotonic(), **words}) + "\n")

    def count(self, steps: int) -> None:
        """Says how often the action was done."""
        descriptor = os.open(self._steps, os.O_CREAT | os.O_WRONLY)
        os.pwrite(descriptor, steps.to_bytes(8, "little"), 0)
        os.close(descriptor)


def held() -> set[str]:
    """Threads, and what descriptors lead to."""
    found = set()
    for task in os.listdir("/proc/self/task"):
        found.add(f"thread {task}")
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found.add("descriptor " + os.readlink(f"/proc/self/fd/{descriptor}"))
    return found


def left_behind(before: set[str]) -> list[str]:
    """Returns the resources held in addition to ``before``, once no more of them disappear."""
    until = time.monotonic() + GOES_WITHIN
    while True:
        more = held() - before
        if not more or time.monotonic() > until:
            return sorted(map(_described, more))
        time.sleep(0.005)


def _described(thing: str) -> str:
    if thing.startswith("thread "):
        with contextlib.suppress(OSError):
            return "thread " + Path("/proc/self/task", thing.split()[1], "comm").read_text().strip()
    return thing


def work(rank: int, size: int, action: str, folder: str, harmless: bool) -> None:
    """A rank's main function."""
    torch.set_num_threads(1)
    notes = Notes(Path(folder), rank)
    # What was imported stays. Looking through it would copy every page that ranks share with their parent process.
    gc.freeze()
    # What a process keeps from its first group on is no leak.
    bagua.init(0, 1)
    bagua.shutdown()
    elastic = action in ELASTIC
    doing = (Action if elastic else ACTIONS[action])(rank, size, Path(folder))
    if doing.uses_torch:
        # The first server leaves a pipe open, with or without Bagua.
        TCPStore("127.0.0.1", 0, 1, True, timedelta(seconds=30), wait_for_workers=False)
    before = held()
    try:
        if elastic:
            averaging.work(rank, Path(folder), notes)
            return
        doing.begin()
        notes.say("ready")
        if harmless:
            while not Path(folder, "go").exists():
                time.sleep(0.002)
        for step in range(1, doing.repeats + 1) if harmless else itertools.count(1):
            doing.once(step)
            notes.count(step)
        notes.say("ended", kind="", text=doing.result(), named=[])
    except Exception as error:
        if not isinstance(error, (bagua.BaguaError, Wrong, GoesOn)):
            traceback.print_exc()
        plain = re.search(r"\b(quorum|store)\b", str(error)) if type(error) is bagua.BaguaError else None
        kind = plain[1] if plain else type(error).__name__
        notes.say("ended", kind=kind, text=str(error), named=named(error))
    finally:
        doing.end()
        # What it holds goes with it.
        del doing
        _leave(notes, before)


def _leave(notes: Notes, before: set[str]) -> None:
    gc.collect()
    notes.say("left", left=left_behind(before))
    # Without the interpreter's end, which takes seconds after torch was imported.
    os._exit(0)


def named(error: Exception) -> list[int]:
    """The ranks that an error blames."""
    if isinstance(error, GoesOn):
        return list(error.lost)
    if isinstance(error, bagua.BaguaTimeoutError):
        return list(error.missing)
    if isinstance(error, bagua.MismatchError):
        return sorted({int(rank) for rank in re.findall(r"\brank (\d+)", str(error))})
    rank = getattr(error, "rank", -1)
    return [rank] if rank >= 0 else []


def nothing(rank: int) -> None:
    """The work of the first world, which imports torch before any time is measured."""
    os._exit(0)
