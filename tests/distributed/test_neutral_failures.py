"""Failures between ranks: they are noticed in time, name a rank, and leave nothing behind."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import bagua
from bagua import extension
from tests.cuda.buckets import Queue, Tensors
from tests.groups import on_ranks
from tests.waits import NOT_BY_SILENCE, for_ever, meet

World = Callable[..., Any]
Step = Callable[[], object]


def shared_memory_files() -> set[str]:
    return {path.name for path in Path("/dev/shm").iterdir() if "bagua" in path.name}


# --- a dead peer ------------------------------------------------------------------------------------------------------


def all_reduce(group: bagua.Group) -> Step:
    x = np.ones(1 << 16, np.float32)
    return lambda: group.all_reduce(x, "max")


def message(group: bagua.Group) -> Step:
    """A large message around the ranks, which its receiver waits for."""
    x, got = np.ones(1 << 20, np.uint8), np.empty(1 << 20, np.uint8)
    following, before = (group.rank + 1) % group.size, (group.rank - 1) % group.size
    return lambda: group.exchange([(following, x)], [(before, got)], async_op=True).wait()


def bucket(operate: Callable[[Tensors], object]) -> Callable[[bagua.Group], Step]:
    """A communication of a bucket."""

    def begin(group: bagua.Group) -> Step:
        tensors = Tensors(None, "one", sizes=(1 << 18,))
        operate(tensors)
        return Queue("engine", tensors).step

    return begin


def compressed(tensors: Tensors) -> None:
    tensors.raw.append_compressed(extension.Codec("minmax_u8", {}), True, False, True)
    tensors.attach("error")


def gossip(tensors: Tensors) -> None:
    tensors.raw.append_decentralized("ring", False)
    tensors.attach("peer_weight")


STEPS = {
    "all_reduce": all_reduce,
    "message": message,
    "compressed all_reduce": bucket(compressed),
    "gossip": bucket(gossip),
}


def killed_in_a_loop(rank: int, what: str, victim: int, folder: str) -> tuple[int, float]:
    group = bagua.init(timeout=60)
    communicate = STEPS[what](group)
    steps = 0

    def step() -> None:
        nonlocal steps
        communicate()
        steps += 1
        if rank == victim and steps == 20:
            os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(bagua.PeerLostError) as raised:
        for_ever(step)
    with pytest.raises(bagua.PeerLostError):
        communicate()
    bagua.shutdown()
    assert bagua.stats() == {"groups": {}, "elastic": None}
    again = bagua.init(0, 1)
    x = np.ones(1 << 16, np.float32)
    again.all_reduce(x)
    bagua.shutdown()
    survivors = group.size - 1
    new = rank - (rank > victim)
    # The survivors go on together in the same processes.
    third = bagua.init(new, survivors, f"file://{folder}/survivors", timeout=60)
    y = np.ones(3)
    third.all_reduce(y)
    bagua.shutdown()
    return raised.value.rank, float(y[0])


@pytest.mark.parametrize("transport", ["auto", "tcp"])
@pytest.mark.parametrize("what", STEPS)
def test_a_killed_rank_is_named_and_the_others_go_on(world: World, tmp_path: Path, what: str, transport: str) -> None:
    before = shared_memory_files()
    is_named(world, tmp_path, what, {"BAGUA_TRANSPORT": transport})
    assert shared_memory_files() <= before


def is_named(world: World, folder: Path, what: str, env: dict[str, str]) -> None:
    """Rank 1 is killed; both others name it, and continue together."""
    results = world(3, expect_exit={1: -signal.SIGKILL}, env=env | NOT_BY_SILENCE).run(
        killed_in_a_loop, what, 1, str(folder)
    )
    assert results == [(1, 2.0), None, (1, 2.0)]


def printed_by_rank_0(rank: int, how: str, file: str) -> str:
    group = bagua.init(timeout=60)
    groups = [group, group.new_group([0, 1])]
    if rank == 0:
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT), 2)
    meet("the groups are there", rank, range(2))
    if rank == 1 and how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 0:
        for each in groups:
            assert each is not None
            with pytest.raises(bagua.PeerLostError):
                for_ever(all_reduce(each))
    # The thread that noticed it has ended then.
    bagua.shutdown()
    return Path(file).read_text() if rank == 0 else ""


@pytest.mark.parametrize("transport", ["auto", "tcp"])
@pytest.mark.parametrize("how", ["killed", "leaves"])
def test_a_lost_rank_is_one_line_on_stderr_and_a_rank_that_leaves_is_none(
    world: World, tmp_path: Path, how: str, transport: str
) -> None:
    ends = {1: -signal.SIGKILL} if how == "killed" else {}
    run = world(2, expect_exit=ends, env={"BAGUA_TRANSPORT": transport})
    lines = run.run(printed_by_rank_0, how, str(tmp_path / "stderr"))[0].splitlines()
    assert len(lines) == (how == "killed"), lines
    assert all(line.startswith("bagua: rank 0 lost rank 1 (host ") for line in lines)


# --- disagreement -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("transport", ["auto", "tcp"])
@pytest.mark.parametrize("how", ["verb", "shape", "size", "dtype", "op"])
@on_ranks(3, timeout=30)
def test_ranks_that_disagree_all_get_what_each_was_doing(group: bagua.Group, how: str, transport: str) -> None:
    x = np.ones(12, np.float32)
    different = {
        "verb": lambda: group.broadcast(x),
        "shape": lambda: group.all_reduce(x.reshape(3, 4)),
        "size": lambda: group.all_reduce(x[:5]),
        "dtype": lambda: group.all_reduce(x.view(np.int32)),
        "op": lambda: group.all_reduce(x, "max"),
    }

    def go_on() -> None:
        # The others may disagree before this rank has seen that all came to the barrier.
        group.barrier()
        different[how]() if group.rank == group.size - 1 else group.all_reduce(x)

    with pytest.raises(bagua.MismatchError) as raised:
        go_on()
    words = {"verb": "broadcast", "shape": "[3, 4]", "size": "[5]", "dtype": "int32", "op": "max"}[how]
    for each in ("ranks disagree", "all_reduce(sum)", words, "rank 2"):
        assert each in str(raised.value)


@pytest.mark.parametrize("how", ["barrier", "gather_object", "another destination", "another source", "broadcast"])
@on_ranks(3, timeout=30)
def test_ranks_that_disagree_about_objects_get_a_mismatch(group: bagua.Group, how: str) -> None:
    mine = [None] * group.size
    # One rank has all the bytes, which travel by all_to_all_v.
    long = bytes(1 << 20) if group.rank == 0 else None
    ours_and_different: dict[str, tuple[Step, Step]] = {
        "barrier": (lambda: group.all_gather_object(mine), group.barrier),
        "gather_object": (lambda: group.all_gather_object(mine), lambda: group.gather_object(mine)),
        "another destination": (lambda: group.gather_object(long), lambda: group.gather_object(long, 1)),
        "another source": (lambda: group.broadcast_object(mine), lambda: group.broadcast_object(mine, 2)),
        "broadcast": (lambda: group.scatter_object(mine), lambda: group.broadcast(np.zeros(2))),
    }
    with pytest.raises(bagua.MismatchError, match="rank 2"):
        for_ever(ours_and_different[how][group.rank == 2])


# --- exceptions -------------------------------------------------------------------------------------------------------


def raises(rank: int) -> tuple[int, str, str]:
    group = bagua.init(timeout=60)
    meet("before the exception", rank, range(3))
    if rank == 1:
        raise LookupError("no such sample: 17")
    with pytest.raises(bagua.PeerRaisedError, match=r"rank 1 on .* raised LookupError: no such sample: 17") as raised:
        for_ever(lambda: group.all_reduce(np.ones(3)))
    error = raised.value
    return error.rank, error.kind, error.message


def test_an_uncaught_exception_reaches_the_other_ranks(world: World) -> None:
    run = world(3, expect_exit={1: 1})
    results = run.run(raises)
    assert results == [(1, "LookupError", "no such sample: 17"), None, (1, "LookupError", "no such sample: 17")]
    assert "LookupError: no such sample: 17" in run.output[1]


class Unreadable:
    """Can be pickled, and not unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return int, ("no number",)


@pytest.mark.parametrize("size", [1, 2, 3])
@on_ranks()
def test_an_object_that_cannot_travel_raises_where_it_is_wanted_and_the_group_goes_on(
    rank: int, group: bagua.Group, size: int
) -> None:
    sender = size - 1
    verbs: dict[str, tuple[Callable[[Any], object], set[int]]] = {
        "all_gather_object": (group.all_gather_object, set(range(size))),
        "broadcast_object": (lambda x: group.broadcast_object(x, sender), set(range(size)) - {sender}),
        "gather_object": (group.gather_object, {0}),
        "scatter_object": (lambda x: group.scatter_object([x] * size, sender), set(range(size))),
    }
    for verb, (call, receivers) in verbs.items():
        kind, words = (TypeError, "cannot pickle '_thread.lock'") if rank == sender else (bagua.PeerRaisedError, "")
        if rank in receivers | {sender}:
            with pytest.raises(kind, match=words) as raised:
                call(threading.Lock() if rank == sender else 0)
            if isinstance(raised.value, bagua.PeerRaisedError):
                error = raised.value
                assert (error.rank, error.host, error.kind) == (sender, os.uname().nodename, "TypeError")
                assert error.message.startswith("cannot pickle '_thread.lock'"), verb
        else:
            assert call(0) is None
        unreadable = Unreadable() if rank == sender else 0
        if rank in receivers:
            with pytest.raises(ValueError, match="invalid literal"):
                call(unreadable)
        else:
            assert call(unreadable) in (None, unreadable)
    assert group.all_gather_object(rank) == list(range(size))


@pytest.mark.parametrize("verb", ["all_reduce", "all_gather_object"])
@on_ranks(2)
def test_a_deadline_names_who_did_not_take_part(rank: int, group: bagua.Group, verb: str) -> None:
    meet("before the verb", rank, range(2))
    if rank == 1:
        # Does not take part until the others have given up.
        with pytest.raises(bagua.BaguaTimeoutError):
            for_ever(group.communicator.cause)
        return
    with pytest.raises(TimeoutError) as raised:
        getattr(group, verb)(np.ones(3), timeout=0.3)
    assert isinstance(raised.value, bagua.BaguaTimeoutError)
    assert (raised.value.missing, raised.value.after) == ((1,), 0.3)


# --- the GIL ----------------------------------------------------------------------------------------------------------


# --- ends -------------------------------------------------------------------------------------------------------------


def leaves_an_operation_behind(rank: int) -> str:
    group = bagua.init(timeout=300)
    group.barrier()
    if rank == 0:
        group.all_reduce(np.ones(1000), async_op=True)
    return "done"


def test_the_interpreter_ends_although_an_operation_is_pending(world: World) -> None:
    assert world(2).run(leaves_an_operation_behind) == ["done", "done"]


def forks(rank: int) -> list[str]:
    group = bagua.init(timeout=60)
    x = np.ones(100)
    group.all_reduce(x)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        # A child that ends as a program does, atexit and all, and meets the error first.
        try:
            group.all_reduce(x)
        except bagua.BaguaError as error:
            os.write(write, str(error).encode())
        try:
            bagua.all_reduce(x)
        except bagua.BaguaError as error:
            os.write(write, b"|" + str(error).encode())
        raise SystemExit(0)
    os.close(write)
    said = os.read(read, 4096)
    while more := os.read(read, 4096):
        said += more
    os.waitpid(child, 0)
    y = np.ones(100)
    group.all_reduce(y)
    assert (y == group.size).all()
    bagua.shutdown()
    return said.decode().split("|")


def test_a_forked_child_cannot_use_or_break_its_parents_group(world: World) -> None:
    for group, default in world(2).run(forks):
        assert "fork" in group
        assert "bagua.init()" in default
