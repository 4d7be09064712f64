"""The check of the wheel finds what must not be in one."""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import bagua
from tools import crates, elf, smoke, wheel

HERE = f"manylinux_2_17_{platform.machine()}"
GOOD = f"bagua_rs-0.1.0-cp310-abi3-{HERE}.manylinux2014_{platform.machine()}.whl"
INFO = "bagua_rs-0.1.0.dist-info"
FILES = ("bagua/__init__.py", "bagua/py.typed", "bagua/_bagua.pyi", f"{INFO}/licenses/LICENSE")
ENTRIES = f"{INFO}/entry_points.txt"
TEXTS = f"{INFO}/licenses/{crates.LICENCES.name}"
SBOM = f"{INFO}/sboms/bagua-py.cyclonedx.json"

#: What the extension of these wheels is said to be made of.
LINKED = [crates.Crate("bagua-core", "0.1.0", "MIT"), crates.Crate("half", "2.7.1", "MIT OR Apache-2.0")]


def audit(path: Path) -> list[str]:
    return wheel.audit(path, LINKED)


def build(
    folder: Path,
    name: str = GOOD,
    without: str = "",
    extension: str = wheel.EXTENSION,
    links: str = "-lgcc_s",
    code: str = "",
    listed: tuple[str, ...] = ("bagua-core 0.1.0", "half 2.7.1"),
    texts: str = "half 2.7.1 (MIT OR Apache-2.0)\n",
) -> Path:
    """A wheel with an extension of a line of C."""
    path, library, source = folder / name, folder / "library.so", folder / "source.c"
    source.write_text(code)
    command = ["cc", "-shared", "-fPIC", "-Wl,--no-as-needed", str(source), *links.split(), "-o", str(library)]
    subprocess.run(command, check=True, timeout=60)
    bom = {
        "metadata": {"component": {"name": "bagua-py", "version": "0.1.0"}},
        "components": [dict(zip(("name", "version"), one.split(), strict=True)) for one in listed],
    }
    contents = {
        ENTRIES: f"[torch.distributed.backends]\n{wheel.BACKEND}\n",
        TEXTS: texts,
        SBOM: json.dumps(bom),
        **dict.fromkeys(FILES, ""),
    }
    with zipfile.ZipFile(path, "w") as archive:
        for file, text in contents.items():
            if file != without:
                archive.writestr(file, text)
        archive.write(library, extension)
    return path


def test_a_wheel_with_everything_in_place_passes(tmp_path: Path) -> None:
    assert audit(build(tmp_path)) == []


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        (f"bagua_rs-0.1.0-cp311-cp311-{HERE}.whl", "not one wheel for every Python"),
        (f"bagua_rs-0.1.0-cp310-abi3-linux_{platform.machine()}.whl", "not for every Linux"),
        ("bagua_rs-0.1.0-cp310-abi3-manylinux_2_36_x86_64.whl", "not for every Linux"),
        ("bagua_rs-0.1.0-cp310-abi3-musllinux_1_1_x86_64.whl", "not for every Linux"),
    ],
)
def test_a_wheel_for_too_few_machines_is_refused(tmp_path: Path, name: str, complaint: str) -> None:
    assert any(complaint in problem for problem in audit(build(tmp_path, name)))


def test_an_extension_for_another_processor_than_the_tag_says_is_refused(tmp_path: Path) -> None:
    other = next(one for one in wheel.TARGETS if one.machine != platform.machine() and one.glibc)
    path = build(tmp_path, f"bagua_rs-0.1.0-cp310-abi3-{other.platform}_{other.machine}.whl")
    assert any(f"is for {platform.machine()}, not {other.machine}" in problem for problem in audit(path))


def test_an_extension_that_needs_a_newer_glibc_than_the_tag_says_is_refused(tmp_path: Path) -> None:
    # getrandom is in glibc since 2.25.
    code = "#include <sys/random.h>\nlong f(void) { char x; return getrandom(&x, 1, 0); }"
    assert any("needs glibc 2.25, and its tag says manylinux_2_17" in one for one in audit(build(tmp_path, code=code)))


def test_an_extension_for_musl_that_needs_glibc_is_refused(tmp_path: Path) -> None:
    path = build(tmp_path, f"bagua_rs-0.1.0-cp310-abi3-musllinux_1_2_{platform.machine()}.whl", code="int main(void);")
    problems = audit(path)
    assert any("its tag says musllinux_1_2" in problem for problem in problems), problems
    assert any("not every system with musl" in problem for problem in problems), problems


def test_the_versions_of_symbols_that_a_library_needs_are_found(tmp_path: Path) -> None:
    build(tmp_path, code="#include <sys/random.h>\nlong f(void) { char x; return getrandom(&x, 1, 0); }")
    assert "GLIBC_2.25" in elf.versions(tmp_path / "library.so")
    assert elf.machine(tmp_path / "library.so") == platform.machine()


@pytest.mark.parametrize("file", FILES[:3])
def test_a_wheel_that_lacks_a_file_is_refused(tmp_path: Path, file: str) -> None:
    assert any(problem.endswith(f"lacks {file}") for problem in audit(build(tmp_path, without=file)))


@pytest.mark.parametrize(
    ("file", "complaint"),
    [
        (ENTRIES, "lacks the entry point by which torch.distributed finds the backend"),
        (FILES[3], "lacks the licence"),
        (TEXTS, "lacks the licence text of half 2.7.1"),
        (SBOM, "lacks an SBOM"),
    ],
)
def test_a_wheel_without_its_papers_is_refused(tmp_path: Path, file: str, complaint: str) -> None:
    assert [problem.removeprefix(f"{GOOD}: ") for problem in audit(build(tmp_path, without=file))] == [complaint]


def test_every_linked_crate_is_in_the_sbom_and_in_the_licence_texts(tmp_path: Path) -> None:
    problems = audit(build(tmp_path, listed=("half 2.7.0",), texts="half 2.7.0 (MIT OR Apache-2.0)\n"))
    assert [problem.removeprefix(f"{GOOD}: ") for problem in problems] == [
        "lacks the licence text of half 2.7.1",
        "its SBOM does not list bagua-core 0.1.0",
        "its SBOM does not list half 2.7.1",
    ]


def test_a_wheel_with_a_foreign_library_is_refused(tmp_path: Path) -> None:
    assert any(
        f"not {wheel.EXTENSION} alone" in problem
        for problem in audit(build(tmp_path, extension="bagua.libs/libtorch.so"))
    )


def test_a_wheel_with_an_unwinder_of_its_own_is_refused(tmp_path: Path) -> None:
    assert any("libgcc_s" in problem for problem in audit(build(tmp_path, links="-lm")))


def test_a_wheel_that_is_too_large_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wheel, "LIMIT", 1000)
    problems = audit(build(tmp_path))
    assert any(re.match(re.escape(GOOD) + r": 0\.\d\d MiB, more than 0\.00 MiB", problem) for problem in problems), (
        problems
    )
    assert any(f"{wheel.EXTENSION} has 0." in problem for problem in problems), problems


@pytest.mark.parametrize("is_here", [True, False])
def test_the_check_ends_with_the_wheel_and_what_to_do_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], is_here: bool
) -> None:
    target = wheel.here() if is_here else next(one for one in wheel.TARGETS if one.machine != platform.machine())
    name = f"bagua_rs-0.1.0-cp310-abi3-{target.platform}_{target.machine}.whl"
    (tmp_path / name).write_bytes(bytes(13 << 18))
    monkeypatch.setattr(wheel, "DIST", tmp_path)
    found: list[str] = []
    monkeypatch.setattr(wheel, "audit", lambda _: found)
    monkeypatch.setattr(wheel, "smoke_test", lambda _: [])
    assert wheel.main(["check", target.triple]) == 0
    end = "smoke test passed: pip install it" if is_here else f"for {target.triple}, not run on this machine"
    assert capsys.readouterr() == (f"wheel: {tmp_path.name}/{name}, 3.2 MiB, {end}\n", "")
    found.append("a problem")
    assert wheel.main(["check", target.triple]) == 1
    assert capsys.readouterr() == ("", "a problem\n")


def test_no_wheel_is_built_for_a_target_that_is_not_known() -> None:
    with pytest.raises(ValueError, match="no wheel is built for riscv64gc-unknown-linux-gnu"):
        wheel.by_triple("riscv64gc-unknown-linux-gnu")


def test_what_a_target_needs_before_it_can_be_built_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rustc = tmp_path / "rustc"
    rustc.write_text(f"#!/bin/sh\necho {tmp_path}/absent\n")
    rustc.chmod(0o755)
    monkeypatch.setenv("RUSTC", str(rustc))
    for target in wheel.TARGETS:
        assert wheel.missing(target) == f"rustup target add {target.triple}"


@pytest.mark.slow
def test_the_smoke_test_passes_with_the_package_of_this_environment() -> None:
    importable = subprocess.run(
        [sys.executable, "-c", "import bagua"], env={"PATH": os.environ["PATH"]}, timeout=60, check=False, cwd="/"
    )
    if importable.returncode != 0:
        pytest.skip("bagua is not installed in this environment, only on the path of the tests: make setup")
    assert smoke.run(Path(sys.executable)) == []


@pytest.mark.parametrize(
    ("code", "statuses", "problems"),
    [
        ("sys.exit(0)", (0, 0), []),
        ("sys.exit(3 * rank)", (0, 3), []),
        ("sys.exit(3 * rank)", (0, 0), ["rank 1 exited with 3: "]),
        (
            "sys.exit('no such rank')",
            (0, 0),
            ["rank 0 exited with 1: no such rank\n", "rank 1 exited with 1: no such rank\n"],
        ),
    ],
)
def test_a_smoke_program_whose_rank_ends_otherwise_than_expected_is_a_problem(
    monkeypatch: pytest.MonkeyPatch, code: str, statuses: tuple[int, int], problems: list[str]
) -> None:
    # Without the imports, which need an installed package.
    monkeypatch.setattr(smoke, "_BEGINNING", "import os, sys\nrank = int(os.environ['RANK'])\n")
    assert smoke.two_ranks(Path(sys.executable), smoke.Program("a program", code, statuses=statuses)) == problems


def test_the_smoke_test_raises_every_error_of_communication() -> None:
    without_a_device = set(bagua.errors.__all__) - {"BaguaError", "DeviceError"}
    assert without_a_device <= {program.name for program in smoke.PROGRAMS}
