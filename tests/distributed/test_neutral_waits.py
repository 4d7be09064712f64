"""Waits for a frozen peer beside a busy Python thread, and the affinity mask of a thread that waits."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import bagua
from tests.waits import meet, on_threads

World = Callable[..., Any]


@contextlib.contextmanager
def busy_thread() -> Iterator[None]:
    """A thread that holds the GIL whenever it can get it."""
    stop = threading.Event()

    def compute() -> None:
        while not stop.is_set():
            sum(range(1000))

    thread = threading.Thread(target=compute)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def waits_for_a_frozen_peer(rank: int) -> list[str]:
    group = bagua.init(timeout=60)
    pids = group.all_gather(np.array([os.getpid()])).ravel().tolist()
    arrays = [np.ones(8) for _ in range(8)]
    engines = [bagua.Engine(f"model {number}") for number in range(len(arrays))]
    for engine, array in zip(engines, arrays, strict=True):
        engine.register([bagua.Bucket("b", {"g": array}).append_centralized()])
    meet("before it freezes", rank, range(2))
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    raised = [""] * len(arrays)

    def wait(number: int) -> None:
        try:
            if number % 2:
                engines[number].mark_ready("g")
                engines[number].wait()
            else:
                group.all_reduce(arrays[number], async_op=True).wait()
        except bagua.BaguaError as error:
            raised[number] = f"{type(error).__name__}: {error}"

    with busy_thread():
        on_threads(wait, range(len(arrays)))
    os.kill(pids[1], signal.SIGKILL)
    bagua.shutdown()
    return raised


@pytest.mark.parametrize("transport", ["auto", pytest.param("tcp", marks=pytest.mark.slow)])
def test_a_frozen_peer_is_a_lost_peer_for_every_wait_beside_a_busy_thread(world: World, transport: str) -> None:
    env = {"BAGUA_HEARTBEAT_TIMEOUT": "1", "BAGUA_TRANSPORT": transport}
    raised, _ = world(2, env=env, expect_exit={1: -signal.SIGKILL}).run(waits_for_a_frozen_peer)
    assert [text.split()[:3] for text in raised] == [["PeerLostError:", "lost", "rank"]] * 8


def affinity_after_a_wait(rank: int) -> tuple[bool, set[int], set[int], set[int]]:
    """Returns True if the mask changed while rank 1 waited; then the masks before, after, and of a new thread."""
    group = bagua.init(timeout=60)
    before = os.sched_getaffinity(0)
    processes = group.all_gather(np.array([os.getpid()]))
    # Each rank publishes another processor.
    os.sched_setaffinity(0, {sorted(before)[rank]})
    group.barrier()
    os.sched_setaffinity(0, before)
    changed = False
    if rank == 0:
        until = time.monotonic() + 30
        while not changed and time.monotonic() < until:
            changed = os.sched_getaffinity(int(processes.flat[1])) < before
    group.barrier()
    inherited: set[int] = set()
    thread = threading.Thread(target=lambda: inherited.update(os.sched_getaffinity(0)))
    thread.start()
    thread.join()
    return changed, before, os.sched_getaffinity(0), inherited


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="there is one processor, which no mask can leave out")
def test_the_affinity_mask_of_a_thread_is_another_one_only_while_it_waits_in_a_verb(world: World) -> None:
    results = world(2).run(affinity_after_a_wait)
    assert results[0][0], "the mask of the rank that waited was never another one"
    for _, before, after, inherited in results:
        assert after == before == inherited
