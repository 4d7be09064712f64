"""The crates that are linked into the extension, and their licence texts.

usage: tools/crates.py list                the linked crates, one a line
       tools/crates.py licences [--check]  writes LICENSE-THIRD-PARTY.txt, or says whether it is up to date
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
LICENCES = ROOT / "LICENSE-THIRD-PARTY.txt"

#: What wheels are built for.
TARGETS = (
    "x86_64-unknown-linux-gnu",
    "aarch64-unknown-linux-gnu",
    "x86_64-unknown-linux-musl",
    "aarch64-unknown-linux-musl",
)

#: The crate of the extension.
EXTENSION = "bagua-py"

_HEAD = """\
The wheels of Bagua contain these crates in compiled form. The text of each licence is below the crates that have
it; where a crate leaves the choice, it is MIT. The Rust standard library, linked as well, is MIT OR Apache-2.0 too.
"""
_RULE = "-" * 80


class Crate(NamedTuple):
    """One version of a crate."""

    name: str
    version: str
    #: As its Cargo.toml has it, an SPDX expression.
    licence: str

    def __str__(self) -> str:
        return f"{self.name} {self.version}"


def linked(targets: Iterable[str] = TARGETS) -> list[Crate]:
    """What is linked into the extension for one of the targets, our own crates included; sorted.

    Build scripts and procedural macros run at compile time only and are left out.
    """
    found: set[Crate] = set()
    for target in targets:
        command = ["cargo", "tree", "--locked", "--package", EXTENSION, "--target", target]
        command += ["--edges", "normal,no-proc-macro", "--prefix", "none", "--format", "{p}|{l}"]
        for line in _run(command).splitlines():
            name, version, licence = re.fullmatch(r"(\S+) v(\S+)[^|]*\|(.*?)(?: \(\*\))?", line).groups()  # type: ignore[union-attr]
            found.add(Crate(name, version, licence))
    return sorted(found)


def of_others(crates: Iterable[Crate]) -> list[Crate]:
    """Those that are not of this workspace."""
    own = {path.parent.name for path in (ROOT / "rust").glob("*/Cargo.toml")}
    return [crate for crate in crates if crate.name not in own]


def licence_files(folder: Path, licence: str) -> list[Path]:
    """The licence texts in a crate's folder that have to be given along; empty when it has none.

    Where the expression leaves the choice between MIT and others, the text of MIT is enough.
    """
    pattern = re.compile(r"(?:licen[cs]e|copying|copyright|notice|unlicense)(?:[-._].*)?", re.IGNORECASE)
    files = sorted(path for path in folder.iterdir() if path.is_file() and pattern.fullmatch(path.name))
    if re.search(r"\bMIT\b", licence) and " AND " not in licence:
        return [path for path in files if "mit" in path.name.lower()] or files
    return files


def licences() -> str:
    """The content of LICENSE-THIRD-PARTY.txt. ValueError for a crate without a licence text."""
    metadata = json.loads(_run(["cargo", "metadata", "--locked", "--format-version", "1"]))
    folders = {(one["name"], one["version"]): Path(one["manifest_path"]).parent for one in metadata["packages"]}
    texts: dict[str, list[Crate]] = {}
    for crate in of_others(linked()):
        files = licence_files(folders[crate.name, crate.version], crate.licence)
        if not files:
            raise ValueError(f"{crate} ({crate.licence}) has no licence text in its folder")
        for file in files:
            lines = [line.rstrip() for line in file.read_text(encoding="utf-8").strip("\n\f ").splitlines()]
            texts.setdefault("\n".join(lines), []).append(crate)
    parts = [_HEAD]
    for text, crates in sorted(texts.items(), key=lambda one: one[1]):
        parts.append("\n".join([_RULE, *(f"{crate} ({crate.licence})" for crate in crates), _RULE, "", text, ""]))
    return "\n".join(parts)


def named_in(text: str) -> set[str]:
    """The crates that a LICENSE-THIRD-PARTY.txt has texts of, as "name version"."""
    return set(re.findall(r"^([\w-]+ \d\S*) \(.+\)$", text, re.MULTILINE))


def check() -> list[str]:
    """What LICENSE-THIRD-PARTY.txt lacks, or has too much."""
    have = named_in(LICENCES.read_text(encoding="utf-8")) if LICENCES.exists() else set()
    want = {str(crate) for crate in of_others(linked())}
    return [
        *(f"{LICENCES.name} has no licence of {crate}: make licences" for crate in sorted(want - have)),
        *(f"{LICENCES.name} has {crate}, which is not linked: make licences" for crate in sorted(have - want)),
    ]


def _run(command: list[str]) -> str:
    return subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout


def main(arguments: list[str]) -> int:
    """Command line."""
    match arguments:
        case ["list"]:
            print("\n".join(f"{crate} ({crate.licence})" for crate in linked()))
        case ["licences"]:
            LICENCES.write_text(licences(), encoding="utf-8")
            print(f"{LICENCES.name}: {len(of_others(linked()))} crates, {LICENCES.stat().st_size // 1024} KiB")
        case ["licences", "--check"]:
            problems = check()
            print("\n".join(problems) if problems else "licences: ok")
            return 1 if problems else 0
        case _:
            print(__doc__, file=sys.stderr)
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
