"""The cases of a module, and those that do not run with an older torch, each with the reason."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import pytest
import torch

from bagua.c10d.torch_bindings import BACKEND_HAS_CONSTRUCTOR

__all__ = ["cases_in", "is_left_out", "needs_backend_class", "needs_torch", "older", "skip_if_left_out"]

_C = TypeVar("_C", bound=Callable[..., None])

_VERSION = tuple(int(number) for number in torch.__version__.split(".")[:2])

#: By name of the case's module and of the case.
_reasons: dict[tuple[str, str], str] = {}


def cases_in(module: Mapping[str, Any]) -> list[Callable[[Any], None]]:
    """The cases that a module has defined so far, in order: public functions of a rank, or of a pair of groups."""
    return [
        each
        for name, each in module.items()
        if inspect.isfunction(each)
        and each.__module__ == module["__name__"]
        and not name.startswith("_")
        and tuple(inspect.signature(each).parameters) in (("rank",), ("pair",))
        and each.__annotations__.get("return", "") in (None, "None")
    ]


def needs_torch(version: tuple[int, int], why: str) -> Callable[[_C], _C]:
    """A case that does not run with an older torch: `why` says what is different there."""
    return _left_out(version > _VERSION, why)


def older(version: tuple[int, int], why: str) -> str:
    """The reason why something does not run with an older torch, if this one is older."""
    return f"torch {torch.__version__}: {why}" if version > _VERSION else ""


def needs_backend_class(why: str) -> Callable[[_C], _C]:
    """A case that runs only where Python can subclass torch's Backend."""
    return _left_out(not BACKEND_HAS_CONSTRUCTOR, why)


def is_left_out(case: Callable[..., Any]) -> bool:
    """Returns True if this case does not run with the installed torch."""
    return (case.__module__, case.__name__) in _reasons


def skip_if_left_out(case: Callable[..., Any]) -> None:
    """Skips the test of such a case."""
    if is_left_out(case):
        pytest.skip(_reasons[case.__module__, case.__name__])


def _left_out(older: bool, why: str) -> Callable[[_C], _C]:
    def known(case: _C) -> _C:
        if older:
            _reasons[case.__module__, case.__name__] = f"torch {torch.__version__}: {why}"
        return case

    return known
