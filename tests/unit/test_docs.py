"""The documents say what is so: their examples run, their links lead somewhere, their lists are complete."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

import bagua
from bagua import extension
from tests import forks, gloo, scripts
from tools.blocks import python_blocks, reason

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = sorted(
    [
        *ROOT.glob("*.md"),
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / "benchmarks").glob("*.md"),
        *(ROOT / "tests" / "distributed").glob("*.md"),
    ]
)
BLOCKS = [(document, *block) for document in DOCUMENTS for block in python_blocks(document)]


def start(rank: int, script: Path, environment: dict[str, str], output: Path) -> subprocess.Popen[bytes] | forks.Fork:
    """Rank 0 is a new process, which finds names that a block uses without importing them. The others are forks where
    they need torch, which takes seconds of processor to import."""
    code = script.read_text()
    if rank > 0 and "torch" in code:
        return forks.start_script(script, rank=rank, environment=environment, output=output)
    # What is torch's alone needs help to end: see `gloo`.
    runner = [] if "bagua" in code else gloo.arguments(script)[:1]
    return scripts.processes(*runner)(rank, script, environment, output)


def size_of(marks: frozenset[str]) -> int:
    return next((int(mark.removeprefix("ranks=")) for mark in marks if mark.startswith("ranks=")), 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("marks", "code"),
    [
        pytest.param(marks, code, id=f"{path.relative_to(ROOT)}:{line}")
        for path, line, marks, code in BLOCKS
        if "runnable" in marks
    ],
)
def test_a_block_that_is_marked_runnable_runs(marks: frozenset[str], code: str, tmp_path: Path) -> None:
    if "torch" in code:
        pytest.importorskip("torch", reason="torch is not installed: make setup")
    if "lightning" in code:
        pytest.importorskip("lightning", reason="lightning is not installed: make setup")
    scripts.run_ranks(code, size_of(marks), tmp_path, start)


@pytest.mark.parametrize(
    ("path", "line", "marks"),
    [pytest.param(path, line, marks, id=f"{path.relative_to(ROOT)}:{line}") for path, line, marks, _ in BLOCKS],
)
def test_every_python_block_runs_or_says_why_not(path: Path, line: int, marks: frozenset[str]) -> None:
    assert reason(marks, path, line) != ""


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_link_leads_to_a_file_and_a_heading(document: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", document.read_text()):
        if "://" in target:
            continue
        file, _, anchor = target.partition("#")
        path = (document.parent / file).resolve() if file else document
        assert path.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.+)$", path.read_text(), re.MULTILINE)
            assert anchor in {re.sub(r"[^\w\- ]", "", heading).lower().replace(" ", "-") for heading in headings}, (
                target
            )


def test_every_environment_variable_that_is_read_is_documented() -> None:
    sources = [path.read_text() for path in (ROOT / "python" / "bagua").rglob("*.py")]
    read = {name for source in sources for name in re.findall(r"[\"'](BAGUA_[A-Z_]+)[\"']", source)}
    documented = set(re.findall(r"`(BAGUA_[A-Z_]+)`", (ROOT / "docs" / "reference" / "configuration.md").read_text()))
    assert read == documented


def test_every_error_class_is_documented() -> None:
    classes = {name for name in bagua.errors.__all__ if issubclass(getattr(bagua.errors, name), bagua.BaguaError)}
    documented = set(re.findall(r"`(?:bagua\.)?(\w+Error)`", (ROOT / "docs" / "reference" / "errors.md").read_text()))
    assert classes - documented == set()


def test_the_page_of_the_wire_has_the_codes_of_the_core() -> None:
    text = (ROOT / "docs" / "reference" / "wire.md").read_text()
    for field, codes in (("dtype", extension.DTYPES), ("op", extension.OPS)):
        row = re.search(rf"^\| \d+ \| {field} \| (.*) \|$", text, re.MULTILINE)
        assert row is not None
        assert dict(re.findall(r"(\w+) (\d+)", row[1])) == {
            **{name: str(code) for name, code in codes.items()},
            **({"none": "255"} if field == "op" else {}),
        }


def test_the_script_of_the_guide_from_bagua_is_the_example() -> None:
    ((_, marks, code),) = python_blocks(ROOT / "docs" / "how-to" / "from_bagua_0_9.md")
    assert {"runnable", "ranks=2"} <= marks
    assert (ROOT / "examples" / "bagua_0_9.py").read_text().endswith('"""\n\n' + code)


@pytest.mark.slow
def test_diloco_by_hand_and_as_an_algorithm_end_with_the_same_weights(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="torch is not installed: make setup")
    page = ROOT / "docs" / "how-to" / "from_hivemind.md"
    codes = [code for _, marks, code in python_blocks(page) if "runnable" in marks]
    ends = []
    for number, code in enumerate(codes):
        folder = tmp_path / str(number)
        folder.mkdir()
        shown = "".join(scripts.run_ranks(code, 2, folder, start))
        first, second = [float(value) for value in re.findall(r"weights (-?[\d.]+)", shown)]
        assert first == second
        ends.append(first)
    by_hand, algorithm = ends
    assert by_hand == pytest.approx(algorithm, rel=1e-5)


@pytest.mark.slow
def test_the_algorithm_of_the_guide_equals_its_simulation(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="torch is not installed: make setup")
    (_, _, algorithm), (_, _, comparison), _ = python_blocks(ROOT / "docs" / "how-to" / "write_an_algorithm.md")
    scripts.run_ranks(algorithm + comparison, 2, tmp_path, start)
