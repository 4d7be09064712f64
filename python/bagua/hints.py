"""Texts that show users their mistake: the name that was probably meant, and the line that a warning is about."""

from __future__ import annotations

import difflib
import os
import sys
import warnings
from collections.abc import Iterable

__all__ = ["nearest", "unknown_name", "warn"]

# Packages that may be between a user's line and our warning: torch calls our hooks, Lightning calls our strategy.
_INSIDE = (
    "bagua",
    "torch",
    "lightning",
    "lightning_fabric",
    "pytorch_lightning",
    "contextlib",
    "functools",
    "importlib",
    "weakref",
)


def nearest(name: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """Returns the known name most similar to `name`, ignoring case; None if no similarity reaches `cutoff`."""
    by_text = {each.lower(): each for each in known}
    found = difflib.get_close_matches(name.lower(), by_text, n=1, cutoff=cutoff)
    return by_text[found[0]] if found else None


def unknown_name(what: str, name: str, known: Iterable[str]) -> str:
    """Returns an error text for an unknown name of a `what`. It contains the most similar name, and all known names."""
    known = list(known)
    near = nearest(name, known)
    suggestion = f"; did you mean {near!r}?" if near is not None else ";"
    return f"no {what} {name!r}{suggestion} known: {', '.join(known) or 'none'}"


def warn(text: str, category: type[Warning] = UserWarning) -> None:
    """Warns at the innermost line of the call stack that is not in this package, torch or Lightning.

    A fixed `stacklevel` cannot find that line, because the number of frames in between varies.
    """
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _INSIDE:
        frame = frame.f_back
    registry = frame.f_globals.setdefault("__warningregistry__", {})
    module = frame.f_globals.get("__name__") or os.path.splitext(frame.f_code.co_filename)[0]
    warnings.warn_explicit(text, category, frame.f_code.co_filename, frame.f_lineno, module, registry)
