"""Every example that needs nothing but ranks runs to its end on two of them."""

from __future__ import annotations

import re
import runpy
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.world import ROOT, World

pytestmark = pytest.mark.slow


def run_example(rank: int, name: str, arguments: list[str]) -> int:
    torch.set_num_threads(1)
    sys.argv = [name, *arguments]
    try:
        runpy.run_path(str(Path(ROOT, "examples", name)), run_name="__main__")
    except SystemExit as left:
        return int(left.code or 0)
    return 0


@pytest.mark.parametrize("name", ["moe.py", "sync_batchnorm.py", "cached_dataset.py", "fused_optimizer.py", "async.py"])
def test_the_example_ends_well_on_every_rank(name: str) -> None:
    if name == "cached_dataset.py":
        for package in ("msgpack", "redis", "xxhash"):
            pytest.importorskip(package, reason=f"{package} is not installed: make setup")
    world = World(2, timeout=240.0)
    assert world.run(run_example, name, []) == [0, 0]
    assert world.output[0].strip()


def test_the_example_that_loses_a_rank_goes_on_without_it() -> None:
    results = World(3, timeout=240.0, expect_exit={2: -signal.SIGKILL})
    assert results.run(run_example, "shrink.py", []) == [0, 0, None]
    assert "rank 1 is rank 1 of 2 from step 10: lost rank 2" in results.output[1]
    assert "weights equal on all ranks" in results.output[0]


def test_the_elastic_example_gets_its_failed_rank_back() -> None:
    command = [sys.executable, "-m", "bagua.distributed.run", "--keep-going", "--nproc-per-node", "2"]
    example = str(Path(ROOT, "examples", "elastic.py"))
    done = subprocess.run([*command, example], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    for line in ("rank 1 fails", "rank 0 goes on with 1 of 2 ranks", "rank 1 came back at forward"):
        assert line in done.stdout
    assert "rank 1 came back at forward 0\n" not in done.stdout
    assert "ended with exit code 7: restart 1 of 3" in done.stderr


def test_the_checkpoint_example_goes_on_where_it_stopped(tmp_path: Path) -> None:
    arguments = ["--folder", str(tmp_path), "--iterations", "3"]
    tracker = tmp_path / "latest_checkpointed_iteration.txt"
    reached = []
    for _ in range(2):
        assert World(2, timeout=240.0).run(run_example, "checkpoint.py", arguments) == [0, 0]
        reached.append(int(tracker.read_text(encoding="utf-8")))
    assert reached[1] > reached[0] > 0


def test_the_comparison_of_algorithms_prints_a_line_for_each_and_draws_their_losses(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed: make setup")
    picture = tmp_path / "loss.png"
    task = "examples.compare_algorithms:task"
    names = [
        "gradient_allreduce",
        "bytegrad:compression=onebit,error_feedback=True",
        "qadam",
        "async:sync_interval_ms=5",
    ]
    arguments = ["--steps", "12", "--batch", "8", "--png", str(picture), "--task", task, "--algorithms", *names]
    world = World(2, timeout=240.0, env={"BAGUA_TRANSPORT": "tcp"})
    assert world.run(run_example, "compare_algorithms.py", arguments) == [0, 0]
    header, *lines = [line.split() for line in world.output[0].splitlines()[-len(names) - 1 :]]
    assert header[0] == "algorithm"
    assert [line[0] for line in lines] == names
    full, less = (float(line[-1]) for line in lines[:2])
    assert full > 10 * less > 0
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_the_horovod_example_draws_its_loss(tmp_path: Path) -> None:
    for package in ("matplotlib", "sklearn", "tqdm"):
        pytest.importorskip(package, reason=f"{package} is not installed: make setup")
    picture = tmp_path / "loss.png"
    world = World(2, timeout=240.0)
    assert world.run(run_example, "horovod_digits.py", ["--png", str(picture)]) == [0, 0]
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "weights        equal on all ranks" in world.output[0]


def test_the_example_of_the_backend_draws_its_loss(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed: make setup")
    picture = tmp_path / "loss.png"
    world = World(2, timeout=240.0)
    assert world.run(run_example, "ddp_backend.py", ["--png", str(picture)]) == [0, 0]
    assert "2 ranks on bagua" in world.output[0]
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_the_example_of_aggregation_learns_and_compression_sends_less() -> None:
    world = World(2, timeout=150.0)
    assert world.run(run_example, "aggregation.py", []) == [0, 0]
    lines = re.findall(r"^(\S.*?) +(\d+) bytes a step, loss ([\d.]+)$", world.output[0], re.MULTILINE)
    cost = {variant: int(size) for variant, size, _ in lines}
    assert set(cost) == {"all-reduce", "low rank", "sparsified", "CentralizedSGD", "DecentralizedSGD"}
    assert cost["low rank"] < cost["all-reduce"] / 4
    assert cost["sparsified"] < cost["all-reduce"] / 2
    # An untrained model is at about 0.9.
    assert max(float(loss) for _, _, loss in lines) < 0.6
    assert "replicas are equal" in world.output[0]
