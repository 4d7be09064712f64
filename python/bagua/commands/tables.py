"""Tables on the terminal, by rich."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

__all__ = ["console", "need_rich", "table"]


def need_rich(what: str) -> None:
    """ImportError that says what to install where rich is missing."""
    try:
        import rich  # noqa: F401
    except ImportError as error:
        raise ImportError(f'{what} needs rich: pip install "bagua[metrics]" ({error})') from None


def console(*, stderr: bool = False) -> Any:
    """Where tables are printed. Output that is no terminal is not cut at 80 columns."""
    from rich.console import Console

    found = Console(stderr=stderr, highlight=False)
    if not found.is_terminal:
        found = Console(stderr=stderr, highlight=False, width=200)
    return found


def table(columns: Sequence[str], rows: Iterable[Sequence[str]], *, title: str = "", left: int = 1) -> Any:
    """A table whose first `left` columns are aligned to the left and whose others to the right."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    made = Table(title=title or None, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    for number, column in enumerate(columns):
        made.add_column(column, justify="left" if number < left else "right", overflow="fold")
    for row in rows:
        # Text, so that brackets in it are not read as markup.
        made.add_row(*(Text(cell) for cell in row))
    return made
