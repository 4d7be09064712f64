"""Every benchmark runs to its end in its shortest mode, its answers checked by itself."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


def quick(script: str, folder: Path, *options: str) -> tuple[str, list[dict[str, str]]]:
    """What the script printed, and the rows of its CSV files."""
    command = [sys.executable, str(BENCHMARKS / script), "--quick", "--no-mpi", "--csv", str(folder), *options]
    ours = ("BAGUA_", "MASTER_", "OMPI_")
    env = {key: value for key, value in os.environ.items() if not key.startswith(ours) and key != "RANK"}
    done = subprocess.run(
        [*command, "--limit", "120"], env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    assert done.returncode == 0, done.stdout
    rows = []
    for path in folder.glob("*.csv"):
        with open(path, newline="", encoding="utf-8") as file:
            rows += list(csv.DictReader(file))
    return done.stdout, rows


def test_collectives_are_raced_and_the_missing_contender_is_named(tmp_path: Path) -> None:
    shown, rows = quick("collectives.py", tmp_path, "--verbs", "all_reduce", "all_to_all")
    assert {"ours", "gloo"} <= {row["contender"] for row in rows}
    assert all(float(row["seconds"]) > 0 for row in rows)
    assert {"machine", "date", "commit"} <= rows[0].keys()
    assert "no column for openmpi" in shown


def test_the_door_is_measured_at_every_storey(tmp_path: Path) -> None:
    _, rows = quick("collectives.py", tmp_path, "--door")
    assert len(rows) == 4
    assert all(float(row["ns_min"]) > 0 for row in rows)


def test_growth_counts_threads_and_time(tmp_path: Path) -> None:
    _, rows = quick("growth.py", tmp_path)
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
    _, rows = quick("train.py", tmp_path, "--parts", "throughput", "handover")
    assert {"bagua", "ddp", "ddp-bf16"} <= {row.get("contender", "") for row in rows}
    assert {"blocking", "handed over"} <= {row.get("what", "") for row in rows}
