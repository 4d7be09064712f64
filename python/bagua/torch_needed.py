"""Requires a torch that is new enough, before a part of the package imports it."""

from __future__ import annotations

import re

__all__ = ["OLDEST", "require", "too_old"]

#: The oldest release of torch that is supported: the page "Settings" says why.
OLDEST = (2, 5)


def require(part: str) -> None:
    """ModuleNotFoundError without torch, ImportError where torch is too old; both name the part of the package."""
    try:
        import torch
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise ModuleNotFoundError(f'{part} needs torch: pip install "torch>=2.5"', name="torch") from None
    if why := too_old(part, torch.__version__):
        raise ImportError(why)


def too_old(part: str, version: str) -> str | None:
    """Why a release of torch cannot be used; None where it can."""
    numbers = re.match(r"(\d+)\.(\d+)", version)
    if numbers is None or (int(numbers[1]), int(numbers[2])) >= OLDEST:
        return None
    return f"{part} needs torch {OLDEST[0]}.{OLDEST[1]} or newer, this is {version}"
