"""The tools of a release: versions, order of the crates, licences, what an sdist has, and what a slow step prints."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest

from bagua.torch_needed import OLDEST
from tools import crates, release, wheel

ROOT = Path(__file__).resolve().parents[2]


def package(
    name: str, *needs: str, version: str = "0.2.0", req: str = "^0.2.0", kind: str | None = None
) -> dict[str, Any]:
    dependencies = [{"name": need, "req": req, "kind": kind} for need in needs]
    return {"name": name, "version": version, "publish": None, "dependencies": dependencies}


def texts(changelog: str = "0.2.0", page: str = "0.2.0") -> dict[str, str]:
    return {
        "CHANGELOG.md": f"# Changelog\n\n## {changelog}\n\n## 0.1.0\n",
        "docs/reference/versions.md": f"# Versions\n\nThis page describes Bagua {page}.\n",
    }


def test_versions_that_agree_pass() -> None:
    assert release.disagreements([package("bagua-py", "bagua-core"), package("bagua-core")], texts()) == []


def test_each_place_with_another_version_is_named() -> None:
    packages = [package("bagua-py", "bagua-core", req="^0.1.0"), package("bagua-core", version="0.1.0")]
    assert release.disagreements(packages, texts("0.3.0", "0.1.0")) == [
        "bagua-py asks for bagua-core ^0.1.0, not ^0.2.0",
        "bagua-core has version 0.1.0, not 0.2.0",
        "CHANGELOG.md names version 0.3.0 first, not 0.2.0",
        "docs/reference/versions.md names version 0.1.0 first, not 0.2.0",
    ]
    assert "CHANGELOG.md names version none first, not 0.2.0" in release.disagreements([package("bagua-py")], {})


def test_the_versions_of_this_tree_agree() -> None:
    found = {file: (ROOT / file).read_text(encoding="utf-8") for file in release.VERSIONS}
    assert release.disagreements(release.metadata(), found) == []


def test_crates_are_published_after_those_that_they_use_and_private_ones_not_at_all() -> None:
    private = {**package("bagua-py", "b"), "publish": []}
    packages = [private, package("a", "c"), package("b", "a", "c"), package("c", "b", kind="dev")]
    assert release.libraries(packages) == ["c", "a", "b"]
    order = release.libraries(release.metadata())
    assert order.index("bagua-kernels") < order.index("bagua-core") < order.index("bagua-cuda")
    assert not {"bagua-py", "bagua-bench"} & set(order)


def test_every_crate_that_is_published_has_a_readme_of_its_own() -> None:
    packages = {one["name"]: one for one in release.metadata()}
    published = release.libraries(packages.values())
    assert [problem for name in published for problem in release.unpresentable(packages[name])] == []


def test_crates_that_an_earlier_dry_run_has_unpacked_are_not_compiled_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CARGO_HOME", str(tmp_path))
    monkeypatch.setattr(release, "version", lambda: "0.2.0")
    sources = tmp_path / "registry" / "src"
    kept = {sources / "-1a2b" / "c-0.2.0", sources / "-1a2b" / "a-0.1.0", sources / "index.example-3c4d" / "a-0.2.0"}
    for folder in (sources / "-1a2b" / "a-0.2.0", sources / "-1a2b" / "b-0.2.0", *kept):
        folder.mkdir(parents=True)
        (folder / "Cargo.toml").touch()
    release.forget_unpacked(["a", "b"])
    assert set(sources.glob("*/*")) == kept


def test_a_crate_without_a_readme_of_its_own_is_named(tmp_path: Path) -> None:
    about = {"name": "a", "description": "", "license": "MIT", "manifest_path": str(tmp_path / "Cargo.toml")}
    lacks = "a has no README.md of its own"
    assert release.unpresentable({**about, "readme": "../../README.md"}) == ["a has no description", lacks]
    about["description"] = "What it is"
    assert release.unpresentable({**about, "readme": "README.md"}) == [lacks]
    (tmp_path / "README.md").write_text("# Bagua\n")
    (problem,) = release.unpresentable({**about, "readme": "README.md"})
    assert problem == "the README.md of a does not begin with its name"
    (tmp_path / "README.md").write_text("# a\n")
    assert release.unpresentable({**about, "readme": "README.md"}) == []


def test_every_linked_crate_has_its_licence_text_in_the_tree() -> None:
    assert crates.check() == []


def test_of_several_licences_that_of_mit_is_enough(tmp_path: Path) -> None:
    for name in ("LICENSE-MIT", "LICENSE-APACHE", "README.md", "license.rs", "COPYRIGHT"):
        (tmp_path / name).write_text(name)
    names = {file.name for file in crates.licence_files(tmp_path, "MIT OR Apache-2.0")}
    assert names == {"LICENSE-MIT"}
    names = {file.name for file in crates.licence_files(tmp_path, "MIT AND Apache-2.0")}
    assert {"LICENSE-MIT", "LICENSE-APACHE", "COPYRIGHT"} <= names
    assert "README.md" not in names


def test_what_an_sdist_lacks_or_has_too_much_is_named(tmp_path: Path) -> None:
    path = tmp_path / "bagua_rs-0.2.0.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        for name in ("Cargo.lock", "python/bagua/_bagua.abi3.so", "python/bagua/__init__.py"):
            archive.addfile(tarfile.TarInfo(f"bagua_rs-0.2.0/{name}"), io.BytesIO())
    problems = release.contents(path)
    assert "bagua_rs-0.2.0.tar.gz has python/bagua/_bagua.abi3.so" in problems
    assert "bagua_rs-0.2.0.tar.gz lacks LICENSE" in problems
    assert not any("Cargo.lock" in problem or "__init__" in problem for problem in problems)


def test_the_table_has_columns_and_a_reason_does_not_widen_them() -> None:
    rows = [
        release.Row("gnu", "manylinux", "3.10 MiB", "ok", "3.10, 3.11", 61.4),
        release.Row("musl", audit="not built: rustup target add x86_64-unknown-linux-musl"),
    ]
    assert release.table(rows).splitlines() == [
        "what  tag or name  size      audit  smoke       time",
        "gnu   manylinux    3.10 MiB  ok     3.10, 3.11  61 s",
        "musl                         not built: rustup target add x86_64-unknown-linux-musl",
    ]


def test_an_unknown_step_prints_those_that_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    assert release.main(["whels"]) == 2
    shown = capsys.readouterr().err
    assert all(re.search(rf"^  {name} +\S", shown, re.MULTILINE) for name in release.STEPS)


def test_a_release_with_a_problem_or_without_a_tag_is_not_published(monkeypatch: pytest.MonkeyPatch) -> None:
    found = release.Release()
    found.problems, found.lacking = ["a test failed"], ["no wheel for musl"]
    run = subprocess.run

    def only_git(command: list[str], **options: Any) -> Any:
        assert command[0] in ("git", "cargo"), command
        assert "publish" not in command
        return run(command, **options)

    monkeypatch.setattr(subprocess, "run", only_git)
    reasons = release.obstacles(found)
    assert reasons[:2] == ["not published: a test failed", "not published: no wheel for musl"]
    assert any("has no tag v" in reason for reason in reasons)


@pytest.mark.parametrize("asked", ["check", "yes"])
def test_what_is_not_to_be_published_is_a_failure_and_nothing_is_published(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], asked: str
) -> None:
    published: list[str] = []
    reasons = ["not published: links: not absolute, because project.urls has no repository"]
    monkeypatch.setattr(release, "STEPS", {"links": lambda found: None})
    monkeypatch.setattr(release, "obstacles", lambda found: reasons)
    monkeypatch.setattr(release, "publish", lambda: published.append(asked) or [])
    monkeypatch.setenv("RELEASE", asked)
    assert release.main(["links"]) == 1
    assert f"wrong: {reasons[0]}" in capsys.readouterr().err
    assert published == []
    reasons.clear()
    assert release.main(["links"]) == 0
    assert published == (["yes"] if asked == "yes" else [])


def test_the_workflow_publishes_nothing_before_the_check_of_make_release() -> None:
    text = (ROOT / ".github" / "workflows" / "release.yml").read_text()
    job = text[text.index("\n  publish:") :]
    check = re.search(r'make release STEPS="([a-z ]+)" RELEASE=check\n', job)
    assert check is not None
    # Without a repository in project.urls it is `links` that has something to say.
    assert "links" in check[1].split()
    published = ("pypa/gh-action-pypi-publish", "cargo publish", "gh release create")
    assert all(check.end() < job.index(step) for step in published)
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
    for python in release.PYTHONS:
        assert python in page, python


def test_what_an_error_or_a_page_tells_to_install_is_what_the_distribution_requires() -> None:
    project = (ROOT / "pyproject.toml").read_text()
    assert '\nname = "bagua-rs"\n' in project
    files = [ROOT / "README.md", *(ROOT / "docs").glob("**/*.md"), *(ROOT / "python").glob("**/*.py")]
    told = re.findall(r"pip install ([^`\n]*)", "\n".join(map(Path.read_text, files)))
    assert told
    assert not [one for one in told if re.search(r"\bbagua\b(?!-rs)", one) and "*.whl" not in one]
    for requirement in (one for line in told for one in re.findall(r'"([a-z][^"{]*=[^"{]*)"', line)):
        assert f'"{requirement}"' in project, requirement


def test_pre_commit_runs_the_checks_of_make_lint_that_compile_nothing() -> None:
    recipe = re.search(r"^lint: .*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert recipe is not None
    # The files and the options that say how to run are each program's own.
    options = r" (?:\$\(PROSE\)|\.|--force-exclude|--builtin-schema.*|versions licences|licences --check)(?= |$)"
    linted = {re.sub(options, "", line.strip().replace("$(BIN)", ".venv/bin")) for line in recipe[1].splitlines()}
    hooks = set(re.findall(r"^ +entry: (.*)$", (ROOT / ".pre-commit-config.yaml").read_text(), re.MULTILINE))
    committed = {re.sub(options, "", entry) for entry in hooks}
    slow = ("cargo clippy", "$(PORTABLE) cargo check", "RUSTDOCFLAGS", ".venv/bin/python -m mypy.stubtest")
    # `make lint` compares versions too, which a commit need not.
    replaced = {".venv/bin/python tools/release.py": ".venv/bin/python tools/crates.py"}
    assert {replaced.get(line, line) for line in linted if not line.startswith(slow)} == committed


def test_workflows_call_targets_and_steps_that_exist_and_say_that_they_have_never_run() -> None:
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
        for steps in re.findall(r'STEPS="([a-z ]+)"', text):
            assert set(steps.split()) <= set(release.STEPS), path
    built = set(re.findall(r"target: (\S+)", (ROOT / ".github" / "workflows" / "release.yml").read_text()))
    assert built - {"${{"} == {target.triple for target in wheel.TARGETS}


def test_a_step_that_fails_is_a_row_and_does_not_end_the_others(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(found: release.Release) -> None:
        raise subprocess.CalledProcessError(9, ["maturin", "sdist"])

    def passes(found: release.Release) -> None:
        found.rows.append(release.Row("crates", audit="ok"))

    monkeypatch.setattr(release, "STEPS", {"sdist": fails, "crates": passes})
    monkeypatch.delenv("RELEASE", raising=False)
    assert release.main(["sdist", "crates"]) == 1
    shown = capsys.readouterr()
    assert re.search(r"^sdist +failed$", shown.out, re.MULTILINE)
    assert re.search(r"^crates +ok$", shown.out, re.MULTILINE)
    assert "wrong: sdist: Command '['maturin', 'sdist']' returned non-zero exit status 9." in shown.err
