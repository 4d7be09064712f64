"""The README and the guide from DDP do what they promise: the diff, the chart, the commands."""

from __future__ import annotations

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
