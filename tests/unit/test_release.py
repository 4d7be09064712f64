"""Tests of what a release says of itself: versions, and what to install."""

from __future__ import annotations

import re
from pathlib import Path

from bagua.require_torch import OLDEST

ROOT = Path(__file__).resolve().parents[2]


def test_the_page_about_versions_names_the_wire_version_and_the_oldest_python_and_torch() -> None:
    page = (ROOT / "docs" / "reference" / "versions.md").read_text(encoding="utf-8")
    wire = (ROOT / "rust" / "bagua-group" / "src" / "wire.rs").read_text(encoding="utf-8")
    number = re.search(r"const VERSION: u16 = (\d+);", wire)
    header = re.search(r'MAGIC: u32 = .*b"(BGW\d)"', (ROOT / "rust/bagua-net/src/transport/frame.rs").read_text())
    assert number is not None
    assert header is not None
    assert f"has wire version {number[1]}." in page
    assert f"`{header[1]}`" in page
    assert f"torch older than {OLDEST[0]}.{OLDEST[1]} is refused" in page
    assert 'requires-python = ">=3.10"' in (ROOT / "pyproject.toml").read_text()


def test_what_an_error_or_a_page_tells_to_install_is_what_the_distribution_requires() -> None:
    project = (ROOT / "pyproject.toml").read_text()
    assert '\nname = "bagua-rs"\n' in project
    files = [ROOT / "README.md", *(ROOT / "docs").glob("**/*.md"), *(ROOT / "python").glob("**/*.py")]
    told = re.findall(r"pip install ([^`\n]*)", "\n".join(map(Path.read_text, files)))
    assert told
    assert not [one for one in told if re.search(r"\bbagua\b(?!-rs)", one) and "*.whl" not in one]
    for requirement in (one for line in told for one in re.findall(r'"([a-z][^"{]*=[^"{]*)"', line)):
        assert f'"{requirement}"' in project, requirement
