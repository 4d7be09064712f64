"""Tables as plain text; on a terminal their heads are bold."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence

from bagua import config

__all__ = ["amount", "bold", "pairs", "red", "show", "table", "width"]


def show(text: str) -> bool:
    """Writes to standard output; False once its reader has ended, as `head` does. Later writes then go nowhere."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        # The interpreter writes what is left in the buffer at its end, and must not fail there.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return False
    return True


def bold(text: str) -> str:
    """The text, bold on a terminal."""
    return _styled(text, 1)


def red(text: str) -> str:
    """The text, red on a terminal."""
    return _styled(text, 31)


def _styled(text: str, style: int) -> str:
    # Source: https://no-color.org
    plain = not sys.stdout.isatty() or config.text("NO_COLOR") is not None or config.text("TERM") == "dumb"
    return text if plain else f"\x1b[{style}m{text}\x1b[0m"


def width() -> int | None:
    """Columns of the terminal that standard output is; None where it is none, or does not know its size."""
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
    """A table whose first `left` columns are aligned to the left and whose others to the right; its lines are cut to
    `within` characters.
    """
    cells = [list(columns), *map(list, rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    head, *lines = (_line(row, widths, left)[:within] for row in cells)
    return "\n".join([*([bold(title), ""] if title else []), bold(head), *lines])


def pairs(name: str, rows: Iterable[Sequence[str]]) -> str:
    """A name, and below it rows of cells that are aligned to the left."""
    cells = list(map(list, rows))
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join([bold(name), *(f"  {_line(row, widths, len(row))}" for row in cells)])


def _line(row: Sequence[str], widths: Sequence[int], left: int) -> str:
    cells = enumerate(zip(row, widths, strict=True))
    return "  ".join(f"{cell:{'<' if i < left else '>'}{width}}" for i, (cell, width) in cells).rstrip()


def amount(value: float) -> str:
    """A number of bytes with a decimal unit."""
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:,.1f} TB"
