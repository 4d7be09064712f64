"""The licences of the crates that are linked into the extension.

usage: tools/crates.py          writes their texts into LICENSE-THIRD-PARTY.txt
       tools/crates.py --check  fails if that file lacks a linked crate or has another one
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LICENCES = ROOT / "LICENSE-THIRD-PARTY.txt"

_HEAD = """\
The wheels of Bagua contain these crates in compiled form. The text of each licence is below the crates that have
it; where a crate leaves the choice, it is MIT. The Rust standard library, linked as well, is MIT OR Apache-2.0 too.
"""
_RULE = "-" * 80
_FILE = re.compile(r"(?:licen[cs]e|copying|copyright|notice|unlicense)(?:[-._].*)?", re.IGNORECASE)


def linked() -> dict[str, str]:
    """Returns the licence (an SPDX expression) of each linked crate of others, by its name and version.

    Every target links the same crates. Build scripts and procedural macros run at compile time only.
    """
    command = ["cargo", "tree", "--locked", "--package", "bagua-py", "--target", "x86_64-unknown-linux-gnu"]
    shown = _run([*command, "--edges", "normal,no-proc-macro", "--prefix", "none", "--format", "{p}|{l}"])
    # Crates of this workspace are shown with their folders.
    return dict(re.findall(r"^(\S+ v\S+)\|(.*?)(?: \(\*\))?$", shown, re.MULTILINE))


def texts(folder: Path, licence: str) -> list[str]:
    """Returns the licence texts in a crate's folder that the wheel must include. MIT is enough where it is a choice."""
    files = sorted(path for path in folder.iterdir() if path.is_file() and _FILE.fullmatch(path.name))
    if re.search(r"\bMIT\b", licence) and " AND " not in licence:
        files = [path for path in files if "mit" in path.name.lower()] or files
    read = [path.read_text(encoding="utf-8").strip("\n\f ") for path in files]
    return ["\n".join(line.rstrip() for line in text.splitlines()) for text in read]


def licences() -> str:
    """Returns the content of LICENSE-THIRD-PARTY.txt. Raises ValueError for a crate without a licence text."""
    packages = json.loads(_run(["cargo", "metadata", "--locked", "--format-version", "1"]))["packages"]
    folders = {f"{one['name']} v{one['version']}": Path(one["manifest_path"]).parent for one in packages}
    crates_of: dict[str, list[str]] = {}
    for crate, licence in sorted(linked().items()):
        found = texts(folders[crate], licence)
        if not found:
            raise ValueError(f"{crate} ({licence}) has no licence text in its folder")
        for text in found:
            crates_of.setdefault(text, []).append(f"{crate.replace(' v', ' ')} ({licence})")
    parts = [
        "\n".join([_RULE, *crates, _RULE, "", text, ""])
        for text, crates in sorted(crates_of.items(), key=lambda one: one[1])
    ]
    return "\n".join([_HEAD, *parts])


def check() -> list[str]:
    """Returns the crates that LICENSE-THIRD-PARTY.txt lacks, or has although they are not linked."""
    have = set(re.findall(r"^([\w-]+ \d\S* \(.+\))$", LICENCES.read_text(encoding="utf-8"), re.MULTILINE))
    want = {f"{crate.replace(' v', ' ')} ({licence})" for crate, licence in linked().items()}
    return sorted(have ^ want)


def _run(command: list[str]) -> str:
    return subprocess.check_output(command, cwd=ROOT, text=True)


if __name__ == "__main__":
    if sys.argv[1:] != ["--check"]:
        LICENCES.write_text(licences(), encoding="utf-8")
    elif different := check():
        sys.exit(f"{LICENCES.name} has other crates than the extension: make licences\n" + "\n".join(different))
