"""The parts of the package that use torch say so where there is none, or one that is too old."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cases import slow_but

PARTS = ("bagua.torch_api", "bagua.c10d", "bagua.horovod.torch", "bagua.aggregation", "bagua.torch_api.contrib")


def named(part: str) -> str:
    return ".".join(part.split(".")[:2])


def imports(part: str, before: str, folder: Path | None = None) -> str:
    """The last line of what the import of a part writes to stderr."""
    path = os.pathsep.join([str(folder), *sys.path]) if folder else os.pathsep.join(sys.path)
    done = subprocess.run(
        [sys.executable, "-c", f"{before}; import {part}"],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    return done.stderr.strip().splitlines()[-1]


@pytest.mark.parametrize("part", slow_but(["bagua.torch_api"], PARTS))
def test_without_torch_an_import_says_what_to_install(part: str) -> None:
    said = imports(part, "import sys; sys.modules['torch'] = None")
    assert said == f'ModuleNotFoundError: {named(part)} needs torch: pip install "torch>=2.5"'


@pytest.mark.parametrize("part", slow_but(["bagua.torch_api"], PARTS))
def test_a_torch_that_is_too_old_is_named_by_its_version(part: str, tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("__version__ = '2.4.1+cpu'")
    said = imports(part, "pass", tmp_path)
    assert said == f"ImportError: {named(part)} needs torch 2.5 or newer, this is 2.4.1+cpu"


def test_a_module_that_torch_lacks_is_not_taken_for_torch(tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("import no_such_module")
    assert imports("bagua.torch_api", "pass", tmp_path) == "ModuleNotFoundError: No module named 'no_such_module'"
