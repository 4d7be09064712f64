"""Continuations of futures of the backend "bagua" when their group or their process ends, and in a forked child."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import bagua.c10d  # noqa: F401 -- registers the backend
from bagua.errors import PeerLostError
from tests.waits import meet
from tests.world import make_world

LIMIT = timedelta(seconds=60)


def begin(**options: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("bagua", timeout=LIMIT, **options)


def continue_after_a_message(rank: int, continuation: Callable[[Any], Any]) -> torch.futures.Future[Any]:
    """Exchanges a message with the other rank. Returns the future of what the continuation returns."""
    work = dist.irecv(torch.zeros(1), 1 - rank)
    assert work is not None
    future: torch.futures.Future[Any] = work.get_future().then(continuation)
    # No message comes before, so that the continuation runs on a thread of Bagua's.
    dist.barrier()
    dist.send(torch.ones(1), 1 - rank)
    return future


def wait_in_a_continuation() -> torch.futures.Future[Any]:
    """Rank 0 waits in a continuation for a message that never comes. The continuation prints how that ends."""
    begun = threading.Event()

    def wait(_: Any) -> None:
        message = dist.irecv(torch.zeros(1), 1, tag=1)
        assert message is not None
        never = message.get_future()
        begun.set()
        try:
            never.wait()
        except RuntimeError as error:
            print("AbortedError" in str(error), flush=True)

    future = continue_after_a_message(0, wait)
    assert begun.wait(LIMIT.total_seconds())
    return future


def exit_during_a_continuation(rank: int) -> None:
    begin()
    if rank == 0:
        wait_in_a_continuation()
        return
    continue_after_a_message(1, lambda _: None).wait()
    # Stays until rank 0 is gone.
    with pytest.raises(PeerLostError):
        dist.recv(torch.ones(1), 0)


def test_the_interpreters_exit_ends_what_a_continuation_waits_for() -> None:
    world = make_world(2)
    world.run(exit_during_a_continuation)
    assert world.output[0].splitlines() == ["True"]


def destroy_during_a_continuation(rank: int, folder: str) -> float:
    begin()
    if rank == 0:
        future = wait_in_a_continuation()
        dist.destroy_process_group()
        future.wait()
    else:
        continue_after_a_message(1, lambda _: None).wait()
        meet("destroyed", rank, [0])
        dist.destroy_process_group()
    if rank == 0:
        meet("destroyed", rank, [0])
    # The threads serve the next group too.
    begin(store=dist.FileStore(str(Path(folder, "store"))), rank=rank, world_size=2)
    found = continue_after_a_message(rank, lambda done: done.value()[0].item()).wait()
    dist.destroy_process_group()
    return float(found)


def test_destroying_a_group_ends_what_a_continuation_waits_for(tmp_path: Path) -> None:
    world = make_world(2)
    assert world.run(destroy_during_a_continuation, str(tmp_path)) == [1.0, 1.0]
    assert world.output[0].splitlines() == ["True"]


def fork_after_a_continuation(rank: int, folder: str) -> float:
    begin()
    threads = [continue_after_a_message(rank, lambda _: threading.get_native_id()).wait() for _ in range(3)]
    assert threading.get_native_id() not in threads
    child = os.fork()
    if child == 0:
        try:
            dist.destroy_process_group()
            begin(store=dist.FileStore(str(Path(folder, "store"))), rank=rank, world_size=2)
            found = continue_after_a_message(rank, lambda done: done.value()[0].item()).wait()
            dist.destroy_process_group()
            os._exit(int(found) + 1)
        finally:
            os._exit(1)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    dist.destroy_process_group()
    return code


def test_a_forked_child_continues_on_threads_of_its_own(tmp_path: Path) -> None:
    assert make_world(2).run(fork_after_a_continuation, str(tmp_path)) == [2, 2]
