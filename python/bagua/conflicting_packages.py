"""Finds distributions of the original Bagua that share this package's folder.

The original Bagua is published as `bagua`, `bagua-cuda102`, `bagua-cuda111` and so on; this package as `bagua-rs`. All
of them own the folder `bagua`: whichever pip installs last replaces files of the other, and uninstalling one deletes
files of the other.
"""

from __future__ import annotations

import os
import re
from typing import NamedTuple

from bagua import hints

__all__ = ["Conflict", "conflict", "warn"]

# The folder, or the file of an old installer, that records an installed distribution.
_RECORD = re.compile(r"(bagua(?:_cuda\d+)?)-(\d[^-]*)(?:-py[\d.]+)?\.(?:dist|egg)-info")


class Conflict(NamedTuple):
    """Installed distributions that own the same folder."""

    #: The conflict, with the names of the distributions and the folder.
    why: str
    #: The pip commands that resolve the conflict.
    fix: str


def conflict() -> Conflict | None:
    """Returns the conflict with distributions of the original Bagua; None if there are none beside this package."""
    package = os.path.dirname(os.path.abspath(__file__))
    try:
        beside = os.listdir(os.path.dirname(package))
    except OSError:
        # A folder that may be entered but not listed.
        return None
    found = {each[1].replace("_", "-"): each[2] for each in map(_RECORD.fullmatch, beside) if each}
    if not found:
        return None
    originals = " and ".join(f"{name} {version}" for name, version in sorted(found.items()))
    return Conflict(
        f"{originals} (the original Bagua) and bagua-rs both own {package} and replace each other's files",
        f"pip uninstall {' '.join(sorted(found))} bagua-rs, then install bagua-rs again",
    )


def warn() -> None:
    """Warns the importer of `bagua` if the original Bagua is installed in the same folder."""
    if found := conflict():
        hints.warn(f"{found.why}: {found.fix}")
