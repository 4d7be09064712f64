"""Machine code is compiled once and found again, whatever happens to its folder."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from bagua.config import CudaPlaces
from bagua.errors import BaguaError
from bagua.extension import CudaLibraries

#: An NVRTC whose machine code names the program and its architecture; at each compilation it writes a line to a file.
NVRTC = r"""
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct program { char text[200]; };

int nvrtcVersion(int *major, int *minor) { *major = 12; *minor = MINOR; return 0; }
int nvrtcGetNumSupportedArchs(int *count) { *count = 3; return 0; }
int nvrtcGetSupportedArchs(int *list) { list[0] = 70; list[1] = 90; list[2] = 121; return 0; }
const char *nvrtcGetErrorString(int code) { return code == 6 ? "NVRTC_ERROR_COMPILATION" : "NVRTC_ERROR_OTHER"; }
#ifndef OLD
int nvrtcCreateProgram(struct program **made, const char *source, const char *name, int headers,
                       const char *const *texts, const char *const *names) {
    *made = malloc(sizeof(**made));
    snprintf((*made)->text, sizeof((*made)->text), "%s of %d headers", name, headers);
    int right = strstr(source, "#include") && strstr(texts[0], "#pragma once") && strcmp(names[0], "convert.cuh") == 0;
    return right ? 0 : 1;
}
int nvrtcCompileProgram(struct program *program, int number, const char *const *options) {
    FILE *file = fopen(COMPILATIONS, "a");
    fprintf(file, "%s\n", program->text);
    fclose(file);
    for (int i = 0; i < number; i++) {
        if (strncmp(options[i], "--gpu-architecture=", 19) != 0) continue;
        strcat(strcat(program->text, " for "), options[i] + 19);
    }
    return CODE;
}
#define RESULT(name, format)                                                                              \
    int nvrtcGet##name##Size(struct program *program, size_t *size) {                                     \
        *size = snprintf(NULL, 0, format, program->text) + 1;                                             \
        return 0;                                                                                         \
    }                                                                                                     \
    int nvrtcGet##name(struct program *program, char *text) { return sprintf(text, format, program->text) < 0; }
RESULT(CUBIN, "code of %s")
RESULT(ProgramLog, "own.cu(1): error: %s\n1 error")
int nvrtcDestroyProgram(struct program **program) { free(*program); *program = NULL; return 0; }
#endif
"""


class Pretended:
    """A library of the source above, and how often it compiled."""

    def __init__(self, folder: Path, *, minor: int = 4, code: int = 0, old: bool = False) -> None:
        compiler = shutil.which("cc") or shutil.which("gcc")
        if compiler is None:
            pytest.skip("there is no C compiler (cc or gcc) to make a library with")
        folder.mkdir(exist_ok=True)
        self._compilations = folder / "compilations"
        self.path = folder / "libnvrtc.so"
        (folder / "nvrtc.c").write_text(NVRTC)
        defined = [f"-DMINOR={minor}", f"-DCODE={code}", f'-DCOMPILATIONS="{self._compilations}"', *["-DOLD"] * old]
        subprocess.run([compiler, "-shared", "-fPIC", "-o", self.path, folder / "nvrtc.c", *defined], check=True)
        self.libraries = CudaLibraries()
        self.places = CudaPlaces(libcuda=None, libnvrtc=str(self.path), libnccl=None, site_packages=[])

    def cubin(self, cache: Path | None, program: str = "update", architecture: int = 90) -> bytes:
        """Machine code from a cache."""
        return self.libraries.cubin(self.places, None if cache is None else str(cache), program, architecture)

    @property
    def compilations(self) -> int:
        """How often it compiled."""
        return len(self._compilations.read_text().splitlines()) if self._compilations.exists() else 0


@pytest.fixture
def nvrtc(tmp_path: Path) -> Pretended:
    """One that compiles."""
    return Pretended(tmp_path / "nvrtc")


CODE = b"code of update of 4 headers for sm_90\0"


# --- the cache --------------------------------------------------------------------------------------------------------


def test_what_was_compiled_is_found_again_by_source_architecture_and_version(nvrtc: Pretended, tmp_path: Path) -> None:
    cache = tmp_path / "bagua" / "cuda"
    assert [nvrtc.cubin(cache), nvrtc.cubin(cache)] == [CODE, CODE]
    assert nvrtc.compilations == 1
    assert nvrtc.cubin(cache, architecture=70) == CODE.replace(b"90", b"70")
    assert nvrtc.cubin(cache, "convert") == CODE.replace(b"update", b"convert")
    assert nvrtc.compilations == 3
    newer = Pretended(tmp_path / "newer", minor=9)
    assert newer.cubin(cache) == CODE
    assert newer.compilations == 1
    assert len(list(cache.iterdir())) == 4
    assert all(path.suffix == ".cubin" for path in cache.iterdir())


@pytest.mark.parametrize("damage", ["empty", "cut", "changed", "longer", "another entry"])
def test_a_damaged_entry_is_compiled_again_and_replaced(nvrtc: Pretended, tmp_path: Path, damage: str) -> None:
    cache = tmp_path / "cache"
    nvrtc.cubin(cache)
    (entry,) = cache.iterdir()
    whole = entry.read_bytes()
    changed = bytearray(whole)
    changed[-3] ^= 1
    damaged = {
        "empty": b"",
        "cut": whole[:-1],
        "changed": bytes(changed),
        "longer": whole + b"\0",
        "another entry": CODE,
    }
    entry.write_bytes(damaged[damage])
    assert nvrtc.cubin(cache) == CODE
    assert nvrtc.compilations == 2
    assert entry.read_bytes() == whole
    assert nvrtc.cubin(cache) == CODE
    assert nvrtc.compilations == 2


# --- errors -----------------------------------------------------------------------------------------------------------


def test_a_program_that_does_not_compile_is_an_error_with_the_log(tmp_path: Path) -> None:
    nvrtc = Pretended(tmp_path / "nvrtc", code=6)
    with pytest.raises(BaguaError) as caught:
        nvrtc.cubin(tmp_path / "cache")
    log = r"own.cu(1): error: update of 4 headers for sm_90\n1 error"
    assert str(caught.value) == f"libnvrtc ({nvrtc.path}): update does not compile for sm_90: {log}"
    assert not (tmp_path / "cache").exists()
