"""Since when a public name exists, as the pages of the reference say it."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tools import release, since
from tools.public_names import dotted_names, public_modules

ROOT = Path(__file__).resolve().parents[2]


def git(root: Path, *arguments: str) -> None:
    names = {f"GIT_{who}_{what}": "x" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
    settings = {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}
    subprocess.run(["git", *arguments], cwd=root, env={**os.environ, **names, **settings}, check=True, timeout=60)


def tree(root: Path, names: str) -> Path:
    """A tree whose public names are these, committed."""
    (root / "tools").mkdir(exist_ok=True)
    (root / "python").mkdir(exist_ok=True)
    (root / "python" / "names").write_text(names)
    (root / "tools" / "public_names.py").write_text("print(open('python/names').read())\n")
    git(root, "init", "--quiet")
    git(root, "add", ".")
    git(root, "commit", "--quiet", "--message", names)
    return root


def test_a_name_exists_since_the_first_of_the_releases_that_all_have_it(tmp_path: Path) -> None:
    for version, names in {"0.1.0": "bagua.a bagua.b bagua.d", "0.2.0": "bagua.a bagua.c", "0.10.0": "bagua.a"}.items():
        git(tree(tmp_path, names), "tag", f"v{version}")
    git(tmp_path, "tag", "nightly")
    # `b` was removed and came back, `c` too.
    tree(tmp_path, "bagua.a bagua.b bagua.c bagua.e")
    assert since.versions(tmp_path, "0.11.0") == {
        "bagua.a": "0.1.0",
        "bagua.b": "0.11.0",
        "bagua.c": "0.11.0",
        "bagua.e": "0.11.0",
    }
    git(tmp_path, "tag", "v0.11.0")
    tree(tmp_path, "bagua.e bagua.f")
    assert since.versions(tmp_path, "0.12.0") == {"bagua.e": "0.11.0", "bagua.f": "0.12.0"}


def test_before_the_first_release_no_tag_is_needed_and_after_it_a_missing_one_is_an_error(tmp_path: Path) -> None:
    tree(tmp_path, "bagua.a")
    assert since.versions(tmp_path, since.FIRST) == {"bagua.a": since.FIRST}
    with pytest.raises(ValueError, match=r"no tag v0\.1\.0.*git fetch --tags"):
        since.versions(tmp_path, "0.2.0")


def test_a_page_says_its_version_and_that_of_each_name_and_member_that_came_later() -> None:
    known = {
        "bagua": "0.1.0",
        "bagua.Group": "0.1.0",
        "bagua.Group.rank": "0.1.0",
        "bagua.Group.split": "0.3.0",
        "bagua.Mesh": "0.2.0",
        "bagua.Mesh.size": "0.2.0",
        "bagua.cuda": "0.1.0",
        "bagua.cuda.Graph": "0.4.0",
        "bagua.errors": "0.2.0",
    }
    assert since.sentence("bagua", ["cuda", "Mesh", "Group"], known) == (
        "Since Bagua 0.1.0; `Group.split` since 0.3.0; `Mesh` since 0.2.0."
    )
    assert since.sentence("bagua.errors", [], known) == "Since Bagua 0.2.0."


@pytest.mark.slow
def test_the_pages_of_this_tree_say_that_everything_is_of_the_first_version() -> None:
    known = since.versions(ROOT, release.version())
    for module, names in public_modules().items():
        assert since.sentence(module, names, known) == "Since Bagua 0.1.0."


def test_the_names_of_which_it_is_said_are_those_of_modules_and_the_members_of_classes() -> None:
    found = set(dotted_names())
    of_modules = {f"{module}.{name}" for module, names in public_modules().items() for name in names}
    assert of_modules <= found
    # A method, a property, an attribute, and a method of a base class.
    assert {"bagua.Group.shrink", "bagua.Group.rank", "bagua.PeerLostError.rank"} <= found
    assert "bagua.torch_api.data_parallel.DistributedDataParallel.no_sync" in found
    assert not any("._" in name for name in found)
