"""An NVRTC for machines without one: what it makes names every kernel, which is all that the simulated driver reads."""

from __future__ import annotations

import json
import subprocess
import tempfile
from pathlib import Path

from bagua.extension import CUDA_KERNELS

_SOURCE = r"""
#include <string.h>
#include <stddef.h>

static const char text[] = TEXT;

int nvrtcVersion(int *major, int *minor) { *major = 12, *minor = 0; return 0; }
int nvrtcGetNumSupportedArchs(int *count) { *count = 1; return 0; }
int nvrtcGetSupportedArchs(int *list) { *list = 90; return 0; }
int nvrtcCreateProgram(void **made, const char *source, const char *name, int headers, const char *const *texts,
                       const char *const *names) {
    *made = (void *)text;
    return 0;
}
int nvrtcCompileProgram(void *program, int number, const char *const *options) { return 0; }
int nvrtcDestroyProgram(void **program) { *program = NULL; return 0; }
int nvrtcGetCUBINSize(void *program, size_t *size) { *size = sizeof text; return 0; }
int nvrtcGetCUBIN(void *program, char *to) { memcpy(to, text, sizeof text); return 0; }
"""


def pretended_nvrtc(folder: Path) -> Path:
    """The library, made by the C compiler in a folder, where another process may use it or make it at the same time."""
    folder.mkdir(exist_ok=True)
    kernels = [name for names in CUDA_KERNELS.values() for name in names]
    text = "\n".join([".version 8.0", ".target sm_90", *(f".visible .entry {name}() {{ ret; }}" for name in kernels)])
    library = folder / "libnvrtc.so"
    with tempfile.TemporaryDirectory(dir=folder) as made:
        source, new = Path(made, "nvrtc.c"), Path(made, "libnvrtc.so")
        source.write_text(_SOURCE.replace("TEXT", json.dumps(text)))
        subprocess.run(["gcc", "-shared", "-fPIC", "-o", new, source], check=True)
        new.replace(library)
    return library
