"""The built extension links only the system's own libraries, and the package does not pull in torch."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tools import elf


def extension() -> Path:
    """The file that `import bagua._bagua` loads."""
    spec = importlib.util.find_spec("bagua._bagua")
    assert spec is not None, "the extension is not built: make setup"
    assert spec.origin is not None
    return Path(spec.origin)


def test_the_extension_links_neither_libtorch_nor_libpython_nor_cuda() -> None:
    libraries = elf.needed(extension())
    assert any(name.startswith("libc.so") for name in libraries), libraries
    assert elf.foreign(libraries) == []


def test_libraries_of_torch_python_and_cuda_would_be_found_out() -> None:
    wrong = ["libtorch_cpu.so", "libc10.so", "libpython3.11.so.1.0", "libcuda.so.1", "libcudart.so.13", "libnccl.so.2"]
    assert elf.foreign(["libc.so.6", *wrong, "libm.so.6", "ld-linux-x86-64.so.2"]) == wrong


def test_the_elf_reader_agrees_with_readelf() -> None:
    readelf = shutil.which("readelf")
    if readelf is None:
        pytest.skip("readelf is not installed (Debian and Ubuntu: binutils)")
    for path in (extension(), Path(shutil.which("bash") or "/bin/sh").resolve()):
        shown = subprocess.run([readelf, "-d", path], check=True, capture_output=True, text=True).stdout
        assert elf.needed(path) == re.findall(r"\(NEEDED\).*\[(.*)\]", shown)


def test_the_elf_reader_refuses_what_is_no_elf_file(tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_text("not a library")
    with pytest.raises(ValueError, match="not an ELF file"):
        elf.needed(text)


def test_importing_bagua_imports_neither_torch_nor_a_framework() -> None:
    program = "import sys, bagua; print(sorted({'torch', 'tensorflow', 'jax', 'sklearn'} & set(sys.modules)))"
    shown = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert shown.stdout.strip() == "[]"
