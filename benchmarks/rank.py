"""One rank of a `rank_set.RankSet`: serves the requests of the benchmark until it closes the connection.

    python benchmarks/rank.py FOLDER RANKS

Imports torch, bagua or mpi4py only for the contenders that a request names: the environment of an MPI has no torch.
"""

from __future__ import annotations

import ctypes
import os
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
from common import Barrier, Timed, this_rank
from contenders import CONTENDERS, Buffers, Case, Contender, ordinary


@dataclass(frozen=True)
class Work:
    """One timed call, with the functions that run before and after it and are not timed."""

    call: Callable[[], Any]
    rewrite: Callable[[], None]
    check: Callable[[], None]


def threads() -> int:
    """Threads of this process."""
    return len(os.listdir("/proc/self/task"))


class Server:
    """The requests: each public method is one."""

    def __init__(self, folder: str, rank: int, ranks: int) -> None:
        self._folder, self._rank, self._ranks = folder, rank, ranks
        self._barrier = Barrier(folder, rank, ranks)
        self._contenders: dict[str, Contender] = {}
        self._works: dict[str, list[Work]] = {}
        self._losses: list[float] = []
        self._engine: Any = None
        self._processors = os.sched_getaffinity(0)
        self._processor: Callable[[], int] = ctypes.CDLL(None).sched_getcpu

    def pin(self) -> None:
        """Pins this rank to the processor of its number, with fewer processors than ranks in turn."""
        processors = sorted(self._processors)
        os.sched_setaffinity(0, {processors[self._rank % len(processors)]})

    def unpin(self) -> None:
        """Lets this rank run on all the processors that it began with."""
        os.sched_setaffinity(0, self._processors)

    def join(self, name: str) -> int:
        """Joins the ranks as a contender. Returns the threads that joining and a first all_reduce added."""
        before = threads()
        self._contenders[name] = CONTENDERS[name](self._rank, self._ranks, self._folder)
        self.prepare(("all_reduce", "float32", 1024), 1)
        self.time(name, 1, 1)
        return threads() - before

    def prepare(self, case: tuple[str, str, int], copies: int) -> list[str]:
        """Allocates the buffers of a case, `copies` times. Returns the contenders that have this case."""
        wanted = Case(*case)
        self._works.clear()
        shared = [Buffers(wanted, self._rank, self._ranks, ordinary) for _ in range(copies)]
        for name, contender in self._contenders.items():
            contender.begin(wanted, copies)
            if contender.empty is ordinary:
                buffers = shared
            else:
                buffers = [Buffers(wanted, self._rank, self._ranks, contender.empty) for _ in range(copies)]
            calls = [(b, call) for b in buffers if (call := contender.call(b)) is not None]
            if calls:
                self._works[name] = [Work(call, b.rewrite, partial(b.check, name)) for b, call in calls]
        return list(self._works)

    def time(
        self, name: str, calls: int, batches: int, pause: float | None = None, beside: str | None = None
    ) -> list[Timed]:
        """Batches of calls. Before each the ranks sleep for `pause` seconds, or meet at a barrier that spins (None).

        Another contender may make a call `beside` it, before each pause.
        """
        works = self._works[name][:calls]
        functions = [work.call for work in works]
        other = self._works[beside][0].call if beside in self._works else nothing
        clock, processor = time.perf_counter, self._processor
        times = []
        for _ in range(batches):
            other()
            for work in works:
                work.rewrite()
            self._rest(pause)
            first = processor()
            begun = clock()
            for function in functions:
                function()
            ended = clock()
            last = processor()
            # With more ranks than cores, the check on one rank would keep the core from a rank that is not done.
            self._rest(None if pause is None else pause / 5)
            for work in works:
                work.check()
            times.append(Timed(begun, ended, first, last))
        return times

    def _rest(self, pause: float | None) -> None:
        if pause is None:
            self._barrier.spin()
        else:
            time.sleep(pause)

    def prepare_step(self, model: str) -> None:
        """Wraps a model of train.py and trains it for a few steps, which settle its buckets and memory."""
        import torch
        from train import OURS, Trainer

        torch.set_num_threads(1)
        trainer = Trainer(OURS, model, self._rank)
        trainer.steps(3)
        self._works = {"ours": [Work(lambda: trainer.steps(1), nothing, nothing)]}
        self._losses = trainer.losses

    def losses(self) -> list[float]:
        """The losses of all steps of that model so far."""
        return self._losses

    def prepare_handover(self) -> None:
        """Registers a bucket of 1 KiB, whose all_reduce the communication thread runs."""
        import bagua

        array, ranks = np.empty(256, np.float32), self._ranks
        engine = self._engine = bagua.Engine("compare")
        engine.register([bagua.Bucket("bucket", {"array": array}).append_centralized()])

        def call() -> None:
            engine.mark_ready("array")
            engine.wait()

        def check() -> None:
            if not (array == (ranks - 1) / 2).all():
                raise AssertionError(f"the communication thread averaged to {array[0]} instead of {(ranks - 1) / 2}")

        self._works = {"ours": [Work(call, lambda: array.fill(self._rank), check)]}

    def end_handover(self) -> None:
        """Ends the communication thread of that bucket."""
        self._engine.shutdown()

    def source(self) -> str:
        """The file that bagua was imported from."""
        import bagua

        return str(bagua.__file__)


def nothing() -> None:
    """Rewrites or checks nothing."""


def main() -> None:
    """Connects, then serves until the benchmark closes the connection."""
    folder, rank, ranks = sys.argv[1], this_rank(), int(sys.argv[2])
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(f"{folder}/socket")
        connection = Connection(client.detach())
    connection.send(rank)
    server = Server(folder, rank, ranks)
    while True:
        try:
            request, arguments = connection.recv()
        except EOFError:
            return
        connection.send(getattr(server, request)(*arguments))


if __name__ == "__main__":
    main()
