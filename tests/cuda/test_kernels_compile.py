"""The kernels compile for every architecture that NVRTC supports."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow

#: Compiles every program for an architecture, in a process of its own: NVRTC 13.2 ends a process whose libcuda.so.1
#: lacks cuGetExportTable. Exits with 77 if there is no NVRTC, or it does not support the architecture.
PROGRAM = """
import sys
import bagua.cuda
from bagua import config
from bagua.extension import CUDA_KERNELS, CudaLibraries
architecture = int(sys.argv[1])
if architecture not in (bagua.cuda.info()["nvrtc"]["architectures"] or []):
    sys.exit(77)
for program, kernels in CUDA_KERNELS.items():
    code = CudaLibraries().cubin(config.cuda_places(), None, program, architecture)
    missing = [kernel for kernel in kernels if kernel.encode() not in code]
    assert not missing, f"{program} lacks {missing}"
"""


@pytest.mark.parametrize("architecture", [70, 75, 80, 86, 89, 90, 100, 120])
def test_every_kernel_compiles(architecture: int) -> None:
    command = [sys.executable, "-c", PROGRAM, str(architecture)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    if ended.returncode == 77:
        pytest.skip(f"there is no NVRTC that supports sm_{architecture}: torch's CUDA build brings one")
    assert ended.returncode == 0, ended.stderr
