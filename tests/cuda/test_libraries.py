"""Libraries and devices of CUDA are reported without a GPU: with the reason where there are none."""

from __future__ import annotations

import ctypes
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bagua import config

#: A driver: what cuInit returns, and how many devices there are, is defined when it is compiled.
DRIVER = r"""
#include <stddef.h>
#include <string.h>

int cuInit(unsigned flags) { return INIT; }
int cuDriverGetVersion(int *version) { *version = 12040; return 0; }
int cuDeviceGetCount(int *count) { *count = DEVICES; return 0; }
int cuDeviceGet(int *device, int ordinal) { *device = ordinal + 7; return 0; }
int cuDeviceGetName(char *name, int size, int device) {
    memset(name, 'x', size);
    if (device == 7) strncpy(name, "Pretended GPU", size);
    return 0;
}
int cuDeviceGetAttribute(int *value, int attribute, int device) {
    if (device != 7) return 101;
    *value = attribute == 75 ? 9 : attribute == 76 ? 0 : -1;
    return 0;
}
int cuDeviceTotalMem_v2(size_t *bytes, int device) { *bytes = (size_t)80 << 30; return device == 7 ? 0 : 101; }
int cuDeviceGetUuid_v2(char *uuid, int device) {
    for (int i = 0; i < 16; i++) uuid[i] = 16 * i + i;
    return device == 7 ? 0 : 101;
}
int cuGetErrorName(int code, const char **name) {
    *name = code == 100 ? "CUDA_ERROR_NO_DEVICE" : NULL;
    return *name ? 0 : 1;
}
"""


#: Runs in a process of its own, because what was found holds until the process ends.
PROGRAM = """
import json, sys
import bagua.cuda as cuda
first = cuda.why_not()
print(json.dumps([cuda.is_available(), first, cuda.why_not(), cuda.info()]))
"""

Compile = Callable[..., Path]


@pytest.fixture
def compiled(tmp_path: Path) -> Compile:
    """`compiled(source, *flags)` is a shared library of C."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("there is no C compiler (cc or gcc) to make a library with")

    def make(source: str, *flags: str, name: str = "libpretended.so") -> Path:
        (tmp_path / "source.c").write_text(source)
        path = tmp_path / name
        subprocess.run([compiler, "-shared", "-fPIC", "-o", path, tmp_path / "source.c", *flags], check=True)
        return path

    return make


def run(program: str, *arguments: object, **variables: object) -> str:
    """Returns the output of a program that has these BAGUA_LIB variables and no others."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("BAGUA_LIB")}
    ended = subprocess.run(
        [sys.executable, "-c", program, *map(str, arguments)],
        env=kept | {name: str(value) for name, value in variables.items()},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def asked(program: str = PROGRAM, *arguments: object, **variables: object) -> tuple[str | None, dict[str, Any]]:
    """`why_not()` and `info()`, after checks that hold in every case."""
    available, first, again, info = json.loads(run(program, *arguments, **variables))
    assert first == again == info["driver"]["error"]
    assert available is (first is None)
    assert first is None or (first and "\n" not in first)
    assert list(info) == ["driver", "nvrtc", "nccl", "devices", "cache"]
    assert set(info["driver"]) == {"path", "version", "error"}
    assert set(info["nvrtc"]) == {"path", "version", "architectures"}
    assert set(info["nccl"]) == {"path", "version"}
    assert bool(info["devices"]) is available
    return first, info


# --- no driver --------------------------------------------------------------------------------------------------------


def test_importing_loads_no_library_and_no_torch() -> None:
    program = (
        "import sys, bagua, bagua.cuda\n"
        "maps = open('/proc/self/maps').read()\n"
        "print([name for name in ('libcuda', 'libnvrtc', 'libnccl') if name in maps], 'torch' in sys.modules)"
    )
    assert run(program) == "[] False\n"


def test_a_file_that_is_no_library_is_named_with_the_loaders_words(tmp_path: Path) -> None:
    file = tmp_path / "libcuda.so.1"
    file.touch()
    why, info = asked(BAGUA_LIBCUDA=file)
    assert why is not None
    assert why.startswith(f"libcuda (BAGUA_LIBCUDA={file}) does not load: ")
    assert "file too short" in why
    assert info["driver"]["path"] is None


@pytest.mark.parametrize(
    ("code", "name"),
    [(100, "CUDA_ERROR_NO_DEVICE"), (803, "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH"), (-5, "an error that the driver")],
)
def test_a_cu_init_that_fails_is_reported_with_name_and_number(code: int, name: str, compiled: Compile) -> None:
    library = compiled(DRIVER, f"-DINIT={code}", "-DDEVICES=0")
    why, info = asked(BAGUA_LIBCUDA=library)
    assert why is not None
    assert why.startswith(f"libcuda ({library}): cuInit failed: {name}")
    assert why.endswith(f" ({code})")
    # The version is known without cuInit.
    assert info["driver"]["version"] == "12.4"


# --- a driver ---------------------------------------------------------------------------------------------------------


def test_devices_are_described_and_what_a_driver_does_not_report_is_null(compiled: Compile) -> None:
    library = compiled(DRIVER, "-DINIT=0", "-DDEVICES=2")
    why, info = asked(BAGUA_LIBCUDA=library)
    assert why is None
    assert info["driver"] == {"path": str(library), "version": "12.4", "error": None}
    first, second = info["devices"]
    assert first == {
        "name": "Pretended GPU",
        "capability": "9.0",
        "memory": 80 << 30,
        "uuid": "00112233-4455-6677-8899-aabbccddeeff",
    }
    # This driver fills the whole of the memory that it is given for the name.
    assert second == {"name": "x" * 255, "capability": None, "memory": None, "uuid": None}


def test_the_loader_finds_the_driver_by_its_name(compiled: Compile, tmp_path: Path) -> None:
    library = compiled(DRIVER, "-DINIT=0", "-DDEVICES=1", "-Wl,-soname,libcuda.so.1", name="libcuda.so.1")
    why, info = asked(LD_LIBRARY_PATH=tmp_path)
    assert (why, info["driver"]["path"]) == (None, str(library))


def test_a_forked_child_has_no_cuda_and_its_parent_keeps_it(compiled: Compile) -> None:
    library = compiled(DRIVER, "-DINIT=0", "-DDEVICES=1")
    program = (
        "import json, os, sys, bagua.cuda as cuda\n"
        "cuda.why_not()\n"
        "reading, writing = os.pipe()\n"
        "if os.fork() == 0:\n"
        "    said = json.dumps([cuda.is_available(), cuda.why_not(), cuda.why_not(), cuda.info()])\n"
        "    os.write(writing, said.encode())\n"
        "    os._exit(0)\n"
        "os.wait()\n"
        "print(os.read(reading, 1 << 16).decode())\n"
        "print(cuda.why_not())"
    )
    child, parent = run(program, BAGUA_LIBCUDA=library).splitlines()
    available, why, again, info = json.loads(child)
    assert (available, why) == (False, again)
    assert "forked child" in why
    assert "bagua.cuda" in why
    assert (info["driver"]["error"], info["devices"], info["nvrtc"]["path"]) == (why, [], None)
    assert parent == "None"


# --- NVRTC and NCCL ---------------------------------------------------------------------------------------------------


def packaged(pattern: str) -> Path:
    """A library of this Python's packages."""
    found = [path for site in config.cuda_places().site_packages for path in Path(site).glob(f"nvidia/*/lib/{pattern}")]
    if not found:
        pytest.skip(f"this Python has no package with {pattern}")
    return found[0]


def test_nvrtc_and_nccl_are_reported_without_a_driver() -> None:
    nvrtc, nccl = packaged("libnvrtc.so.1[0-9]"), packaged("libnccl.so.2")
    why, info = asked(BAGUA_LIBCUDA="/nowhere.so", BAGUA_LIBNVRTC=nvrtc, BAGUA_LIBNCCL=nccl)
    assert why is not None
    assert (info["nvrtc"]["path"], info["nccl"]["path"]) == (str(nvrtc), str(nccl))
    assert info["nvrtc"]["version"].startswith(nvrtc.suffix[1:] + ".")
    assert {80, 90} <= set(info["nvrtc"]["architectures"])
    assert re.fullmatch(r"2\.\d+\.\d+", info["nccl"]["version"])
    # Its own report, from another function.
    version = ctypes.c_int()
    assert ctypes.CDLL(str(nccl)).ncclGetVersion(ctypes.byref(version)) == 0
    major, rest = divmod(version.value, 10000)
    assert info["nccl"]["version"] == f"{major}.{rest // 100}.{rest % 100}"


def test_every_function_of_the_table_is_in_nccl_itself() -> None:
    program = (
        "import bagua.cuda\n"
        "from bagua import config, extension\n"
        "print(extension.CudaLibraries().report(config.cuda_places())['nccl']['error'])"
    )
    assert run(program, BAGUA_LIBNCCL=packaged("libnccl.so.2")) == "None\n"


def test_the_command_prints_the_info_as_json(tmp_path: Path) -> None:
    environment = os.environ | {"BAGUA_LIBCUDA": str(tmp_path / "none")}
    command = [sys.executable, "-m", "bagua.cuda"]
    shown = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=120)
    assert shown.stderr == ""
    assert f"{tmp_path}/none" in json.loads(shown.stdout)["driver"]["error"]
