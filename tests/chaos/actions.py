"""The actions of a rank during which a fault happens. To add an action, add a class or a verb to a table here.

An action checks its own results against what they must be. Sums of small whole numbers are exact in float32, so there
is nothing to allow for.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

import bagua
import bagua.torch_api
from bagua import process_state
from bagua.torch_api.membership.state import membership_state
from tests.distributed import test_rebuild as training

#: Elements per rank: what fits a slot of shared memory and one packet, and what goes in chunks through both. 2, 4 and
#: 20 ranks have equal parts of them.
SIZES = (60, 12_000)


class Wrong(Exception):
    """An operation returned without an error, and its result is wrong."""


class GoesOn(Exception):
    """The ranks that are left go on without these."""

    def __init__(self, lost: tuple[int, ...]) -> None:
        super().__init__(f"goes on without {lost}")
        self.lost = lost


def check(right: object, what: str) -> None:
    """Raises `Wrong` unless `right`."""
    if not right:
        raise Wrong(what)


class Action:
    """One rank's part of an action; the same calls are made on all ranks."""

    #: How often it is done while a fault lasts that does no harm.
    repeats: ClassVar[int] = 2
    #: Seconds until an operation, or joining, gives up.
    timeout: ClassVar[float] = 10.0
    #: The ranks make and leave groups all the time: joining has no more than a timeout.
    joins: ClassVar[bool] = False
    #: The process keeps things of torch.distributed's.
    uses_torch: ClassVar[bool] = False
    #: The errors of a rank that a fault leaves without a peer.
    errors: ClassVar[tuple[str, ...]] = ("PeerLostError",)

    def __init__(self, rank: int, size: int, folder: Path) -> None:
        self.rank, self.size, self.folder = rank, size, folder

    def begin(self) -> None:
        """Runs the part of the action during which no fault may happen yet."""

    def once(self, step: int) -> None:
        """Does it, and checks the result."""
        raise NotImplementedError

    def result(self) -> str:
        """Returns text that must be equal on all ranks at the end."""
        return ""

    def end(self) -> None:
        """Leaves, after an error too."""
        bagua.shutdown()


# --- verbs ------------------------------------------------------------------------------------------------------------


def given(rank: int, step: int, count: int) -> np.ndarray[Any, Any]:
    """Returns the values that a rank contributes to a step."""
    return (np.arange(count) % 11 + 3 * rank + step % 5).astype(np.float32)


def _equal(got: Any, expected: Any, what: str) -> None:
    check(np.array_equal(got, expected), what)


def _all_reduce(group: bagua.Group, every: list[Any], mine: Any) -> None:
    _equal(group.all_reduce(mine.copy()), sum(every), "all_reduce")


def _reduce(group: bagua.Group, every: list[Any], mine: Any) -> None:
    root = int(every[0][0]) % group.size
    got = group.reduce(mine.copy(), root)
    if group.rank == root:
        _equal(got, sum(every), "reduce")


def _broadcast(group: bagua.Group, every: list[Any], mine: Any) -> None:
    root = int(every[0][0]) % group.size
    _equal(group.broadcast(mine.copy(), root), every[root], "broadcast")


def _reduce_scatter(group: bagua.Group, every: list[Any], mine: Any) -> None:
    part = len(mine) // group.size
    out = np.empty(part, np.float32)
    group.reduce_scatter(mine, out=out)
    _equal(out, sum(every)[group.rank * part : (group.rank + 1) * part], "reduce_scatter")


def _all_gather(group: bagua.Group, every: list[Any], mine: Any) -> None:
    out = np.empty((group.size, len(mine)), np.float32)
    group.all_gather(mine, out=out)
    _equal(out, np.stack(every), "all_gather")


def _gather(group: bagua.Group, every: list[Any], mine: Any) -> None:
    root = int(every[0][0]) % group.size
    out = np.empty((group.size, len(mine)), np.float32) if group.rank == root else None
    group.gather(mine, root, out=out)
    if out is not None:
        _equal(out, np.stack(every), "gather")


def _scatter(group: bagua.Group, every: list[Any], mine: Any) -> None:
    root = int(every[0][0]) % group.size
    out = np.empty(len(mine), np.float32)
    group.scatter(np.stack(every) + root if group.rank == root else None, root, out=out)
    _equal(out, every[group.rank] + root, "scatter")


def _all_to_all(group: bagua.Group, every: list[Any], mine: Any) -> None:
    part = len(mine) // group.size
    out = np.empty_like(mine)
    group.all_to_all(mine, out=out)
    here = slice(group.rank * part, (group.rank + 1) * part)
    _equal(out, np.concatenate([theirs[here] for theirs in every]), "all_to_all")


def _all_to_all_v(group: bagua.Group, every: list[Any], mine: Any) -> None:
    size, rank = group.size, group.rank
    unit = len(mine) // (size * size)
    # Rank r gets r + 1 units of everybody.
    sends, starts = [unit * (to + 1) for to in range(size)], [unit * (to * (to + 1) // 2) for to in range(size)]
    out = np.empty(size * sends[rank], np.float32)
    group.all_to_all_v(mine[: sum(sends)].copy(), sends, [sends[rank]] * size, out=out)
    parts = [theirs[starts[rank] : starts[rank] + sends[rank]] for theirs in every]
    _equal(out, np.concatenate(parts), "all_to_all_v")


def _send_and_recv(group: bagua.Group, every: list[Any], mine: Any) -> None:
    # Around a ring, one after the other, so that every rank waits for a rank that waits.
    before, after = (group.rank - 1) % group.size, (group.rank + 1) % group.size
    out = np.empty_like(mine)
    if group.rank == 0:
        group.send(mine, after)
        group.recv(out, before)
    else:
        group.recv(out, before)
        group.send(mine, after)
    _equal(out, every[before], "recv")


def _exchange(group: bagua.Group, every: list[Any], mine: Any) -> None:
    others = [rank for rank in range(group.size) if rank != group.rank]
    out = {rank: np.empty_like(mine) for rank in others}
    group.exchange([(rank, mine) for rank in others], list(out.items()))
    for rank in others:
        _equal(out[rank], every[rank], "exchange")


def _barrier(group: bagua.Group, every: list[Any], mine: Any) -> None:
    group.barrier()


VERBS: dict[str, Callable[[bagua.Group, list[Any], Any], None]] = {
    "all_reduce": _all_reduce,
    "reduce": _reduce,
    "broadcast": _broadcast,
    "reduce_scatter": _reduce_scatter,
    "all_gather": _all_gather,
    "gather": _gather,
    "scatter": _scatter,
    "all_to_all": _all_to_all,
    "all_to_all_v": _all_to_all_v,
    "send and recv": _send_and_recv,
    "exchange": _exchange,
    "barrier": _barrier,
}


class Verb(Action):
    """A verb of the group, on arrays of both sizes."""

    verb: str

    def begin(self) -> None:
        self.group = bagua.init()
        self.once(0)

    def once(self, step: int) -> None:
        for count in SIZES:
            every = [given(rank, step, count) for rank in range(self.size)]
            VERBS[self.verb](self.group, every, every[self.rank])


# --- what is more than one operation ----------------------------------------------------------------------------------


class NewGroup(Action):
    """A sub-group of all ranks is made, used and left."""

    def begin(self) -> None:
        self.group = bagua.init()

    def once(self, step: int) -> None:
        group = self.group.new_group(range(self.size))
        assert group is not None
        _all_reduce(group, [given(rank, step, 48) for rank in range(self.size)], given(self.rank, step, 48))
        group.leave()


class Training(Action):
    """Steps of a model that `with_bagua` wraps with gradient_allreduce."""

    uses_torch = True

    def begin(self) -> None:
        self.model, self.optimizer = training.begin()
        self.steps = 0
        self.once(0)

    def once(self, step: int) -> None:
        training.make_step(self.model, self.optimizer, self.steps)
        self.steps += 1

    def result(self) -> str:
        expected = training.plain("momentum", [self.size] * self.steps)
        for ours, theirs in zip(self.model.parameters(), expected, strict=True):
            check(torch.allclose(ours, theirs, rtol=1e-4, atol=1e-5), "parameters of a training")
        return training.digest(self.model, self.optimizer)

    def end(self) -> None:
        _leave_torch()


#: Seconds until an exception is raised on all ranks, on a machine that does much else.
RAISED_WITHIN = 15.0


class Rebuild(Training):
    """A rank reports an exception, and all ranks, or those that are left, rebuild the group and go on training."""

    #: gloo's group is formed anew, by ever more round trips the more ranks there are.
    timeout = 20.0
    #: After the loss of ranks that may still run.
    errors = ("PeerLostError", "GoesOn", "quorum")

    def once(self, step: int) -> None:
        # All agree on it: a rank whose rebuild began again, because another failed meanwhile, calls this once less.
        reporter = self.steps % self.size
        try:
            super().once(step)
            if step > 0 and self.rank == reporter:
                process_state.report(ValueError, ValueError("bad number"))
            # Which ranks make the step that one of them reports an exception in is not said, nor how many more.
            until = time.monotonic() + RAISED_WITHIN
            while step > 0:
                check(time.monotonic() < until, "no rank raised the exception")
                super().once(step)
        except (bagua.PeerRaisedError, bagua.PeerLostError):
            rebuilt = bagua.torch_api.rebuild()
            self.steps = rebuilt.steps["Model_0"]
            if rebuilt.lost:
                raise GoesOn(rebuilt.lost) from None


class Init(Action):
    """Groups are joined and left, each by a file of its own."""

    repeats = 1
    timeout = 4.0
    joins = True
    errors = ("PeerLostError", "BaguaTimeoutError")

    def once(self, step: int) -> None:
        group = bagua.init(init_method=f"file://{self.folder}/group{step}")
        _all_reduce(group, [given(rank, step, 48) for rank in range(self.size)], given(self.rank, step, 48))
        bagua.shutdown()


class InitProcessGroup(Action):
    """The same with torch.distributed, over the store that rank 0 serves."""

    repeats = 1
    timeout = 4.0
    joins = True
    uses_torch = True
    #: "store": torch's store, which rank 0 serves, does not answer.
    errors = ("PeerLostError", "BaguaTimeoutError", "store")

    def begin(self) -> None:
        self.once(0)

    def once(self, step: int) -> None:
        bagua.torch_api.init_process_group()
        x = torch.full((48,), float(self.rank + step))
        bagua.torch_api.allreduce_inplace(x, bagua.torch_api.ReduceOp.SUM)
        check((x == sum(range(self.size)) + self.size * step).all(), "all_reduce")
        bagua.torch_api.destroy_process_group()

    def end(self) -> None:
        _leave_torch()


def _leave_torch() -> None:
    bagua.torch_api.destroy_process_group()
    # A process keeps its store for the next group; this one makes none.
    membership_state.stores.clear()


ACTIONS: dict[str, type[Action]] = {
    **{name: type(name, (Verb,), {"verb": name}) for name in VERBS},
    "training": Training,
    "new_group": NewGroup,
    "init": Init,
    "init_process_group": InitProcessGroup,
    "rebuild": Rebuild,
}

#: What `tests.chaos.averaging` does instead.
ELASTIC = ("averaging", "join")
