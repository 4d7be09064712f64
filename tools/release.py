"""Checks what a release needs, before anything is built or published.

usage: tools/release.py versions  fails if a file names another version than Cargo.toml
       tools/release.py ready     fails if this commit must not be published
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

#: What matches the version of the workspace in each file that contains it.
VERSIONS = {
    "Cargo.toml": r'^version = "(.+)"',
    "CHANGELOG.md": r"^## (\d+\.\d+\.\d+)",
    "docs/reference/versions.md": r"^This page describes Bagua (\d+\.\d+\.\d+)",
}


def versions(root: Path = ROOT) -> dict[str, str]:
    """Returns the version that each file names first, "none" if it names none."""
    found = {
        name: re.search(pattern, (root / name).read_text(encoding="utf-8"), re.MULTILINE)
        for name, pattern in VERSIONS.items()
    }
    return {name: match[1] if match else "none" for name, match in found.items()}


def obstacles(root: Path = ROOT) -> list[str]:
    """Returns why a commit must not be published."""
    version = versions(root)["Cargo.toml"]
    reasons = []
    if f"v{version}" not in subprocess.check_output(["git", "tag", "--points-at", "HEAD"], cwd=root, text=True).split():
        reasons.append(f"this commit has no tag v{version}")
    if re.search(r"^## .*not released", (root / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE):
        reasons.append(f"CHANGELOG.md says that {version} is not released")
    for target in re.findall(r"\]\((?![a-z]+:|#)([^)]+)\)", (root / "README.md").read_text(encoding="utf-8")):
        reasons.append(f"README.md links to {target}, which leads nowhere on PyPI: write the whole address")
    return reasons


def main(arguments: list[str]) -> int:
    """Runs the command line."""
    if arguments not in (["versions"], ["ready"]):
        print(__doc__, file=sys.stderr)
        return 2
    found = versions()
    problems = [f"the versions differ: {found}"] if len(set(found.values())) > 1 else []
    if arguments == ["ready"]:
        problems += obstacles()
    print("\n".join(problems) or f"{arguments[0]}: ok")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
