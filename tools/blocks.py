"""Finds the Python blocks of a Markdown file.

The words after ```python are its marks: `runnable`, with `ranks=N` for more than one, or `not run: REASON`.
"""

from __future__ import annotations

import re
from pathlib import Path

_FENCE = re.compile(r"^```python(?P<marks>[^\n]*)\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)


def python_blocks(path: Path) -> list[tuple[int, frozenset[str], str]]:
    """Each block's first line in the file, its marks (the words after ```python), and its code."""
    text = path.read_text(encoding="utf-8")
    return [
        (text.count("\n", 0, found.start("code")) + 1, frozenset(found["marks"].split()), found["code"])
        for found in _FENCE.finditer(text)
    ]


def reason(marks: frozenset[str], path: Path, line: int) -> str | None:
    """Why the tests do not run the block that begins at a line; None where they do, "" where the page does not say."""
    if "runnable" in marks:
        return None
    fence = path.read_text(encoding="utf-8").splitlines()[line - 2]
    return fence.partition("not run:")[2].strip()
