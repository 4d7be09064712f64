"""Runs torch's tests of torch.distributed on one backend and writes each outcome to a file.

    python -m tests.torch_suite.suite bagua outcomes.jsonl --tests test_all_reduce_sum test_barrier

The tests are those of `torch.testing._internal.distributed.distributed_test` that gloo runs on CPU tensors: the module
reads the variable BACKEND when it is imported and decides by it what to skip, so it is imported as for gloo, and gets
the backend afterwards. Ranks are forks of this process, because torch takes seconds to import in a new one.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import sys
import tempfile
import time
import unittest
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any, TextIO

#: Seconds that one test may take.
LIMIT = 120


def load(backend: str, ranks: int, folder: str) -> ModuleType:
    """torch's module of tests, ready to run on `backend`."""
    os.environ.update(
        BACKEND="gloo",
        WORLD_SIZE=str(ranks),
        TEMP_DIR=folder,
        MASTER_ADDR="127.0.0.1",
        DISTRIBUTED_TESTS_DEFAULT_TIMEOUT=str(LIMIT),
    )
    Path(folder, "barrier").mkdir()
    Path(folder, "test_dir").mkdir()
    from torch.testing._internal.distributed import distributed_test

    if backend == "bagua":
        import bagua.c10d  # noqa: F401  registers the backend

    # Read when a test runs, where it begins its group.
    distributed_test.BACKEND = os.environ["BACKEND"] = backend
    # Its ranks meet by files, for 10 s: too little on a machine with other work.
    distributed_test.Barrier.sync.__func__.__defaults__ = (None, 100)  # type: ignore[attr-defined]
    return distributed_test


def cases(module: ModuleType) -> type[unittest.TestCase]:
    """The class of the tests, whose ranks are forks."""

    class Cases(module.TestDistBackend, module.DistributedTest._DistTestBase):  # type: ignore[name-defined]
        def setUp(self) -> None:
            super().setUp()
            self._start_processes(multiprocessing.get_context("fork").Process)

        def run_test(self, test_name: str, parent_pipe: Any) -> None:
            # The group has begun. These choose a model on the CPU by gloo's name.
            if test_name.startswith("test_accumulate_gradients_no_sync"):
                module.BACKEND = "gloo"  # type: ignore[attr-defined]
            super().run_test(test_name, parent_pipe)

        def tearDown(self) -> None:
            for process in self.processes:
                # A rank that hangs in C++ does not handle SIGTERM.
                process.kill()
                process.join()
            super().tearDown()

    return Cases


class _Outcomes(unittest.TestResult):
    """Writes one line of JSON for each test: test, outcome, seconds, text."""

    def __init__(self, output: TextIO) -> None:
        super().__init__()
        self._output = output
        self._begun = 0.0

    def startTest(self, test: unittest.TestCase) -> None:
        super().startTest(test)
        self._begun = time.monotonic()
        print(f"--- {name(test)} ---", flush=True)

    def _write(self, test: unittest.TestCase, outcome: str, text: str = "") -> None:
        seconds = round(time.monotonic() - self._begun, 2)
        line = {"test": name(test), "outcome": outcome, "seconds": seconds, "text": text}
        self._output.write(json.dumps(line) + "\n")
        self._output.flush()

    def addSuccess(self, test: unittest.TestCase) -> None:
        self._write(test, "passed")

    def addSkip(self, test: unittest.TestCase, reason: str) -> None:
        self._write(test, "skipped", reason)

    def addFailure(self, test: unittest.TestCase, err: Any) -> None:
        self._write(test, "failed", self._text(test, err))

    addError = addFailure

    def _text(
        self, test: unittest.TestCase, err: tuple[type[BaseException], BaseException, TracebackType | None]
    ) -> str:
        return f"{err[0].__name__}: {err[1]}"


def name(test: unittest.TestCase) -> str:
    """The name of its method."""
    return test.id().rsplit(".", 1)[-1]


@contextlib.contextmanager
def _folder() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="torch-suite-", ignore_cleanup_errors=True) as folder:
        yield folder


def main() -> int:
    """Runs the tests that are asked for; 0 whatever their outcomes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("backend", choices=("gloo", "bagua"))
    parser.add_argument("output", type=Path, help="file for a line of JSON for each test")
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--tests", nargs="+", help="names of tests; all by default")
    options = parser.parse_args()
    with _folder() as folder, options.output.open("w", encoding="utf-8") as output:
        found = cases(load(options.backend, options.ranks, folder))
        names = options.tests or unittest.TestLoader().getTestCaseNames(found)
        unittest.TestSuite(found(each) for each in names).run(_Outcomes(output))
    return 0


if __name__ == "__main__":
    sys.exit(main())
