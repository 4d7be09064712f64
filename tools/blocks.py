"""Finds the Python blocks of a Markdown file."""

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
