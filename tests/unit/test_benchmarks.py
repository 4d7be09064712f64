"""Every benchmark runs to its end in its shortest mode, its answers checked by itself."""

from __future__ import annotations

import csv
import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

pytest.importorskip("torch")

#: Options of those that start ranks.
RANKS = ("--no-mpi", "--limit", "120")
BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


def quick(script: str, folder: Path, *options: str) -> tuple[str, list[dict[str, str]]]:
    """What the script printed, and the rows of its CSV files."""
    command = [sys.executable, str(BENCHMARKS / script), "--quick", "--csv", str(folder), *options]
    ours = ("BAGUA_", "MASTER_", "OMPI_")
    env = {key: value for key, value in os.environ.items() if not key.startswith(ours) and key != "RANK"}
    done = subprocess.run(
        command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False, timeout=150
    )
    assert done.returncode == 0, done.stdout
    rows = []
    for path in folder.glob("*.csv"):
        with open(path, newline="", encoding="utf-8") as file:
            rows += list(csv.DictReader(file))
    return done.stdout, rows


def test_collectives_are_raced_and_the_missing_contender_is_named(tmp_path: Path) -> None:
    shown, rows = quick("collectives.py", tmp_path, *RANKS, "--verbs", "all_reduce", "all_to_all")
    assert {"ours", "gloo"} <= {row["contender"] for row in rows}
    assert all(float(row["seconds"]) > 0 for row in rows)
    assert {"machine", "date", "commit"} <= rows[0].keys()
    assert "no column for openmpi" in shown


def test_the_door_is_measured_at_every_storey(tmp_path: Path) -> None:
    _, rows = quick("collectives.py", tmp_path, *RANKS, "--door")
    storeys = [row["call"] for row in rows if not row["ns_mean"]]
    assert len(storeys) == 5
    # All but the empty one, also beside a busy thread.
    assert [row["call"] for row in rows if row["ns_mean"]] == [f"{name}, busy thread" for name in storeys[1:]]
    assert all(float(row["ns_min"]) > 0 for row in rows)


def test_growth_counts_threads_and_time(tmp_path: Path) -> None:
    _, rows = quick("growth.py", tmp_path, *RANKS)
    assert {row["ranks"] for row in rows} == {"2"}
    assert all(int(row["threads"]) >= 0 for row in rows)


def test_the_network_is_measured_or_the_reason_is_said(tmp_path: Path) -> None:
    shown, rows = quick("network.py", tmp_path, "--if-possible")
    if not rows:
        assert "nothing measured between network namespaces: " in shown
        pytest.skip(shown.strip())
    assert [row["rate"] for row in rows] == ["unlimited"]
    assert all(float(row[f"{name}_seconds"]) > 0 for row in rows for name in ("ours", "gloo", "bare"))


def test_training_is_raced_with_losses_that_agree(tmp_path: Path) -> None:
    _, rows = quick("train.py", tmp_path, *RANKS, "--parts", "throughput", "handover")
    assert {"bagua", "ddp", "ddp-bf16"} <= {row.get("contender", "") for row in rows}
    assert {"blocking", "handed over"} <= {row.get("what", "") for row in rows}


def test_the_cache_is_raced_against_redis_py_and_plotted(tmp_path: Path) -> None:
    for package in ("redis", "msgpack", "xxhash"):
        pytest.importorskip(package, reason=f"{package} is not installed: make setup")
    if shutil.which("redis-server") is None:
        pytest.skip("redis-server is not installed: tools/system_packages test")
    _, rows = quick("cache.py", tmp_path)
    ratios = {row["way"]: row["of_decoded"] for row in rows if row["of_decoded"]}
    assert {"CacheLoader.get_many, arrays", "CacheLoader.get_many, tensors"} <= ratios.keys()
    assert all(float(ratio) > 0 for ratio in ratios.values())
    assert len(list(tmp_path.glob("*.svg"))) == (find_spec("matplotlib") is not None)


def test_samplers_are_raced_on_skewed_lengths(tmp_path: Path) -> None:
    _, rows = quick("samplers.py", tmp_path)
    assert {row["sampler"] for row in rows} == {"LoadBalancingDistributedSampler", "DistributedSampler"}


def test_fused_optimizers_are_raced_and_compared_with_the_plain_one(tmp_path: Path) -> None:
    _, rows = quick("fused_optimizer.py", tmp_path)
    assert {"plain", "foreach", "fused", "fuse_step"} <= {row["way"] for row in rows}
