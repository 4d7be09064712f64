"""Elastic jobs: ranks that are killed, frozen, restarted; each scenario with processes that follow commands."""

from __future__ import annotations

import json
import os
import selectors
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import bagua.torch_api as bagua_torch
from tests import forks
from tests.distributed.test_network_namespaces import end

#: Seconds for anything that a test waits for: imports of torch on a loaded machine, heartbeats, rounds.
PATIENCE = 120.0


class Rank:
    """One process, in a network namespace if it is given the path of one."""

    def __init__(self, rank: int, size: int, book: str, namespace: str | None = None, **environment: str) -> None:
        env = {
            **os.environ,
            "BAGUA_ELASTIC": book,
            "BAGUA_TIMEOUT": "90",
            "BAGUA_HEARTBEAT_TIMEOUT": "3",
            "RANK": str(rank),
            "WORLD_SIZE": str(size),
            "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": str(size),
            **environment,
        }
        self.rank, self.book = rank, book
        self.process = forks.start_with_pipes(
            "tests.distributed.elastic_rank", rank=rank, environment=env, namespace=namespace
        )
        self._rest = b""

    def answer(self) -> Any:
        """Returns the next line of the process."""
        assert self.process.stdout is not None
        selector = selectors.DefaultSelector()
        selector.register(self.process.stdout, selectors.EVENT_READ)
        until = time.monotonic() + PATIENCE
        while b"\n" not in self._rest:
            assert selector.select(max(until - time.monotonic(), 0)), f"rank {self.rank} does not answer"
            more = os.read(self.process.stdout.fileno(), 65536)
            assert more, f"rank {self.rank} ended with {self.process.wait()}"
            self._rest += more
        line, _, self._rest = self._rest.partition(b"\n")
        return json.loads(line)

    def send(self, command: str) -> None:
        """Sends a command."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{command}\n".encode())
        self.process.stdin.flush()

    def ask(self, command: str) -> Any:
        """Sends a command and returns the answer."""
        self.send(command)
        return self.answer()

    def until(self, holds: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """Waits until ``holds`` returns True for the state of the process. Returns that state."""
        deadline = time.monotonic() + PATIENCE
        while True:
            state: dict[str, Any] = self.ask("state")
            if holds(state):
                return state
            assert time.monotonic() < deadline, state
            time.sleep(0.01)

    def is_in(self, ranks: list[int]) -> dict[str, Any]:
        """Waits for a whole round of these ranks that began after this call."""
        first = self.until(lambda state: state["ranks"] == ranks)
        return self.until(lambda state: state["ranks"] == ranks and state["rounds"] >= first["rounds"] + 2)

    def kill(self) -> None:
        """SIGKILL."""
        self.process.kill()
        self.process.wait()

    def end(self) -> None:
        """Ends in order."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        assert self.answer() == "left"
        assert self.process.wait(PATIENCE) == 0


class Job:
    """The ranks of one job."""

    def __init__(self, size: int, book: str) -> None:
        self.size, self.book = size, book
        self.ranks: list[Rank] = []

    def start(self, rank: int, **environment: str) -> Rank:
        """Starts a process."""
        made = Rank(rank, self.size, self.book, **environment)
        self.ranks.append(made)
        return made

    def form(self) -> list[Rank]:
        """All ranks in the job, with a model that begins at 1."""
        ranks = [self.start(rank) for rank in range(self.size)]
        assert [rank.answer() for rank in ranks] == [{"rank": r, "rejoined": False} for r in range(self.size)]
        for rank in ranks:
            rank.send("wrap 1 4")
        assert [rank.answer() for rank in ranks] == ["wrapped"] * self.size
        return ranks

    def end(self) -> None:
        """Ends what still runs."""
        for rank in self.ranks:
            end(rank.process)


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Callable[[int], Job]]:
    made: list[Job] = []

    def make(size: int, book: str | None = None) -> Job:
        made.append(Job(size, book or f"file://{tmp_path}/book"))
        return made[-1]

    yield make
    for each in made:
        each.end()


def all_hold(ranks: list[Rank], value: float) -> list[float]:
    """At rest, all of these ranks come to hold the same bits: `value`, but for what the rounds meanwhile rounded."""
    deadline = time.monotonic() + PATIENCE
    while True:
        held = [rank.ask("state")["weights"] for rank in ranks]
        if held[0] == pytest.approx([value] * 4, rel=1e-5) and all(weights == held[0] for weights in held):
            return list(held[0])
        assert time.monotonic() < deadline, held
        time.sleep(0.01)


def set_all(ranks: list[Rank], values: list[float]) -> None:
    """Gives each rank, at rest, new weights, with no round in between."""
    for rank in ranks:
        assert rank.ask("lock") == "locked"
    for rank, value in zip(ranks, values, strict=True):
        assert rank.ask(f"set {value}") == "set"
    for rank in ranks:
        assert rank.ask("unlock") == "unlocked"


@pytest.mark.parametrize("victim", [0, 1, pytest.param(3, marks=pytest.mark.slow)])
def test_a_killed_rank_is_left_behind_and_its_restart_gets_the_average(job: Any, victim: int) -> None:
    made = job(4)
    ranks = made.form()
    set_all(ranks, [0.0, 8.0, 16.0, 24.0])
    # The divisor of four: 0, 8, 16, 24.
    all_hold(ranks, 12.0)
    before = ranks[victim].ask("state")
    assert before["elastic"]["ranks"] == [0, 1, 2, 3]
    assert before["elastic"]["door"].startswith("127.0.0.1:")
    ranks[victim].kill()
    others = [rank for rank in ranks if rank.rank != victim]
    names = [rank.rank for rank in others]
    for rank in others:
        state = rank.is_in(names)
        assert list(state["lost"]) == [str(victim)]
        assert state["view"] > before["view"]
    # No exception, and the divisor of three.
    for rank in others:
        assert rank.ask("train 0.0") == "trained"
    set_all(others, [0.0, 6.0, 12.0])
    held = all_hold(others, 6.0)
    others[0].ask("train 0.0")

    back = made.start(victim)
    assert back.answer() == {"rank": victim, "rejoined": True}
    assert back.ask("wrap 500 4") == "wrapped"
    # Its own 500 did not count; the buffers and the counter are the lowest rank's.
    state = back.ask("state")
    assert state["weights"] == held
    assert (state["seen"], state["counter"], state["joined"]) == ([0.0] * 3, 2, 1)
    # A flight record of the new process is one of this job.
    assert set(state["jobs"]) & set(before["jobs"])
    everybody = [back if rank.rank == victim else rank for rank in ranks]
    for rank in everybody:
        assert rank.is_in([0, 1, 2, 3])["lost"] == {}
    set_all(everybody, [0.0, 8.0, 16.0, 24.0])
    all_hold(everybody, 12.0)
    for rank in everybody:
        rank.end()


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 2])
def test_a_frozen_rank_is_left_behind_and_comes_back_by_itself(job: Any, victim: int) -> None:
    ranks = job(3).form()
    all_hold(ranks, 1.0)
    os.kill(ranks[victim].process.pid, signal.SIGSTOP)
    others = [rank for rank in ranks if rank.rank != victim]
    for rank in others:
        assert "heartbeat" in rank.is_in([rank.rank for rank in others])["lost"][str(victim)]
    set_all(others, [0.0, 4.0])
    all_hold(others, 2.0)
    os.kill(ranks[victim].process.pid, signal.SIGCONT)
    for rank in ranks:
        rank.is_in([0, 1, 2])
    # Its weights counted as they were: 2, 2 and 1.
    mean = ranks[0].ask("state")["weights"]
    assert mean == pytest.approx([5 / 3] * 4)
    for rank in ranks:
        rank.until(lambda state: state["weights"] == mean)
    # Whoever looked for the others first: rank 0 comes back to them, or they to rank 0.
    assert max(rank.ask("state")["joined"] for rank in ranks) >= 1
    assert ranks[victim].ask("train 0") == "trained"


def test_what_does_not_fit_a_running_job_is_refused_on_the_joining_rank_alone(job: Any) -> None:
    made = job(2)
    ranks = made.form()
    twin = made.start(1)
    error, text = twin.answer()
    assert error == "BaguaError"
    assert "rank 1 is alive" in text
    ranks[1].kill()
    ranks[0].is_in([0])
    # After a loss the default group has failed.
    assert ranks[0].ask("verb")[0] == "PeerLostError"
    back = made.start(1)
    assert back.answer() == {"rank": 1, "rejoined": True}
    error, text = back.ask("verb")
    assert error == "BaguaError"
    assert "rejoined a running elastic job" in text
    error, text = back.ask("other")
    assert error == "BaguaError"
    assert "use AsyncModelAverageAlgorithm" in text
    for _ in range(3):
        ranks[0].is_in([0])
    assert ranks[0].ask("train 0") == "trained"


def test_a_model_that_does_not_fit_is_a_mismatch_on_the_joining_rank_alone(job: Any) -> None:
    made = job(2)
    ranks = made.form()
    ranks[1].kill()
    back = made.start(1)
    assert back.answer() == {"rank": 1, "rejoined": True}
    error, text = back.ask("wrap 1 5")
    assert error == "MismatchError"
    assert "differs" in text
    assert ranks[0].is_in([0])["rounds"] > 0


@pytest.mark.parametrize(
    "book", ["file:", "file:///", "file://host/x", "tcp://", "tcp://host", "tcp://host:x", "redis://h:1"]
)
def test_an_address_that_is_no_book_is_refused(book: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ValueError, match="an address book is"):
        bagua_torch.init_process_group(elastic=book)
    assert not bagua_torch.is_initialized()
