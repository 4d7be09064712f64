"""Says which source files and which lines of Markdown are too long.

A source file that passes 600 lines becomes a folder. Stubs are left out: a stub describes one module, and cannot be
divided before the module is.

A line of Markdown has at most 140 characters, but for what cannot be broken: a row of a table, a line of a code block,
and a line without a space after its indentation, such as a link.
"""

from __future__ import annotations

import sys
from pathlib import Path

#: Lines of a source file.
LINES = 600
#: Characters of a line of Markdown.
CHARACTERS = 140
ROOMS = ("rust", "python", "tests", "tools", "benchmarks", "examples")
PROSE = (*ROOMS, "docs", "deploy", ".github")


def long_files(root: Path) -> list[str]:
    """One line for each source file under `root` that has too many lines."""
    files = sorted(
        path for room in ROOMS for path in (root / room).rglob("*") if path.suffix in {".rs", ".py", ".cpp", ".h"}
    )
    lengths = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in files}
    return [
        f"{path.relative_to(root)}: {length} lines, more than {LINES}: make it a folder"
        for path, length in lengths.items()
        if length > LINES
    ]


def long_lines(root: Path) -> list[str]:
    """One line for each line of Markdown under `root` that has too many characters and can be broken."""
    found = []
    for path in sorted([*root.glob("*.md"), *(path for room in PROSE for path in (root / room).rglob("*.md"))]):
        in_code = False
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            text = line.strip()
            in_code ^= text.startswith("```")
            can_be_broken = " " in text and not in_code and not text.startswith("|")
            if len(line) > CHARACTERS and can_be_broken:
                found.append(f"{path.relative_to(root)}:{number}: {len(line)} characters, more than {CHARACTERS}")
    return found


if __name__ == "__main__":
    where = Path(__file__).resolve().parent.parent
    problems = long_files(where) + long_lines(where)
    for problem in problems:
        print(problem, file=sys.stderr)
    sys.exit(1 if problems else 0)
