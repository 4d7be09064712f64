"""The README and the guide from DDP do what they promise: the diff, the chart, the commands."""

from __future__ import annotations

import csv
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests import gloo
from tools.blocks import python_blocks

ROOT = Path(__file__).resolve().parents[2]


def diffs(page: str) -> list[str]:
    """The blocks of a page that are marked as diffs."""
    return re.findall(r"^```diff\n(.*?)^```$", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)


def patched(script: str, diff: str) -> str:
    """The script after the diff, whose old lines must be in it, one after the other."""
    before, after = (
        "".join(line[1:] + "\n" for line in diff.splitlines() if line[:1] in kept) for kept in (" -", " +")
    )
    assert script.count(before) == 1, before
    return script.replace(before, after)


def weights(script: str, folder: Path) -> list[list[float]]:
    """The weights that each of two ranks has after the script, as torchrun starts it."""
    path = folder / "train.py"
    saved = 'torch.save(weights, f"weights{dist.get_rank()}.pt")'
    assert script.count("dist.destroy_process_group()") == 1
    path.write_text(script.replace("dist.destroy_process_group()", saved + "\ndist.destroy_process_group()"))
    program = gloo.arguments(path) if '"gloo"' in script else [str(path)]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *program]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    shown = subprocess.run(
        command, capture_output=True, text=True, timeout=150, env=environment, check=False, cwd=folder
    )
    assert shown.returncode == 0, shown.stdout + shown.stderr
    import torch

    return [torch.load(folder / f"weights{rank}.pt", weights_only=True).tolist() for rank in range(2)]


@pytest.mark.slow
def test_the_ddp_script_trains_to_the_same_bits_after_the_three_lines_of_the_diff(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="torch is not installed: make setup")
    (script,) = [code for _, _, code in python_blocks(ROOT / "docs" / "how-to" / "from_ddp.md")]
    (diff,) = diffs("README.md")
    assert diff == diffs("docs/how-to/from_ddp.md")[0]
    assert len([line for line in diff.splitlines() if line.startswith("+")]) == 3
    gloos, ours = weights(script, tmp_path), weights(patched(script, diff), tmp_path)
    assert gloos == ours
    assert ours[0] == ours[1]


@pytest.mark.slow
def test_the_second_diff_of_the_page_sends_encoded_gradients(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="torch is not installed: make setup")
    page = "docs/how-to/from_ddp.md"
    (script,) = [code for _, _, code in python_blocks(ROOT / page)]
    first, second = diffs(page)
    exact = patched(script, first)
    # The page says how: one host would encode nothing otherwise.
    encoded = "from bagua.torch_api.algorithms import Algorithm\n" + patched(exact, second)
    encoded = encoded.replace('"bytegrad"', 'Algorithm.init("bytegrad", hierarchical=False)')
    near, far = weights(exact, tmp_path)[0], weights(encoded, tmp_path)
    assert far[0] == far[1] != near
    assert max(abs(a - b) for a, b in zip(near, far[0], strict=True)) < 0.05


def test_the_readme_has_one_chart_one_diff_and_at_most_120_lines() -> None:
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 120
    assert len(re.findall(r"!\[", text)) == len(diffs("README.md")) == 1
    assert len(re.findall(r"^- \*\*", text, re.MULTILINE)) == 8


def test_the_chart_shows_the_figures_of_the_record() -> None:
    chart = (ROOT / "docs" / "images" / "bandwidth.svg").read_text()
    recorded = ROOT / "benchmarks" / "record" / "bandwidth-2026-11-22-a9c43cb.csv"
    with recorded.open(newline="") as file:
        steps = {(row["rate"], row["contender"]): float(row["step_s"]) for row in csv.DictReader(file)}
    shown = ("ddp", "ddp-bf16", "ddp-powersgd", "gradient_allreduce", "bytegrad", "bytegrad-onebit", "powersgd")
    expected = [
        f"{int(steps[rate, name] * 1000 + 0.5)} ms"
        for rate in ("1gbit", "10gbit")
        for name in (*shown, "local_sgd", "diloco")
    ]
    assert re.findall(r">(\d+ ms)</text>", chart) == expected


def test_the_chart_of_accuracy_and_its_table_show_the_figures_of_the_record() -> None:
    chart = (ROOT / "docs" / "images" / "accuracy.svg").read_text()
    recorded = ROOT / "benchmarks" / "record" / "accuracy-2026-11-26-0fac69c.csv"
    with recorded.open(newline="") as file:
        last = {row["contender"]: row for row in csv.DictReader(file)}
    shown = ("ddp", "ddp-bf16", "bytegrad", "bytegrad-onebit", "local_sgd", "async")
    ends = [f"{name}: {float(last[name]['seconds']):.1f} s" for name in shown]
    assert re.findall(r">([\w-]+: [\d.]+ s)</text>", chart) == ends
    page = (ROOT / "docs" / "how-to" / "choose_an_algorithm.md").read_text()
    table = page[page.index("**Accuracy over time.**") : page.index("One image is 0.3 %")]
    for name, row in last.items():
        assert f"{float(row['seconds']):.1f}" in table, name
        assert f"{float(row['accuracy']) * 100:.1f} %" in table, name


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
