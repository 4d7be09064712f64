"""The tools of a release: versions, licences, what a slow step prints, and what the workflows call."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from bagua.require_torch import OLDEST
from tools import crates, release

ROOT = Path(__file__).resolve().parents[2]


def tree(folder: Path, changelog: str, readme: str = "") -> Path:
    """A repository of version 0.2.0 without a tag."""
    subprocess.run(["git", "init", "--quiet", folder], check=True)
    (folder / "Cargo.toml").write_text('[workspace.package]\nversion = "0.2.0"\n\n[workspace.dependencies]\n')
    (folder / "CHANGELOG.md").write_text(f"# Changelog\n\n## {changelog}\n\n## 0.1.0\n")
    (folder / "docs" / "reference").mkdir(parents=True)
    (folder / "docs" / "reference" / "versions.md").write_text("# Versions\n\nThis page describes Bagua 0.2.0.\n")
    (folder / "README.md").write_text(readme)
    command = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "commit", "--quiet", "--allow-empty", "-m", "a"]
    subprocess.run(command, cwd=folder, check=True)
    return folder


def test_the_version_that_each_file_names_first_is_found(tmp_path: Path) -> None:
    found = release.versions(tree(tmp_path, "0.3.0"))
    assert found == {"Cargo.toml": "0.2.0", "CHANGELOG.md": "0.3.0", "docs/reference/versions.md": "0.2.0"}
    assert release.main(["versions"]) == 0


def test_a_commit_may_be_published_with_its_tag_its_changelog_and_absolute_links(tmp_path: Path) -> None:
    root = tree(tmp_path, "0.2.0, not released yet", "[a](docs/a.md) [b](https://example.org/b)")
    tag, changelog, link = release.obstacles(root)
    assert tag == "this commit has no tag v0.2.0"
    assert changelog == "CHANGELOG.md says that 0.2.0 is not released"
    assert "docs/a.md" in link
    subprocess.run(["git", "tag", "v0.2.0"], cwd=root, check=True)
    (root / "CHANGELOG.md").write_text("## 0.2.0\n")
    (root / "README.md").write_text("[b](https://example.org/b) [c](#c)")
    assert release.obstacles(root) == []


def test_every_linked_crate_has_its_licence_text_in_the_tree() -> None:
    assert crates.check() == []


def test_of_several_licences_that_of_mit_is_enough(tmp_path: Path) -> None:
    for name in ("LICENSE-MIT", "LICENSE-APACHE", "README.md", "license.rs", "COPYRIGHT"):
        (tmp_path / name).write_text(name)
    assert crates.texts(tmp_path, "MIT OR Apache-2.0") == ["LICENSE-MIT"]
    found = crates.texts(tmp_path, "MIT AND Apache-2.0")
    assert {"LICENSE-MIT", "LICENSE-APACHE", "COPYRIGHT"} <= set(found)
    assert "README.md" not in found


def test_the_workflow_publishes_nothing_before_it_has_asked_whether_it_may() -> None:
    text = (ROOT / ".github" / "workflows" / "release.yml").read_text()
    job = text[text.index("\n  publish:") :]
    asked = job.index("python tools/release.py ready\n")
    published = ("pypa/gh-action-pypi-publish", "cargo publish", "gh release create")
    assert all(asked < job.index(step) for step in published)
    assert not any(step in text[: text.index("\n  publish:")] for step in published)


@pytest.mark.slow
def test_a_slow_step_prints_what_it_is_and_how_long_it_has_taken() -> None:
    command: list[str | Path] = [ROOT / "tools" / "step", "Sleeping: 3 s", "sleep", "3"]
    shown = subprocess.run(
        command, env={**os.environ, "STEP_INTERVAL": "1"}, capture_output=True, text=True, timeout=60, check=True
    ).stdout.splitlines()
    assert shown[0] == "== Sleeping: 3 s"
    assert re.fullmatch(r"   … \d+ s so far", shown[1])
    assert re.fullmatch(r"   done in \d+ s", shown[-1])


def test_a_step_that_fails_has_the_status_of_its_command() -> None:
    command: list[str | Path] = [ROOT / "tools" / "step", "Failing", "sh", "-c", "exit 7"]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert shown.returncode == 7
    assert re.fullmatch(r"   failed after \d+ s", shown.stderr.strip("\n"))


def environment(*arguments: str | Path, **settings: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [ROOT / "tools" / "environment", *arguments],
        cwd=ROOT,
        env={**os.environ, **settings},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def interpreter(folder: Path, version: str) -> str:
    """A program that answers as an interpreter of that version."""
    path = folder / f"python{version}"
    path.write_text(f"#!/bin/sh\necho {version}\n")
    path.chmod(0o755)
    return str(path)


def test_another_python_than_the_environment_has_is_refused_and_both_are_named(tmp_path: Path) -> None:
    have, asked = interpreter(tmp_path, "3.11"), interpreter(tmp_path, "3.12")
    shown = environment("same-python", have, PYTHON=asked)
    assert shown.returncode == 1
    assert f".venv has Python 3.11 already, and PYTHON={asked} is 3.12: `make clean` first" in shown.stderr
    assert environment("same-python", have, PYTHON=have).returncode == 0
    assert environment("same-python", tmp_path / "absent", PYTHON=asked).returncode == 0


@pytest.mark.slow
def test_without_a_package_index_there_is_one_line_that_says_so(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True, timeout=120)
    nowhere = {"PIP_INDEX_URL": "http://127.0.0.1:9/simple", "PIP_CONFIG_FILE": os.devnull, "PIP_FIND_LINKS": ""}
    shown = environment("uv", tmp_path / "venv" / "bin" / "python", **nowhere)
    assert shown.returncode == 1
    assert shown.stderr.startswith("No package index is reachable")
    assert len(shown.stderr.splitlines()) == 1


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


def test_workflows_call_targets_that_exist_and_say_that_they_have_never_run() -> None:
    targets = set(re.findall(r"^\.PHONY: (\S+)$", (ROOT / "Makefile").read_text(), re.MULTILINE))
    workflows = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
    assert [path.stem for path in workflows] == ["docs", "nightly", "release", "test"]
    for path in workflows:
        text = path.read_text()
        assert "has never run" in text, path
        commands = "\n".join(line for line in text.splitlines() if "run:" in line)
        called = set(re.findall(r"\bmake ([a-z-]+)", commands))
        assert called, path
        assert called <= targets, path
