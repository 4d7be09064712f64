"""Runs torch's tests of torch.distributed on gloo and on "bagua", and says how many of gloo's "bagua" passes.

    python -m tests.torch_suite                      # all, three ranks; 5 minutes on 2 cores
    python -m tests.torch_suite --tests test_barrier

The exit code is 1 when a test that gloo passes fails on "bagua" and is not in not_passed.txt, or is in it and passes.
What the ranks printed is in the folder that is named at the end.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


def not_passed() -> dict[str, str]:
    """Reasons by name, of the tests that gloo passes and "bagua" does not."""
    lines = (HERE / "not_passed.txt").read_text(encoding="utf-8").splitlines()
    return dict(line.split(": ", 1) for line in lines if line and not line.startswith("#"))


def outcomes(backend: str, folder: Path, tests: list[str] | None = None, ranks: int = 3) -> dict[str, dict[str, Any]]:
    """Returns the outcome of each test by name, see suite.py. Raises RuntimeError if the tests could not be run."""
    output, log = folder / f"{backend}.jsonl", folder / f"{backend}.log"
    command = [sys.executable, "-m", "tests.torch_suite.suite", backend, str(output), "--ranks", str(ranks)]
    command += ["--tests", *tests] if tests else []
    with log.open("w") as printed:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "BAGUA_TRACE_DIR": str(folder / "traces")}
        code = subprocess.run(
            command, cwd=ROOT, env=environment, stdout=printed, stderr=subprocess.STDOUT, check=False
        ).returncode
    if code:
        raise RuntimeError(f"the tests on {backend} ended with {code}:\n{log.read_text()[-4000:]}")
    lines = map(json.loads, output.read_text(encoding="utf-8").splitlines())
    return {line["test"]: line for line in lines}


def passed(found: dict[str, dict[str, Any]]) -> set[str]:
    """The names of those that passed."""
    return {name for name, line in found.items() if line["outcome"] == "passed"}


def main() -> int:
    """Runs what is asked for; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--tests", nargs="+", metavar="NAME", help="names of tests; all by default")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="torch-suite-"))
    of_gloo = passed(outcomes("gloo", folder, options.tests, options.ranks))
    found = outcomes("bagua", folder, options.tests, options.ranks)
    ours = passed(found) & of_gloo
    listed = not_passed()
    wrong = sorted(of_gloo - ours - listed.keys())
    late = sorted(ours & listed.keys())
    for name in wrong:
        print(f"{name} failed on bagua:\n{found[name]['text']}\n")
    for name in late:
        print(f"{name} passes and is in not_passed.txt")
    for name in sorted(of_gloo - ours):
        if name in listed:
            print(f"{name} does not pass: {listed[name]}")
    print(
        f"bagua passes {len(ours)} of the {len(of_gloo)} tests that gloo passes on {options.ranks} ranks; see {folder}"
    )
    return 1 if wrong or late else 0


if __name__ == "__main__":
    sys.exit(main())
