"""Since which version each public name exists: by the tags of the releases, of which each lists its own names.

So no list of versions is kept by hand, and no new name can be without one.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path

from tools.public_names import is_module

#: The version in which everything begins. No release is older.
FIRST = "0.1.0"


def versions(root: Path, current: str) -> dict[str, str]:
    """Each public name of the tree at `root` -> the first version from which on it exists, `current` for a new one.

    ValueError where `current` is not the first version and the tags of the releases before it are missing.
    """
    found = dict.fromkeys(_names(root), current)
    if current == FIRST:
        return found
    shown = _git(root, "tag", "--merged", "HEAD", "--sort", "-version:refname").split()
    tags = [tag for tag in shown if re.fullmatch(r"v\d+\.\d+\.\d+", tag) and tag != f"v{current}"]
    if f"v{FIRST}" not in tags:
        raise ValueError(f"no tag v{FIRST}, so nothing shows since when a name exists: git fetch --tags (--unshallow)")
    kept = set(found)
    for tag in tags:
        with tempfile.TemporaryDirectory() as folder:
            archive = Path(folder) / "tree.tar"
            _git(root, "archive", "--output", str(archive), tag, "python", "tools")
            subprocess.run(["tar", "-xf", archive, "-C", folder], check=True)
            kept &= set(_names(Path(folder)))
        found |= dict.fromkeys(kept, tag.removeprefix("v"))
    return found


def sentence(module: str, names: Iterable[str], known: Mapping[str, str]) -> str:
    """What the page of a module says: its version, and that of each of its names and their members that came later.

    `names` are those of the module, without it; `known` is what `versions` returns.
    """
    page = known[module]
    later = []
    for name in sorted(names):
        own = known[f"{module}.{name}"]
        later += [f"`{name}` since {own}"] if own != page else []
        inside = f"{module}.{name}."
        # A member of a new class is as new as the class. A module among the names has a page of its own.
        members = [] if is_module(inside[:-1]) else sorted(one for one in known if one.startswith(inside))
        later += [f"`{one.removeprefix(f'{module}.')}` since {known[one]}" for one in members if known[one] != own]
    return "; ".join([f"Since Bagua {page}", *later]) + "."


def _names(root: Path) -> list[str]:
    """The public names of a tree, as its own tools/public_names.py finds them."""
    command = [sys.executable, "-m", "tools.public_names"]
    return subprocess.run(command, cwd=root, check=True, stdout=subprocess.PIPE, text=True).stdout.split()


def _git(root: Path, *arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=root, check=True, stdout=subprocess.PIPE, text=True).stdout
