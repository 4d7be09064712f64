"""Counts lines of code, comments and blanks by part: `python tools/count_lines.py [CHECKOUT]` prints a table.

The product is rust/*/src without tests, and python/bagua. Tests are Rust items under `#[cfg(test)]`, files in folders
named tests or benches, and files named tests.rs. A string in triple quotes that begins a line counts as a comment.
"""

import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

PARTS = ("product", "tests", "benchmarks", "tools", "examples")
KINDS = ("code", "comment", "blank")


def part_of(path: Path) -> str | None:
    """The part that a file belongs to; None if no part counts it."""
    if path.suffix not in (".rs", ".py", ".cu", ".cuh", ".cpp", ".h"):
        return None
    if {"tests", "benches"} & set(path.parts) or path.name == "tests.rs":
        return "tests"
    return {"rust": "product", "python": "product"}.get(path.parts[0], path.parts[0])


def count(path: Path, part: str, totals: Counter[tuple[str, str]]) -> None:
    """Adds the lines of a file."""
    python = path.suffix == ".py"
    indent: str | None = None  # of the `#[cfg(test)]` item that this line is in
    quotes = ""  # that end the docstring that this line is in
    for line in path.read_text(encoding="utf-8").splitlines():
        text = line.strip()
        if indent is None and path.suffix == ".rs" and re.match(r"#\[cfg\((all\()?test\b", text):
            indent = line.partition("#")[0]
        opened = re.match(r'r?("""|\'\'\')', text) if python and not quotes else None
        comment = bool(quotes or opened) or text.startswith("#" if python else ("//", "/*", "*/"))
        totals["tests" if indent is not None else part, KINDS[2 if not text else int(comment)]] += 1
        if quotes:
            quotes = "" if quotes in text else quotes
        elif opened and opened[1] not in text[opened.end() :]:
            quotes = opened[1]
        # The last line of an item has the indent of its first line.
        if indent is not None and re.fullmatch(rf"{indent}(?!\s|#\[|//).*[;}},]", line):
            indent = None


def main() -> None:
    """Prints the table."""
    root, totals = Path(sys.argv[1] if len(sys.argv) > 1 else "."), Counter[tuple[str, str]]()
    for name in subprocess.check_output(["git", "ls-files"], cwd=root, text=True).splitlines():
        if (part := part_of(Path(name))) in PARTS and (root / name).is_file():
            count(root / name, part, totals)
    print(f"{'':10}{'lines':>9}", *(f"{kind:>8}" for kind in KINDS))
    for row in PARTS:
        numbers = [totals[row, kind] for kind in KINDS]
        print(f"{row:10}{sum(numbers):9,}", *(f"{number:8,}" for number in numbers))


if __name__ == "__main__":
    main()
