"""Signals while the main thread waits for other ranks: each handler runs at once, and what it raises ends the wait."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist

import bagua
import bagua.c10d  # registers the backend
from tests.groups import on_ranks, when_waiting
from tests.waits import arrive, await_arrival, for_ever, until


class Stopped(Exception):
    """The exception that a handler of the program raises."""


def stop(*_: object) -> None:
    raise Stopped("the time is up")


def leave(*_: object) -> None:
    raise SystemExit(3)


class Signal(NamedTuple):
    """A signal, its handler, and what ends the wait."""

    number: int
    handler: Any
    raised: type[BaseException]
    #: What the other ranks get from a blocking verb.
    kind: str
    #: Calls the waiting function.
    run: Callable[[Callable[[], object]], object] = lambda call: call()


def in_a_task(call: Callable[[], object]) -> None:
    """asyncio.run has a handler of its own for SIGINT, which only cancels the task at first."""

    async def main() -> None:
        call()

    asyncio.run(main())


def after_a_loop(call: Callable[[], object]) -> None:
    """A loop takes the wakeup descriptor for its handlers, and leaves none when it ends."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGUSR2, lambda: None)
        loop.remove_signal_handler(signal.SIGUSR2)

    asyncio.run(main())
    call()


CTRL_C = signal.default_int_handler
#: Before 3.11 asyncio.run has no handler.
CANCELLED = "CancelledError" if hasattr(asyncio.Task, "cancelling") else "KeyboardInterrupt"
SIGNALS = {
    "Ctrl-C": Signal(signal.SIGINT, CTRL_C, KeyboardInterrupt, "KeyboardInterrupt"),
    "Ctrl-C with a handler": Signal(signal.SIGINT, stop, Stopped, "Stopped"),
    "Ctrl-C in asyncio": Signal(signal.SIGINT, CTRL_C, KeyboardInterrupt, CANCELLED, in_a_task),
    "Ctrl-C after a loop": Signal(signal.SIGINT, CTRL_C, KeyboardInterrupt, "KeyboardInterrupt", after_a_loop),
    "SIGTERM": Signal(signal.SIGTERM, leave, SystemExit, "SystemExit"),
    "SIGALRM": Signal(signal.SIGALRM, stop, Stopped, "Stopped"),
    "SIGUSR1": Signal(signal.SIGUSR1, stop, Stopped, "Stopped"),
}


@contextlib.contextmanager
def handled(number: int, handler: Any) -> Iterator[None]:
    # A shell that starts the tests in the background has SIGINT ignored, and Python then keeps that.
    before = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, before)


def interrupt(number: int) -> None:
    """Sends the signal to this process when its next operation waits for other ranks."""
    when_waiting(lambda: os.kill(os.getpid(), number))


def interrupt_opening(number: int) -> None:
    """Sends the signal to this process when it opens the connections of a group, on a thread that it waits for."""

    def opens() -> bool:
        names = [task.joinpath("comm") for task in Path("/proc/self/task").iterdir()]
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            return any(name.read_text(encoding="utf-8").strip() == "bagua-joining" for name in names)
        return False

    def run() -> None:
        until(opens, "a group is opened")
        os.kill(os.getpid(), number)

    threading.Thread(target=run, daemon=True).start()


def behind_another(group: bagua.Group) -> None:
    group.all_reduce(np.ones(10), async_op=True)
    group.all_reduce(np.ones(10))


#: Blocking calls, which fail the group on all ranks when they are interrupted.
BLOCKING: dict[str, Callable[[bagua.Group], object]] = {
    "a small all_reduce": lambda group: group.all_reduce(np.ones(10)),
    "a large all_reduce": lambda group: group.all_reduce(np.ones(1 << 17)),
    "a barrier": lambda group: group.barrier(),
    "an object": lambda group: group.broadcast_object(None, src=1),
}
#: Waits that leave the operation running.
WAITS: dict[str, Callable[[bagua.Group], object]] = {
    "a handle": lambda group: group.all_reduce(np.ones(10), async_op=True).wait(),
    "an all_reduce behind another": behind_another,
}
CASES = [(wait, "SIGUSR1") for wait in [*BLOCKING, *WAITS]] + [
    (wait, each) for each in SIGNALS if each != "SIGUSR1" for wait in ("a small all_reduce", "a handle")
]


@pytest.mark.parametrize("transport", ["auto", "tcp"])
@on_ranks(2)
def test_what_a_handler_raises_ends_the_wait(rank: int, group: bagua.Group, transport: str) -> None:
    for wait, name in CASES:
        number, handler, raised, kind, run = SIGNALS[name]
        pair = group.new_group([0, 1])
        if rank == 1:
            with pytest.raises(bagua.PeerRaisedError) as told:
                for_ever(pair.communicator.cause)
            assert (told.value.rank, told.value.kind) == (0, kind), (wait, name)
            continue
        interrupt(number)
        with handled(number, handler), pytest.raises(raised):
            run(lambda pair=pair, wait=wait: (BLOCKING | WAITS)[wait](pair))
        if wait in BLOCKING:
            with pytest.raises(bagua.PeerRaisedError):
                pair.communicator.cause()
        else:
            pair.communicator.raise_(kind, "")


@on_ranks(2)
def test_what_a_handler_raises_ends_the_opening_of_a_group(rank: int, group: bagua.Group) -> None:
    if rank == 0:
        interrupt_opening(signal.SIGUSR1)
        with handled(signal.SIGUSR1, stop), pytest.raises(Stopped):
            group.new_group([0, 1])
    with pytest.raises(bagua.PeerRaisedError, match=r"rank 0 .* raised Stopped: the time is up"):
        for_ever(group.communicator.cause)


@on_ranks(2)
def test_a_handler_that_returns_runs_while_a_verb_waits(rank: int, group: bagua.Group) -> None:
    x = np.ones(4)
    if rank == 1:
        await_arrival("in the handler", [0])
        group.all_reduce(x)
        return
    interrupt(signal.SIGUSR1)
    with handled(signal.SIGUSR1, lambda *_: arrive("in the handler", 0)):
        group.all_reduce(x)
    assert x.tolist() == [2.0] * 4


@on_ranks(2)
def test_a_handler_inside_a_verb_cannot_start_another_on_its_thread(rank: int, group: bagua.Group) -> None:
    refused: list[str] = []

    def communicates(*_: object) -> None:
        for call in (group.barrier, lambda: group.all_reduce(np.ones(2), async_op=True), lambda: group.new_group([0])):
            with pytest.raises(bagua.BaguaError, match="a signal handler called") as error:
                call()
            refused.append(str(error.value))
        arrive("refused", 0)

    if rank == 1:
        await_arrival("refused", [0])
    else:
        interrupt(signal.SIGUSR1)
    with handled(signal.SIGUSR1, communicates):
        group.barrier()
    assert len(refused) == (3 if rank == 0 else 0)


@on_ranks(2)
def test_a_handler_may_leave_the_group_and_end_the_process(rank: int, group: bagua.Group) -> None:
    def ends(*_: object) -> None:
        assert bagua.stats()
        assert bagua.flight_recorder()
        bagua.shutdown()
        raise SystemExit(0)

    if rank == 1:
        await_arrival("left", [0])
        return
    interrupt(signal.SIGTERM)
    with handled(signal.SIGTERM, ends), pytest.raises(SystemExit):
        group.all_reduce(np.ones(3))
    arrive("left", 0)


#: Calls of torch.distributed, on a group of both ranks.
TORCH_CALLS: dict[str, Callable[[Any], object]] = {
    "all_reduce": lambda group: dist.all_reduce(torch.ones(10), group=group),
    "all_reduce of a view": lambda group: dist.all_reduce(torch.ones(4, 4).t(), group=group),
    "barrier": lambda group: dist.barrier(group=group),
    "Work.wait": lambda group: dist.all_reduce(torch.ones(10), group=group, async_op=True).wait(),
    # The last: the world fails.
    "new_group": lambda _: dist.new_group([0, 1]),
}


def interrupted_torch(rank: int) -> list[str]:
    torch.set_num_threads(1)
    dist.init_process_group("bagua", timeout=timedelta(seconds=60))
    ended = []
    groups = [dist.new_group([0, 1]) for _ in TORCH_CALLS]
    dist.barrier()
    for (name, call), group in zip(TORCH_CALLS.items(), groups, strict=True):
        if rank == 1:
            await_arrival(name, [0])
            continue
        (interrupt_opening if name == "new_group" else interrupt)(signal.SIGALRM)
        with handled(signal.SIGALRM, stop):
            try:
                call(group)
            except Stopped:
                ended.append(name)
        arrive(name, 0)
    return ended


def test_what_a_handler_raises_ends_calls_of_torch_distributed(world: Callable[..., Any]) -> None:
    assert world(2).run(interrupted_torch) == [list(TORCH_CALLS), []]
