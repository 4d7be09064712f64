"""The check of the wheel finds what must not be in one."""

from __future__ import annotations

import subprocess
import zipfile
from pathlib import Path

import pytest

from tools import check_lengths, wheel

GOOD = "bagua-0.1.0-cp310-abi3-manylinux_2_17_x86_64.manylinux2014_x86_64.whl"
FILES = ("bagua/__init__.py", "bagua/py.typed", "bagua/_bagua.pyi", "bagua-0.1.0.dist-info/licenses/LICENSE")

ENTRIES = "bagua-0.1.0.dist-info/entry_points.txt"


def build(
    folder: Path, name: str = GOOD, without: str = "", extension: str = "bagua/_bagua.abi3.so", links: str = "-lgcc_s"
) -> Path:
    """A wheel with an extension that has no code."""
    path, library = folder / name, folder / "library.so"
    command = ["cc", "-shared", "-Wl,--no-as-needed", "-x", "c", "/dev/null", *links.split(), "-o", str(library)]
    subprocess.run(command, check=True, timeout=60)
    with zipfile.ZipFile(path, "w") as archive:
        if without != ENTRIES:
            archive.writestr(ENTRIES, f"[torch.distributed.backends]\n{wheel.BACKEND}\n")
        for file in FILES:
            if file != without:
                archive.writestr(file, "")
        archive.write(library, extension)
    return path


def test_a_wheel_with_everything_in_place_passes(tmp_path: Path) -> None:
    assert wheel.audit(build(tmp_path)) == []


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("bagua-0.1.0-cp311-cp311-manylinux_2_17_x86_64.whl", "not one wheel for every Python"),
        ("bagua-0.1.0-cp310-abi3-linux_x86_64.whl", "not for every Linux"),
        ("bagua-0.1.0-cp310-abi3-manylinux_2_36_x86_64.whl", "not for every Linux"),
    ],
)
def test_a_wheel_for_too_few_machines_is_refused(tmp_path: Path, name: str, complaint: str) -> None:
    assert any(complaint in problem for problem in wheel.audit(build(tmp_path, name)))


@pytest.mark.parametrize("file", FILES[:3])
def test_a_wheel_that_lacks_a_file_is_refused(tmp_path: Path, file: str) -> None:
    assert any(problem.endswith(f"lacks {file}") for problem in wheel.audit(build(tmp_path, without=file)))


def test_a_wheel_without_the_entry_point_of_torch_is_refused(tmp_path: Path) -> None:
    assert any("torch.distributed" in problem for problem in wheel.audit(build(tmp_path, without=ENTRIES)))


def test_a_wheel_with_a_foreign_library_is_refused(tmp_path: Path) -> None:
    assert any(
        "not bagua/_bagua.abi3.so alone" in problem
        for problem in wheel.audit(build(tmp_path, extension="bagua.libs/libtorch.so"))
    )


def test_a_wheel_with_an_unwinder_of_its_own_is_refused(tmp_path: Path) -> None:
    assert any("libgcc_s" in problem for problem in wheel.audit(build(tmp_path, links="-lm")))


def test_a_wheel_that_is_too_large_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wheel, "LIMIT_MIB", 0.001)
    assert any("more than 0.001" in problem for problem in wheel.audit(build(tmp_path)))


def test_a_file_that_is_too_long_is_named_with_its_length(tmp_path: Path) -> None:
    (tmp_path / "python").mkdir()
    (tmp_path / "python" / "long.py").write_text("pass\n" * 601)
    (tmp_path / "python" / "short.py").write_text("pass\n" * 600)
    assert check_lengths.too_long(tmp_path) == ["python/long.py: 601 lines"]
