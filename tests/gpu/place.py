"""Finds out if the machine has a GPU for the tests of this folder."""

from __future__ import annotations

import functools
import os
import subprocess
import sys

#: Ends with the reason why there is no GPU, as its last line.
_ASKS = "import bagua.cuda; print(bagua.cuda.why_not() or '')"


@functools.cache
def why_not() -> str | None:
    """`bagua.cuda.why_not()` of a process of its own, because the answer binds the process that asks."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("BAGUA_SIM_")}
    asked = subprocess.run(
        [sys.executable, "-c", _ASKS], env=env, capture_output=True, text=True, check=False, timeout=120
    )
    if asked.returncode != 0:
        return f"bagua.cuda cannot be asked: {asked.stderr.strip().splitlines()[-1:]}"
    return asked.stdout.strip() or None
