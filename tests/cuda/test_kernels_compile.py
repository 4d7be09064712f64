"""The kernels as NVRTC compiles them for every architecture, by its own report, by PTX and by machine code."""

from __future__ import annotations

import importlib.util
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

from bagua.engine import CUDA_ARCHITECTURES, CUDA_KERNELS

pytestmark = pytest.mark.slow

#: Compiles every program for an architecture, in a process of its own: NVRTC 13.2 ends a process whose libcuda.so.1
#: lacks cuGetExportTable.
PROGRAM = """
import json, sys, time
from pathlib import Path
from bagua import config
from bagua.engine import CUDA_KERNELS, CudaLibraries
libraries, places, folder, architecture = CudaLibraries(), config.cuda_places(), Path(sys.argv[1]), int(sys.argv[2])
report = {}
for name in CUDA_KERNELS:
    start, used = time.perf_counter(), time.process_time()
    ptx, cubin, log = libraries.compile(places, name, architecture)
    report[name] = [log, time.perf_counter() - start, time.process_time() - used]
    (folder / f"{name}.{architecture}.ptx").write_bytes(ptx)
    (folder / f"{name}.{architecture}.cubin").write_bytes(cubin)
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
    cubin: Path
    #: Seconds, and those of the processor.
    seconds: tuple[float, float]


def compiled(architecture: int, folder: Path) -> dict[str, Compiled]:
    """Every program for an architecture."""
    command = [sys.executable, "-c", PROGRAM, str(folder), str(architecture)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    assert ended.returncode == 0, ended.stderr
    result = {}
    for name, (log, *seconds) in json.loads(ended.stdout).items():
        ptx, cubin = (folder / f"{name}.{architecture}.{ending}" for ending in ("ptx", "cubin"))
        result[name] = Compiled(log, ptx.read_text(), cubin, (seconds[0], seconds[1]))
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
        print(f"{name}: compiled in {made.seconds[0]:.1f} s, {made.seconds[1]:.1f} s of processor")
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


def test_arrays_are_read_and_written_by_sixteen_bytes(programs: dict[str, Compiled]) -> None:
    # Some architectures have vectors of more.
    read = r"\bld\.global\.(?:nc\.)?(?:v4\.\w?32|v2\.\w?64|v8\.\w?32|v4\.\w?64)"
    written = r"\bst\.global\.(?:v4\.\w?32|v2\.\w?64|v8\.\w?32)"
    # Those of error feedback take one element at a time: a rank's share of the error begins at any element.
    one = "feedback_"
    for made in programs.values():
        for entry in ENTRY.finditer(made.ptx):
            kernel, body = entry[1], entry[0]
            if not re.match(rf"{one}|minmax_u8_(decode|tables|reduce)", kernel):
                assert re.search(read, body), f"{kernel} reads"
            if not re.match(rf"{one}|minmax_u8_(range|encode|tables|reduce)", kernel):
                assert re.search(written, body), f"{kernel} writes"
            assert not re.search(r"\b(ld|st)\.local\b", body), f"{kernel} uses local memory"


def test_machine_code_has_accesses_of_sixteen_bytes(programs: dict[str, Compiled]) -> None:
    spec = importlib.util.find_spec("triton")
    folder = Path(spec.origin).parent / "backends/nvidia/bin" if spec and spec.origin else Path("/nowhere")
    tool = next((it for it in (folder / "nvdisasm", folder / "cuobjdump") if it.exists()), None)
    if tool is None:
        pytest.skip("there is no nvdisasm and no cuobjdump: triton, which torch's CUDA build brings, has them")
    command = [str(tool), "-c" if tool.name == "nvdisasm" else "-sass", str(programs["minmax_u8"].cubin)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    sections = re.split(r"\.section\s+\.text\.|Function : ", ended.stdout)[1:]
    code = {name[0]: section for section in sections if (name := re.match(r"\w+", section))}
    for element in ("f32", "f16", "bf16"):
        for kernel, access in (("range", "LDG"), ("encode", "LDG"), ("decode", "STG")):
            found = re.search(rf"\b{access}\.E\.(\w+\.)*128\b", code[f"minmax_u8_{kernel}_{element}"])
            assert found, f"{kernel} of {element}"
        # No table or vector is in the memory of a thread.
        assert not re.search(r"\b(LDL|STL)\b", code[f"minmax_u8_decode_{element}"])


def test_every_architecture_of_the_list_is_compiled_for() -> None:
    if not KNOWN():
        pytest.skip("there is no NVRTC: torch's CUDA build brings one")
    version = tuple(int(number) for number in nvrtc()["version"].split(".")[:2])
    blackwell = [100, 120] if version >= (12, 8) else []
    assert [it for it in KNOWN() if it != 70] == [75, 80, 86, 89, 90, *blackwell]
    assert (70 in KNOWN()) == (version < (13, 0))
