"""The tools of a release: versions and licences, and when the workflow publishes."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

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


def test_the_workflow_publishes_nothing_before_it_has_asked_whether_it_may() -> None:
    text = (ROOT / ".github" / "workflows" / "release.yml").read_text()
    job = text[text.index("\n  publish:") :]
    asked = job.index("python tools/release.py ready\n")
    published = ("pypa/gh-action-pypi-publish", "cargo publish", "gh release create")
    assert all(asked < job.index(step) for step in published)
    assert not any(step in text[: text.index("\n  publish:")] for step in published)


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
