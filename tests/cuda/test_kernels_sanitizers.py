"""Under ASan and UBSan, the kernels touch nothing but their arrays and do nothing that C++ leaves undefined."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cuda.kernels_on_host import ROOT, compiled

pytestmark = pytest.mark.slow


def test_every_kernel_is_clean() -> None:
    try:
        library = compiled(".sanitized")
    except RuntimeError as missing:
        pytest.skip(str(missing))
    asked = ["g++", "-print-file-name=libasan.so"]
    found = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
    if not Path(found).exists():
        pytest.skip("this g++ has no libasan.so")
    environment = {
        **os.environ,
        # AddressSanitizer demands to be loaded first.
        "LD_PRELOAD": found,
        # Python's own allocator would give out memory that AddressSanitizer does not see.
        "PYTHONMALLOC": "malloc",
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "ASAN_OPTIONS": "detect_leaks=0",
    }
    command = [sys.executable, "-m", "tests.cuda.kernel_cases", str(library)]
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=300)
    assert ended.returncode == 0, ended.stderr[-5000:]
    number, unit = ended.stdout.split()
    assert unit == "cases"
    assert int(number) > 300
