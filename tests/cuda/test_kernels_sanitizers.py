"""Under ASan and UBSan, the kernels touch nothing but their arrays and do nothing that C++ leaves undefined."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cuda.kernels_on_host import ROOT, compiled

pytestmark = pytest.mark.slow

#: Reads one element more than there are.
TOO_FAR = """
import sys
import numpy as np
from tests.cuda.kernel_cases import U64
from tests.cuda.kernels_on_host import Kernels, placed
replica, difference = placed(np.ones(101, np.uint16)), placed(np.ones(100, np.uint16))
Kernels(sys.argv[1]).launch("update_ring_take_f16", (1,), replica, difference, U64(101))
"""

#: Reads elements at an address that is not a multiple of their size.
OUT_OF_PLACE = """
import sys
import numpy as np
from tests.cuda.kernel_cases import U64
from tests.cuda.kernels_on_host import Kernels, placed
replica, difference = placed(np.ones(100, np.uint16)), placed(np.ones(100, np.uint16), 1)
Kernels(sys.argv[1]).launch("update_ring_take_f16", (1,), replica, difference, U64(100))
"""


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Python with AddressSanitizer's library loaded first, as it demands."""
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
        "LD_PRELOAD": found,
        # Python's own allocator would give out memory that AddressSanitizer does not see.
        "PYTHONMALLOC": "malloc",
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "ASAN_OPTIONS": "detect_leaks=0",
    }
    command = [sys.executable, *arguments, str(library)]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=300)


def test_every_kernel_is_clean() -> None:
    ended = run("-m", "tests.cuda.kernel_cases")
    assert ended.returncode == 0, ended.stderr[-5000:]
    number, unit = ended.stdout.split()
    assert unit == "cases"
    assert int(number) > 300


def test_a_kernel_that_reads_too_far_is_found() -> None:
    ended = run("-c", TOO_FAR)
    assert ended.returncode != 0
    assert "heap-buffer-overflow" in ended.stderr
    assert "update_ring_take" in ended.stderr


def test_a_kernel_that_reads_out_of_place_is_found() -> None:
    ended = run("-c", OUT_OF_PLACE)
    assert ended.returncode != 0
    assert "misaligned address" in ended.stderr
