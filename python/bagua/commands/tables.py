"""Plain-text tables. On a terminal, their headings are bold."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence

from bagua import config

__all__ = ["amount", "bold", "pairs", "red", "show", "table", "width"]


def show(text: str) -> bool:
    """Prints text. Returns False if the reader is gone, as with `head`; later output is discarded."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        # The interpreter flushes the buffer when it exits, which must not fail.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return False
    return True


def bold(text: str) -> str:
    return _styled(text, 1)


def red(text: str) -> str:
    return _styled(text, 31)


def _styled(text: str, style: int) -> str:
    # Source: https://no-color.org
    plain = not sys.stdout.isatty() or config.text("NO_COLOR") is not None or config.text("TERM") == "dumb"
    return text if plain else f"\x1b[{style}m{text}\x1b[0m"


def width() -> int | None:
    """Returns the number of columns of the terminal; None if standard output is not a terminal of known size."""
    try:
        return os.get_terminal_size(sys.stdout.fileno()).columns or None
    except (OSError, ValueError):
        return None


def table(
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    title: str = "",
    left: int = 1,
    within: int | None = None,
) -> str:
    """Returns a table as text, cut to `within` columns. The first `left` columns are aligned left, the others right."""
    cells = [list(columns), *map(list, rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    head, *lines = (_line(row, widths, left)[:within] for row in cells)
    return "\n".join([*([bold(title), ""] if title else []), bold(head), *lines])


def pairs(name: str, rows: Iterable[Sequence[str]]) -> str:
    cells = list(map(list, rows))
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join([bold(name), *(f"  {_line(row, widths, len(row))}" for row in cells)])


def _line(row: Sequence[str], widths: Sequence[int], left: int) -> str:
    cells = enumerate(zip(row, widths, strict=True))
    return "  ".join(f"{cell:{'<' if i < left else '>'}{width}}" for i, (cell, width) in cells).rstrip()


def amount(value: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:,.1f} TB"
