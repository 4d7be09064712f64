"""Runs the checks that are too long for every change, and prints a table of the results.

usage: python3 tools/nightly.py [PART ...]

Each part is one `make` target and can run alone. A part that fails does not stop the others. The output of each part
goes to target/nightly/PART.log. Exits with 1 if a part failed.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

#: The make target of each part, in the order in which they run.
PARTS = {
    "rust": "test-rust",
    "models": "test-models",
    "python": "test-python",
    "chaos": "chaos",
    "torch": "test-torch",
    "ray": "test-ray",
    "hugging-face": "test-hugging-face",
    "wheel": "wheel",
    "oldest": "test-oldest",
    "arm": "test-arm",
    "bench": "bench",
}
LOGS = Path("target/nightly")


def run(part: str) -> tuple[str, float]:
    """Runs one part. Returns "passed" or "FAILED", and the seconds it took."""
    begin = time.monotonic()
    with (LOGS / f"{part}.log").open("w") as log:
        code = subprocess.run(["make", PARTS[part]], stdout=log, stderr=subprocess.STDOUT, check=False).returncode
    return ("passed" if code == 0 else "FAILED"), time.monotonic() - begin


def main() -> int:
    chosen = sys.argv[1:] or list(PARTS)
    if unknown := [part for part in chosen if part not in PARTS]:
        print(f"unknown part: {', '.join(unknown)}; the parts are {', '.join(PARTS)}", file=sys.stderr)
        return 2
    LOGS.mkdir(parents=True, exist_ok=True)
    results = {}
    for part in chosen:
        print(f"== {part}: make {PARTS[part]}, output in {LOGS / part}.log", flush=True)
        results[part] = run(part)
        print(f"   {results[part][0]} after {results[part][1]:.0f} s", flush=True)
    print(f"\n{'part':<12} {'result':<7} {'seconds':>7}")
    for part, (result, seconds) in results.items():
        print(f"{part:<12} {result:<7} {seconds:>7.0f}")
    return 1 if any(result == "FAILED" for result, _ in results.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
