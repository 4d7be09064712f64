"""Marks names that will be removed. They warn for two minor versions, as docs/reference/versions.md promises.

    @deprecated(since="0.3.0", instead="bagua.all_reduce")
    def old(x): ...

warns from 0.3.0 on and is removed in 0.5.0. A test fails in 0.5.0 if the name still exists.
"""

from __future__ import annotations

import functools
import re
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar, cast

__all__ = ["MINOR_VERSIONS", "Deprecation", "deprecated", "deprecations", "overdue"]

#: Number of minor versions that warn before the one that removes the name.
MINOR_VERSIONS = 2

_Marked = TypeVar("_Marked", bound=Callable[..., Any])

_MARKED: list[Deprecation] = []


class Deprecation(NamedTuple):
    """A name that will be removed."""

    name: str
    since: str
    #: The version that no longer has it.
    removal: str
    #: The replacement; "" if there is none.
    instead: str

    def __str__(self) -> str:
        remedy = f"; use {self.instead}" if self.instead else ""
        return f"{self.name} is deprecated since Bagua {self.since} and will be removed in {self.removal}{remedy}"


def deprecated(*, since: str, instead: str = "") -> Callable[[_Marked], _Marked]:
    """Returns a decorator that makes each call of a function, or construction of a class, a DeprecationWarning at the
    caller's line.

    `since` is the first version that warns, as "major.minor.patch". `instead` names the replacement. Raises ValueError
    if `since` is not of this form.
    """
    removal = _removal(since)

    def mark(marked: _Marked) -> _Marked:
        found = Deprecation(f"{marked.__module__}.{marked.__qualname__}", since, removal, instead)
        _MARKED.append(found)
        # A class stays a class: its constructor warns, and so do those of its subclasses.
        function = marked.__init__ if isinstance(marked, type) else marked  # type: ignore[misc]

        @functools.wraps(function)
        def warning(*args: Any, **kwargs: Any) -> Any:
            warnings.warn(str(found), DeprecationWarning, stacklevel=2)
            return function(*args, **kwargs)

        if isinstance(marked, type):
            marked.__init__ = warning  # type: ignore[misc]
            return marked
        return cast(_Marked, warning)

    return mark


def deprecations() -> list[Deprecation]:
    """Returns the marked names of all imported modules, in the order of import."""
    return list(_MARKED)


def overdue(version: str) -> list[Deprecation]:
    """Returns the marked names that should have been removed in the given version or before."""
    return [one for one in _MARKED if _numbers(one.removal) <= _numbers(version)]


def _numbers(version: str) -> tuple[int, int, int]:
    found = re.fullmatch(r"(\d+)\.(\d+)\.(\d+)", version)
    if found is None:
        raise ValueError(f"a version must be major.minor.patch; got {version!r}")
    return int(found[1]), int(found[2]), int(found[3])


def _removal(since: str) -> str:
    major, minor, _ = _numbers(since)
    return f"{major}.{minor + MINOR_VERSIONS}.0"
