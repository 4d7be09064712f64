"""Type checkers see what users see: correct programs pass under `--strict`, and wrong ones do not."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent

pytest.importorskip("mypy", reason="mypy is not installed: make setup")


def check(file: Path) -> list[str]:
    """Returns the messages of mypy --strict about the file, with the installed package."""
    command = [sys.executable, "-m", "mypy", "--strict", "--no-error-summary", "--config-file=", str(file)]
    shown = subprocess.run(command, cwd=HERE, capture_output=True, text=True, check=False)
    assert shown.returncode in (0, 1), shown.stdout + shown.stderr
    return [line for line in shown.stdout.splitlines() if ": error: " in line]


def test_a_correct_program_passes_strict_checking() -> None:
    assert check(HERE / "user_code.py") == []


def test_every_mistake_is_found_on_its_line_and_nothing_else() -> None:
    file = HERE / "wrong_code.py"
    expected = {
        number: found[1]
        for number, line in enumerate(file.read_text().splitlines(), 1)
        if (found := re.search(r"# expect: ([\w-]+)", line))
    }
    errors = {}
    for line in check(file):
        found = re.match(r".*?:(\d+): error: .*\[([\w-]+)\]$", line)
        assert found, line
        errors.setdefault(int(found[1]), found[2])
    assert errors == expected
