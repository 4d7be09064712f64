"""The simulated driver's modules and launches, with kernels of the tests' own."""

from __future__ import annotations

import ctypes
import site
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cuda.driver import Driver
from tests.cuda.simulated import Ended, Scenario, Simulator, _simulated_driver, simulator

__all__ = ["_simulated_driver", "simulator"]

#: What a library of kernels that were compiled for the host exports.
KERNELS = r"""
#include <string.h>
#include <stddef.h>

struct Two { int *first, *second; };

int bagua_host_parameters(const char *kernel, size_t *sizes, int max) {
    if (max < 3) return -1;
    if (!strcmp(kernel, "fill")) { sizes[0] = 8; sizes[1] = 4; sizes[2] = 4; return 3; }
    if (!strcmp(kernel, "move")) { sizes[0] = sizeof(struct Two); return 1; }
    if (!strcmp(kernel, "stray")) { sizes[0] = 8; sizes[1] = 8; return 2; }
    if (!strcmp(kernel, "fails")) return 0;
    return -1;
}

int bagua_host_launch(const char *kernel, const unsigned grid[3], const unsigned block[3], size_t shared,
                      void **arguments, unsigned blocks) {
    if (blocks > grid[0]) blocks = grid[0];
    if (!strcmp(kernel, "fails")) return 3;
    if (!strcmp(kernel, "move")) {
        struct Two *two = arguments[0];
        for (unsigned i = 0; i < blocks * block[0]; i++) two->second[i] = two->first[i];
    } else if (!strcmp(kernel, "stray")) {
        **(char **)arguments[0] = 1;
        (*(char **)arguments[0])[*(long *)arguments[1]] = 1;
    } else {
        int *out = *(int **)arguments[0], value = *(int *)arguments[1], count = *(int *)arguments[2];
        for (unsigned i = 0; i < blocks * block[0] && i < (unsigned)count; i++) out[i] = value;
    }
    return 0;
}
"""

PTX = b"""
.version 8.0
.target sm_75
.address_size 64
.visible .entry fill(.param .u64 fill_0) { ret; }
.visible .entry move( .param .align 8 .b8 move_0[16]) { ret; }
.visible .entry stray(.param .u64 stray_0, .param .u64 stray_1) { ret; }
.visible .entry fails() { ret; }
.visible .entry device_only() { ret; }
\0"""


@pytest.fixture(scope="module")
def kernels(_simulated_driver: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A library of kernels."""
    folder = tmp_path_factory.mktemp("kernels")
    (folder / "kernels.c").write_text(KERNELS)
    path = folder / "libkernels.so"
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", path, folder / "kernels.c"], check=True)
    return path


def launched(simulator: Simulator, kernels: Path, scenario: Scenario, *arguments: object, **variables: object) -> Ended:
    """A scenario with those kernels."""
    return simulator(scenario, PTX.decode(), *arguments, BAGUA_SIM_KERNELS=kernels, **variables)


def test_a_launch_runs_the_kernel_with_the_parameters_of_the_call(simulator: Simulator, kernels: Path) -> None:
    def launch(cuda: Driver, image: str) -> list[list[int]]:
        cuda.start()
        module = cuda.get("cuModuleLoadData", image.encode())
        function = cuda.get("cuModuleGetFunction", module, b"fill")
        move = cuda.get("cuModuleGetFunction", module, b"move")
        stream, address, other = cuda.stream(), cuda.memory(bytes(40)), cuda.memory(bytes(40))
        values = ctypes.c_uint64(address), ctypes.c_int(7), ctypes.c_int(9)
        parameters = (ctypes.c_void_p * 3)(*map(ctypes.addressof, values))
        cuda.cuLaunchKernel(function, 3, 1, 1, 4, 1, 1, 0, stream, parameters, 0)
        # They were copied.
        values[1].value = 8
        both = (ctypes.c_uint64 * 2)(address, other)
        parameters = (ctypes.c_void_p * 1)(ctypes.addressof(both))
        cuda.cuLaunchKernel(move, 1, 1, 1, 10, 1, 1, 0, stream, parameters, 0)
        cuda.cuStreamSynchronize(stream)
        seen = [list(memoryview(cuda.read(each, 40)).cast("i")) for each in (address, other)]
        cuda.cuMemFree_v2(address)
        cuda.cuMemFree_v2(other)
        cuda.cuStreamDestroy_v2(stream)
        cuda.cuModuleUnload(module)
        return seen

    ended = launched(simulator, kernels, launch)
    assert ended.value == [[7] * 9 + [0]] * 2
    assert ended.clean
    broken = launched(simulator, kernels, launch, BAGUA_SIM_BREAK="short-kernel")
    assert broken.value == [[7] * 8 + [0, 0], [0] * 10]


def test_an_image_must_name_the_kernel_and_the_host_must_have_it(simulator: Simulator, kernels: Path) -> None:
    def find(cuda: Driver, image: str) -> list[int]:
        cuda.start()
        made = ctypes.c_void_p()
        out = ctypes.byref(made)
        module = cuda.get("cuModuleLoadData", image.encode())
        function = cuda.get("cuModuleGetFunction", module, b"device_only")
        return [
            cuda.code("cuModuleGetFunction", out, module, b"fil"),
            cuda.code("cuLaunchKernel", function, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0),
            cuda.code("cuModuleLoadData", out, b"no image at all"),
            cuda.code("cuModuleLoadData", out, image.replace("sm_75", "sm_100").encode()),
        ]

    ended = launched(simulator, kernels, find)
    assert ended.value == [500, 500, 200, 218]
    assert "device_only" in ended.report["faults"][0]


def test_a_library_serves_every_context(simulator: Simulator, kernels: Path) -> None:
    def library(cuda: Driver, image: str) -> int:
        cuda.start(1)
        made = cuda.get("cuLibraryLoadData", image.encode(), 0, 0, 0, 0, 0, 0)
        kernel = cuda.get("cuLibraryGetKernel", made, b"fails")
        function = cuda.get("cuKernelGetFunction", kernel)
        cuda.cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0)
        return cuda.code("cuCtxSynchronize")

    ended = launched(simulator, kernels, library)
    assert ended.value == 719
    assert ended.report["faults"] == ["cuLaunchKernel: fails failed with 3"]


@pytest.mark.parametrize(
    ("offset", "words"), [(100, "wrote behind the end"), (1 << 20, "touched 0x"), (-4096, "touched 0x")]
)
def test_a_kernel_that_leaves_its_memory_poisons_the_context(
    simulator: Simulator, kernels: Path, offset: int, words: str
) -> None:
    def stray(cuda: Driver, image: str, offset: int) -> list[int]:
        cuda.start()
        function = cuda.get("cuModuleGetFunction", cuda.get("cuModuleLoadData", image.encode()), b"stray")
        _, address, _ = [cuda.memory(100) for _ in range(3)]
        values = ctypes.c_uint64(address), ctypes.c_int64(offset)
        parameters = (ctypes.c_void_p * 2)(*map(ctypes.addressof, values))
        first = cuda.code("cuLaunchKernel", function, 1, 1, 1, 1, 1, 1, 0, 0, parameters, 0)
        return [first, cuda.code("cuCtxSynchronize"), cuda.code("cuMemFree_v2", address)]

    ended = launched(simulator, kernels, stray, offset)
    assert ended.value == [0, 700, 700]
    assert words in ended.report["faults"][0]


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("freed", "was freed before"),
        ("unknown", "is not allocated"),
        ("peer", "access is not enabled"),
        ("enabled", ""),
    ],
)
def test_the_memory_of_parameters_is_checked(simulator: Simulator, kernels: Path, what: str, words: str) -> None:
    def check(cuda: Driver, image: str, what: str) -> int:
        other = cuda.start(1)
        address = cuda.memory(bytes(100))
        context = cuda.start(0)
        if what == "freed":
            address = cuda.memory(bytes(100))
            cuda.cuMemFree_v2(address)
        if what == "unknown":
            address += 1 << 30
        if what == "enabled":
            cuda.cuCtxEnablePeerAccess(other, 0)
        assert context
        function = cuda.get("cuModuleGetFunction", cuda.get("cuModuleLoadData", image.encode()), b"fill")
        values = ctypes.c_uint64(address), ctypes.c_int(1), ctypes.c_int(1)
        parameters = (ctypes.c_void_p * 3)(*map(ctypes.addressof, values))
        cuda.cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, 0, parameters, 0)
        return cuda.code("cuCtxSynchronize")

    ended = launched(simulator, kernels, check, what)
    assert ended.value == (700 if words else 0)
    assert [words in fault for fault in ended.report["faults"]] == ([True] if words else [])


def test_a_geometry_that_no_device_has_is_refused(simulator: Simulator, kernels: Path) -> None:
    def geometry(cuda: Driver, image: str) -> list[int]:
        cuda.start()
        function = cuda.get("cuModuleGetFunction", cuda.get("cuModuleLoadData", image.encode()), b"fails")
        tried = [(0, 1, 1, 1, 1, 1, 0), (1, 65536, 1, 1, 1, 1, 0), (1, 1, 1, 1024, 2, 1, 0), (1, 1, 1, 1, 1, 1, 49153)]
        codes = [cuda.code("cuLaunchKernel", function, *each, 0, 0, 0) for each in tried]
        cuda.cuFuncSetAttribute(function, 8, 50000)
        return [*codes, cuda.code("cuLaunchKernel", function, *tried[-1], 0, 0, 0)]

    assert launched(simulator, kernels, geometry).value == [1, 1, 1, 1, 0]


def test_without_kernels_for_the_host_a_launch_says_so(simulator: Simulator, tmp_path: Path) -> None:
    def launch(cuda: Driver, image: str) -> int:
        cuda.start()
        function = cuda.get("cuModuleGetFunction", cuda.get("cuModuleLoadData", image.encode()), b"fill")
        return cuda.code("cuLaunchKernel", function, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0)

    ended = launched(simulator, tmp_path / "absent.so", launch)
    assert ended.value == 303
    assert "absent.so" in ended.report["faults"][0]


def test_a_cubin_of_nvrtc_is_read_beside_the_simulated_driver(simulator: Simulator) -> None:
    found = [path for folder in site.getsitepackages() for path in Path(folder).glob("nvidia/*/lib/libnvrtc.so.1?")]
    if not found:
        pytest.skip(f"{sys.prefix} has no NVRTC to make a cubin with (torch's CUDA build brings it)")

    def cubin(cuda: Driver, path: str) -> list[int]:
        cuda.start()
        nvrtc = ctypes.CDLL(path)

        def compiled(architecture: bytes) -> bytes:
            program, size = ctypes.c_void_p(), ctypes.c_size_t()
            source = b'extern "C" __global__ void double_it(int *x) { *x *= 2; }'
            assert nvrtc.nvrtcCreateProgram(ctypes.byref(program), source, b"double.cu", 0, None, None) == 0
            options = (ctypes.c_char_p * 1)(b"-arch=" + architecture)
            assert nvrtc.nvrtcCompileProgram(program, 1, options) == 0
            assert nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size)) == 0
            data = ctypes.create_string_buffer(size.value)
            assert nvrtc.nvrtcGetCUBIN(program, data) == 0
            return data.raw

        module = cuda.get("cuModuleLoadData", compiled(b"sm_90"))
        made = ctypes.c_void_p()
        return [
            cuda.code("cuModuleGetFunction", ctypes.byref(made), module, b"double_it"),
            cuda.code("cuModuleGetFunction", ctypes.byref(made), module, b"halve_it"),
            cuda.code("cuModuleLoadData", ctypes.byref(made), compiled(b"sm_80")),
        ]

    assert simulator(cubin, str(found[0])).value == [0, 500, 209]
