"""The README's example works as a new user would run it, and its links exist."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tools.blocks import python_blocks

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_the_example_trains_on_two_ranks_to_equal_weights(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="torch is not installed: make setup")
    script = tmp_path / "train.py"
    script.write_text(python_blocks(ROOT / "README.md")[0][2])
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    shown = subprocess.run(command, capture_output=True, text=True, timeout=150, env=environment, check=False)
    assert shown.returncode == 0, shown.stdout + shown.stderr
    lines = dict(re.findall(r"rank (\d): loss [\d.]+, weights (-?[\d.]+)", shown.stdout))
    assert set(lines) == {"0", "1"}, shown.stdout
    assert lines["0"] == lines["1"]


def test_the_example_has_at_most_fifteen_lines_of_code() -> None:
    code = python_blocks(ROOT / "README.md")[0][2]
    assert 5 <= len([line for line in code.splitlines() if line.strip()]) <= 15 + 1  # and the line that says goodbye


def test_make_help_explains_every_target() -> None:
    makefile = (ROOT / "Makefile").read_text()
    phony = set(re.findall(r"^\.PHONY: (\S+)$", makefile, re.MULTILINE))
    shown = subprocess.run(
        ["make", "--no-print-directory", "help"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout
    assert phony == set(re.findall(r"^  make (\S+) +\S", shown, re.MULTILINE))


def test_every_make_target_that_a_document_names_exists() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for document in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "benchmarks").glob("*.md")]:
        named = {
            word
            for words in re.findall(r"`(?:\w+=\S+ )*make ([a-z -]+)`", document.read_text())
            for word in words.split()
        }
        assert named <= targets, document
