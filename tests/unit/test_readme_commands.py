"""The commands of the README do what they promise, as far as that can be seen without running them."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def would_run(target: str, **variables: str) -> str:
    """The commands that make would run for a target if nothing were there yet."""
    environment = {name: value for name, value in os.environ.items() if name not in {"TORCH_BACKEND", "MAKEFLAGS"}}
    command = ["make", "--no-print-directory", "--always-make", "--dry-run", target]
    return subprocess.run(
        command, cwd=ROOT, env={**environment, **variables}, check=True, capture_output=True, text=True
    ).stdout


def test_the_torch_backend_is_passed_to_uv_when_it_is_asked_for() -> None:
    line = re.search(r"uv pip install .*develop\.in", would_run("setup", TORCH_BACKEND="cpu"))
    assert line is not None
    assert "--torch-backend=cpu" in line[0]


def test_without_it_uv_decides() -> None:
    assert "--torch-backend" not in would_run("setup")


def test_training_starts_two_ranks_with_torchrun() -> None:
    assert "torchrun --standalone --nproc-per-node 2 examples/train_digits.py" in would_run("train")


@pytest.mark.parametrize("name", ["constraints.txt", "oldest.txt"])
def test_every_requirement_is_pinned_and_no_index_is_named(name: str) -> None:
    lines = [line for line in (ROOT / "requirements" / name).read_text().splitlines() if not line.startswith("#")]
    assert len(lines) > 10
    assert [line for line in lines if not re.match(r"[\w.-]+==[\w.]+( ; .+)?$", line)] == []


def test_a_marker_decides_what_make_test_leaves_out() -> None:
    commands = would_run("test")
    assert "--profile quick" in commands
    assert '-m "not slow"' in commands
    commands = would_run("test-all")
    assert "--profile default" in commands
    assert "not slow" not in commands


@pytest.mark.parametrize("broken", ["test-all", "lint", "docs", "nothing"])
def test_ci_runs_every_test_lint_and_docs_and_fails_when_one_of_them_fails(tmp_path: Path, broken: str) -> None:
    make = tmp_path / "make"
    make.write_text(f'#!/bin/sh\necho "$@" >>{tmp_path}/called\n[ "$1" != {broken} ]\n')
    make.chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    shown = subprocess.run([ROOT / ".ci" / "run"], env=environment, capture_output=True, text=True, check=False)
    assert (tmp_path / "called").read_text().split() == ["test-all", "lint", "docs"]
    assert shown.returncode == (0 if broken == "nothing" else 1), shown.stdout
    assert (f"failed: {broken}" in shown.stdout) == (broken != "nothing")
