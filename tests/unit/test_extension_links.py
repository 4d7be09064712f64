"""The built extension links only the system's own libraries, and the package does not pull in torch."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest


def extension() -> Path:
    """The file that `import bagua._bagua` loads."""
    spec = importlib.util.find_spec("bagua._bagua")
    assert spec is not None, "the extension is not built: make setup"
    assert spec.origin is not None
    return Path(spec.origin)


def test_the_extension_links_neither_libtorch_nor_libpython_nor_cuda() -> None:
    elffile = pytest.importorskip("elftools.elf.elffile", reason="pyelftools is not installed: make setup")
    with extension().open("rb") as file:
        dynamic = elffile.ELFFile(file).get_section_by_name(".dynamic")
        libraries = {tag.needed.split(".so")[0] for tag in dynamic.iter_tags("DT_NEEDED")}
    assert "libc" in libraries
    # libpthread and libdl are parts of libc since glibc 2.34.
    assert libraries <= {"libc", "libm", "libdl", "libpthread", "libgcc_s", "ld-linux-x86-64", "ld-linux-aarch64"}


def test_importing_bagua_imports_neither_torch_nor_a_framework() -> None:
    program = "import sys, bagua; print(sorted({'torch', 'tensorflow', 'jax', 'sklearn'} & set(sys.modules)))"
    shown = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert shown.stdout.strip() == "[]"
