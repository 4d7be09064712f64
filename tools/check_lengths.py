"""Says which source files are too long: a file that passes 600 lines becomes a folder.

Stubs are left out: a stub describes one module, and cannot be divided before the module is.
"""

from __future__ import annotations

import sys
from pathlib import Path

LIMIT = 600
ROOMS = ("rust", "python", "tests", "tools", "benchmarks", "examples")


def too_long(root: Path) -> list[str]:
    """One line for each file under `root` that is longer than the limit."""
    files = sorted(
        path for room in ROOMS for path in (root / room).rglob("*") if path.suffix in {".rs", ".py", ".cpp", ".h"}
    )
    lengths = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in files}
    return [f"{path.relative_to(root)}: {length} lines" for path, length in lengths.items() if length > LIMIT]


if __name__ == "__main__":
    found = too_long(Path(__file__).resolve().parent.parent)
    for line in found:
        print(f"{line}, more than {LIMIT}: make it a folder", file=sys.stderr)
    sys.exit(1 if found else 0)
