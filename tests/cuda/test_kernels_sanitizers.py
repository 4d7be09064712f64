"""The kernels read and write nothing beside their arrays and do nothing that C++ leaves undefined: under ASan and UBSan."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cuda.kernels_on_host import ROOT, compiled

#: Reads one element more than there are.
TOO_FAR = """
import sys
import numpy as np
from tests.cuda.kernel_cases import U64
from tests.cuda.kernels_on_host import Kernels, placed, room
source, out = placed(np.ones(100, np.uint16)), room(4 * 101)
Kernels(sys.argv[1]).launch("convert_f16_f32", (1,), source, U64(101), out)
"""


def run(variant: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Python with the sanitizer's library loaded first."""
    try:
        library = compiled(f".{variant}")
    except RuntimeError as missing:
        pytest.skip(str(missing))
    environment = {**os.environ, "PYTHONMALLOC": "malloc", "UBSAN_OPTIONS": "print_stacktrace=1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    if variant == "asan":
        found = subprocess.run(["g++", "-print-file-name=libasan.so"], capture_output=True, text=True, check=True)
        if not Path(found.stdout.strip()).exists():
            pytest.skip("this g++ has no libasan.so")
        environment |= {"LD_PRELOAD": found.stdout.strip(), "ASAN_OPTIONS": "detect_leaks=0"}
    return subprocess.run(
        [sys.executable, *arguments, str(library)], cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=300
    )


@pytest.mark.parametrize("variant", ["asan", "ubsan"])
def test_every_kernel_is_clean(variant: str) -> None:
    ended = run(variant, "-m", "tests.cuda.kernel_cases")
    assert ended.returncode == 0, ended.stderr[-5000:]
    number, unit = ended.stdout.split()
    assert unit == "cases"
    assert int(number) > 300
    assert "runtime error" not in ended.stderr


def test_a_kernel_that_reads_too_far_is_found() -> None:
    ended = run("asan", "-c", TOO_FAR)
    assert ended.returncode != 0
    assert "heap-buffer-overflow" in ended.stderr
    assert "convert" in ended.stderr

