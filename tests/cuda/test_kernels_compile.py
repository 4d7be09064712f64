"""The kernels as NVRTC compiles them for every architecture, by its own report, by PTX and by machine code."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from bagua.extension import CUDA_ARCHITECTURES, CUDA_KERNELS

pytestmark = pytest.mark.slow

#: Compiles every program for an architecture, in a process of its own: NVRTC 13.2 ends a process whose libcuda.so.1
#: lacks cuGetExportTable.
PROGRAM = """
import json, sys
from pathlib import Path
from bagua import config
from bagua.extension import CUDA_KERNELS, CudaLibraries
libraries, places, folder, architecture = CudaLibraries(), config.cuda_places(), Path(sys.argv[1]), int(sys.argv[2])
report = {}
for name in CUDA_KERNELS:
    ptx, _, log = libraries.compile(places, name, architecture)
    report[name] = log
    (folder / f"{name}.{architecture}.ptx").write_bytes(ptx)
print(json.dumps(report))
"""

FUNCTION = re.compile(
    r"Function properties for (\w+)\n"
    r".*?(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads"
)
ENTRY = re.compile(r"^\.visible \.entry (\w+)\(.*?^\}", re.MULTILINE | re.DOTALL)


def nvrtc() -> dict[str, Any]:
    """What `bagua.cuda.info()` says of NVRTC; asked in another process, which loads it."""
    program = "import bagua.cuda, json; print(json.dumps(bagua.cuda.info()['nvrtc']))"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return dict(json.loads(ended.stdout))


KNOWN = cache(lambda: [it for it in CUDA_ARCHITECTURES if it in (nvrtc()["architectures"] or [])])


class Compiled(NamedTuple):
    """What was made of a program."""

    log: str
    ptx: str


def compiled(architecture: int, folder: Path) -> dict[str, Compiled]:
    """Every program for an architecture."""
    command = [sys.executable, "-c", PROGRAM, str(folder), str(architecture)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    assert ended.returncode == 0, ended.stderr
    result = {}
    for name, log in json.loads(ended.stdout).items():
        result[name] = Compiled(log, (folder / f"{name}.{architecture}.ptx").read_text())
    return result


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[int, Future[dict[str, Compiled]]]]:
    """What NVRTC makes, two architectures at a time: the tests of one run while the next is compiled."""
    folder = tmp_path_factory.mktemp("compiled")
    with ThreadPoolExecutor(2) as pool:
        yield {architecture: pool.submit(compiled, architecture, folder) for architecture in KNOWN()}


@pytest.fixture(params=CUDA_ARCHITECTURES, ids=lambda architecture: f"sm_{architecture}")
def programs(request: pytest.FixtureRequest, running: dict[int, Future[dict[str, Compiled]]]) -> dict[str, Compiled]:
    """Every program for an architecture."""
    if not KNOWN():
        pytest.skip("there is no NVRTC: torch's CUDA build brings one")
    if request.param not in KNOWN():
        pytest.skip(f"this NVRTC does not know sm_{request.param}")
    return running[request.param].result()


def test_no_kernel_has_a_stack_or_spills(programs: dict[str, Compiled]) -> None:
    for name, made in programs.items():
        sizes_of = {kernel: list(map(int, sizes)) for kernel, *sizes in FUNCTION.findall(made.log)}
        assert sizes_of == {kernel: [0, 0, 0] for kernel in CUDA_KERNELS[name]}, made.log


def test_kernels_have_their_names_and_exact_arithmetic(programs: dict[str, Compiled]) -> None:
    for name, made in programs.items():
        assert sorted(found[1] for found in ENTRY.finditer(made.ptx)) == sorted(CUDA_KERNELS[name])
        for pattern in (r"\bfma\.", r"\bmad\.\w+\.f", r"\.approx\b", r"\.ftz\b", r"\bdiv\.full\b"):
            assert re.search(pattern, made.ptx) is None, f"{name} has {pattern}"
        # What these patterns would find is there in another form.
        assert name == "reduce_integer" or re.search(r"\b(add|cvt)\.\S*f(16|32|64)\b", made.ptx)
        assert ("div.rn.f32" in made.ptx) == (name not in ("convert", "feedback", "update", "reduce_integer"))
