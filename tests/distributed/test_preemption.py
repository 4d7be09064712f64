"""The script of the page about preemption: SIGTERM to one rank, and all ranks save and leave after the same step."""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests import forks
from tests.waits import until
from tests.world import ROOT, free_port

SCRIPT = ROOT / "examples" / "preemption.py"
SIZE = 3
AGAIN = 75


class Run:
    """One start of the job."""

    def __init__(self, folder: Path, name: str) -> None:
        self.outputs = [folder / f"{name}-{rank}" for rank in range(SIZE)]
        self.ranks: list[forks.Fork] = []

    def steps(self, what: str) -> list[list[int]]:
        """The numbers behind these words, by rank."""
        texts = [output.read_text() if output.exists() else "" for output in self.outputs]
        return [[int(step) for step in re.findall(rf"{what} step (\d+)\n", text)] for text in texts]

    def codes(self) -> list[int]:
        """The exit codes, when all ranks have ended."""
        return [rank.wait(120) for rank in self.ranks]

    def shown(self) -> str:
        """The end of what each rank has printed."""
        return "\n".join(output.read_text()[-2000:] for output in self.outputs)


@contextlib.contextmanager
def started(folder: Path, name: str, steps: int, workers: int) -> Iterator[Run]:
    """A start of the job, of which no rank is left afterwards."""
    run = Run(folder, name)
    arguments = ["--folder", str(folder / "kept"), "--steps", str(steps), "--workers", str(workers)]
    world = {"WORLD_SIZE": str(SIZE), "LOCAL_WORLD_SIZE": str(SIZE), "MASTER_ADDR": "127.0.0.1"}
    with free_port() as port:
        try:
            for rank, output in enumerate(run.outputs):
                place = {"MASTER_PORT": str(port), "RANK": str(rank), "LOCAL_RANK": str(rank)}
                own = {**os.environ, **world, **place}
                run.ranks.append(forks.start_script(SCRIPT, *arguments, rank=rank, environment=own, output=output))
            yield run
        finally:
            for process in run.ranks:
                process.kill()
                process.wait()


def kept(folder: Path) -> tuple[int, dict[str, torch.Tensor]]:
    """The last checkpoint: its step, and the weights."""
    step = int((folder / "kept" / "latest_checkpointed_iteration.txt").read_text())
    file = folder / "kept" / f"iter_{step:07d}" / "mp_rank_00_model_states.pt"
    return step, torch.load(file, weights_only=False)["model"]


@pytest.mark.parametrize(
    ("kills", "workers"), [(1, 0), *(pytest.param(*row, marks=pytest.mark.slow) for row in ((20, 0), (3, 1)))]
)
def test_all_ranks_leave_after_the_same_step(kills: int, workers: int, tmp_path: Path) -> None:
    (killed := tmp_path / "killed").mkdir()
    chance = random.Random(kills)
    begin = 0
    for kill in range(kills):
        with started(killed, str(kill), 1_000_000, workers) as run:
            until(lambda run=run: all(len(done) > 2 for done in run.steps("has done")), "the ranks train")  # type: ignore[misc]
            os.kill(run.ranks[chance.randrange(SIZE)].pid, signal.SIGTERM)
            assert run.codes() == [AGAIN] * SIZE, run.shown()
        assert run.steps("begins at") == [[begin]] * SIZE
        # No step is lost: all ranks have done the same steps, and saved.
        (begin,) = {done[-1] for done in run.steps("has done")}
        assert run.steps("has saved after") == [[begin]] * SIZE
    step, weights = kept(killed)
    assert step == begin
    (alone := tmp_path / "alone").mkdir()
    with started(alone, "whole", step, workers) as run:
        assert run.codes() == [0] * SIZE, run.shown()
    assert kept(alone)[0] == step
    for name, values in kept(alone)[1].items():
        assert torch.equal(values, weights[name]), name
