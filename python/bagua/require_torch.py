"""Checks that torch is installed and new enough, before a part of the package imports it."""

from __future__ import annotations

import re

__all__ = ["OLDEST", "require", "too_old"]

#: The oldest supported release of torch. The page "Settings" says why.
OLDEST = (2, 5)


def require(part: str) -> None:
    """Raises ModuleNotFoundError without torch, and ImportError if it is too old. `part` names what needs it."""
    try:
        import torch
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise ModuleNotFoundError(f'{part} needs torch: pip install "torch>=2.5"', name="torch") from None
    if why := too_old(part, torch.__version__):
        raise ImportError(why)


def too_old(part: str, version: str) -> str | None:
    """Returns the reason why a release of torch cannot be used; None if it can."""
    numbers = re.match(r"(\d+)\.(\d+)", version)
    if numbers is None or (int(numbers[1]), int(numbers[2])) >= OLDEST:
        return None
    return f"{part} needs torch {OLDEST[0]}.{OLDEST[1]} or newer, this is {version}"
