"""An elastic job whose models are on devices: a rank is killed and a new one joins, under asynchronous averaging."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cuda.ranks import Ranks
from tests.distributed.test_elastic import Job, all_hold, set_all


@pytest.mark.slow
def test_a_killed_rank_is_left_behind_and_its_restart_gets_the_average_on_its_device(
    ranks: Ranks, tmp_path: Path
) -> None:
    with ranks.environment() as variables:
        job = Job(2, f"file://{tmp_path}/book")
        try:
            on_devices(job, variables | {"ELASTIC_DEVICE": "cuda"})
        finally:
            job.end()
    # The one that was killed reports nothing.
    assert len(ranks.reports) == 2
    for report in ranks.reports:
        assert report["calls"]["cuLaunchKernel"] > 0
    ranks.check()


def on_devices(job: Job, variables: dict[str, str]) -> None:
    first, second = (job.start(rank, **variables) for rank in range(2))
    assert [rank.answer() for rank in (first, second)] == [{"rank": r, "rejoined": False} for r in range(2)]
    for rank in (first, second):
        rank.send("wrap 1 4")
    assert [rank.answer() for rank in (first, second)] == ["wrapped"] * 2
    set_all([first, second], [0.0, 8.0])
    all_hold([first, second], 4.0)
    second.kill()
    assert list(first.is_in([0])["lost"]) == ["1"]
    set_all([first], [6.0])
    assert first.ask("train 0.5") == "trained"
    held = all_hold([first], 5.5)

    back = job.start(1, **variables)
    assert back.answer() == {"rank": 1, "rejoined": True}
    assert back.ask("wrap 500 4") == "wrapped"
    # Its own 500 did not count.
    state = back.ask("state")
    assert (state["weights"], state["joined"]) == (held, 1)
    for rank in (first, back):
        assert rank.is_in([0, 1])["lost"] == {}
    set_all([first, back], [0.0, 8.0])
    all_hold([first, back], 4.0)
    for rank in (first, back):
        rank.end()
