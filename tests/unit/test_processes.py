"""Trees of processes: the list of all processes, as Linux shows it and as POSIX does."""

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from bagua.distributed import processes

NO_PS = "needs the command ps, which this system does not have"
NO_PROC = "needs /proc, which this system does not have"


@pytest.mark.parametrize(
    "listed",
    [
        pytest.param(processes._from_ps, marks=pytest.mark.skipif(shutil.which("ps") is None, reason=NO_PS)),
        pytest.param(
            processes._from_proc, marks=pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason=NO_PROC)
        ),
    ],
)
def test_a_child_is_listed_with_its_parent(listed: Callable[[], Iterator[tuple[int, int]]]) -> None:
    with subprocess.Popen(("sleep", "60")) as child:
        try:
            assert (child.pid, os.getpid()) in set(listed())
        finally:
            child.kill()
