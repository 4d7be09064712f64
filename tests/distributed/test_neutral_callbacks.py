"""`Handle.then`: a callback of an asynchronous verb is called exactly once, however the verb or the process ends."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import bagua
from bagua import extension
from tests.groups import on_ranks
from tests.waits import on_threads

World = Callable[..., Any]


def kind(error: BaseException | None) -> str:
    return type(error).__name__


class Calls:
    """A callback that remembers how it was called, and on which thread."""

    def __init__(self) -> None:
        self.errors: list[Exception | None] = []
        self.threads: list[int] = []
        self._called = threading.Event()

    def __call__(self, error: Exception | None) -> None:
        self.errors.append(error)
        self.threads.append(threading.get_ident())
        self._called.set()

    def wait(self) -> list[str]:
        """Waits for the first call. Returns the error that each call got."""
        assert self._called.wait(60)
        return [kind(error) for error in self.errors]


# --- which call, on which thread --------------------------------------------------------------------------------------


@on_ranks(2)
def test_callbacks_from_many_threads_are_called_once_each_with_the_result_in_place(group: bagua.Group) -> None:
    x = [np.full(100, number, np.float64) for number in range(100)]
    calls = [[0] * 8 for _ in x]
    wrong: list[object] = []
    handles = [group.all_reduce(array, async_op=True) for array in x]

    def register(thread: int) -> None:
        def counter(number: int) -> Callable[[Exception | None], None]:
            def count(error: Exception | None) -> None:
                calls[number][thread] += 1
                if error is not None or (x[number] != number * group.size).any():
                    wrong.append((number, error))

            return count

        for number, handle in enumerate(handles):
            handle.then(counter(number))

    on_threads(register, range(8))
    for handle in handles:
        handle.wait()
    extension.wait_for_callbacks(60)
    assert not wrong
    assert calls == [[1] * 8 for _ in x]


@on_ranks(2)
def test_a_callback_of_a_done_verb_is_called_at_once_and_others_in_order_on_another_thread(
    rank: int, group: bagua.Group
) -> None:
    other = group.new_group(range(group.size))
    assert other is not None
    later, now = Calls(), Calls()
    order: list[int] = []
    if rank == 0:
        handle = other.barrier(async_op=True)
        for number in range(5):
            handle.then(lambda _, number=number: order.append(number))  # type: ignore[misc]
        handle.then(later)
        assert later.errors == []
        group.barrier()
        assert later.wait() == ["NoneType"]
        assert later.threads != [threading.get_ident()]
        assert order == [0, 1, 2, 3, 4]
        handle.then(now)
        assert (now.errors, now.threads) == ([None], [threading.get_ident()])
    else:
        group.barrier()
        other.barrier()
    with pytest.raises(TypeError, match="3 is not callable"):
        group.barrier(async_op=True).then(3)  # type: ignore[arg-type]


# --- exceptions -------------------------------------------------------------------------------------------------------


def raises(rank: int) -> list[tuple[str, bool]]:
    group = bagua.init(timeout=60)
    other = group.new_group(range(group.size))
    assert other is not None
    reported: list[tuple[str, bool]] = []
    if rank == 1:
        group.barrier()
        other.barrier()
        other.all_reduce(np.ones(3))
        bagua.shutdown()
        return reported

    def fails(error: Exception | None) -> None:
        raise LookupError("in a callback")

    def interrupts(error: Exception | None) -> None:
        raise KeyboardInterrupt

    sys.unraisablehook = lambda unraisable: reported.append(
        (repr(unraisable.exc_value), unraisable.object in (fails, interrupts))
    )
    handle = other.barrier(async_op=True)
    handle.then(fails)
    handle.then(interrupts)
    group.barrier()
    handle.wait()
    extension.wait_for_callbacks(60)
    handle.then(fails)
    with pytest.raises(KeyboardInterrupt):
        handle.then(interrupts)
    # Neither the group nor the thread has suffered.
    calls = Calls()
    other.all_reduce(np.ones(3), async_op=True).then(calls)
    assert calls.wait() == ["NoneType"]
    bagua.shutdown()
    return reported


def test_an_exception_of_a_callback_is_reported_and_harms_nothing(world: World) -> None:
    failed, interrupted = ("LookupError('in a callback')", True), ("KeyboardInterrupt()", True)
    assert world(2).run(raises) == [[failed, interrupted, failed], []]


def loses_a_peer(rank: int) -> list[Any]:
    group = bagua.init(timeout=60)
    other = group.new_group([0, 1])
    assert other is not None
    if rank == 1:
        other.barrier()
        os.kill(os.getpid(), signal.SIGKILL)
    first, second = Calls(), Calls()
    handles = [group.all_reduce(np.ones(1000), async_op=True) for _ in range(2)]
    with contextlib.suppress(bagua.PeerLostError):
        # Rank 1 dies once the operations are submitted, perhaps before this rank has noticed that both are here.
        other.barrier()
    handles[0].then(first)
    handles[1].then(second)
    got = first.wait() + second.wait()
    error = first.errors[0]
    assert isinstance(error, bagua.PeerLostError)
    bagua.shutdown()
    return [*got, error.rank]


@pytest.mark.parametrize("transport", ["auto", "tcp"])
def test_a_callback_gets_the_loss_of_a_peer(world: World, transport: str) -> None:
    run = world(2, env={"BAGUA_TRANSPORT": transport}, expect_exit={1: -signal.SIGKILL})
    assert run.run(loses_a_peer)[0] == ["PeerLostError", "PeerLostError", 1]


# --- the end of the process -------------------------------------------------------------------------------------------


def exits(rank: int, how: str) -> None:
    group = bagua.init(timeout=60)
    other = group.new_group([0, 1])
    assert other is not None
    if rank == 1:
        # Takes no part in rank 0's barrier, and stays until rank 0 is gone.
        with pytest.raises(bagua.PeerLostError):
            group.recv(np.ones(1), 0)
        return
    handle = other.barrier(async_op=True)

    def callback(error: Exception | None) -> None:
        print(f"called with {kind(error)}", flush=True)
        if how == "blocks":
            threading.Event().wait()
        while how == "computes":
            sum(range(1000))
        if how == "starts a verb":
            other.barrier(async_op=True)

    handle.then(callback)


def test_the_interpreters_exit_calls_pending_callbacks(world: World) -> None:
    run = world(2)
    run.run(exits, "returns")
    assert run.output[0].splitlines() == ["called with AbortedError"]


@pytest.mark.slow
@pytest.mark.parametrize("how", ["blocks", "computes"])
def test_a_callback_that_does_not_return_does_not_hang_the_interpreters_exit(world: World, how: str) -> None:
    run = world(2)
    run.run(exits, how)
    assert run.output[0].splitlines()[0] == "called with AbortedError"
    assert "a callback of a handle has not returned after 5.0 s" in run.output[0]
