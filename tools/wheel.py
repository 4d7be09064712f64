"""Builds the wheel of a target, and checks a wheel as a user would meet it.

usage: tools/wheel.py build [TARGET]           builds it into dist/; for this machine without TARGET
       tools/wheel.py check [TARGET]           audits it, and runs it unless it is for another machine
       tools/wheel.py audit WHEEL              its tags, its size, what its extension links, licences and SBOM
       tools/wheel.py smoke WHEEL [PYTHON]     installs it into an empty environment and runs two ranks there
"""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tools import crates, description, elf, smoke

ROOT = Path(__file__).resolve().parent.parent
DIST = ROOT / "dist"

#: In bytes, of the wheel and of the extension in it. It holds no CUDA kernels and no libraries of others; a larger one
#: has taken something along by mistake.
LIMIT = 6 << 20

#: In its entry_points.txt.
BACKEND = "bagua=bagua.c10d:register"

#: The library whose unwinder glibc uses to end a thread. With another one, linked statically, that is a crash. musl
#: ends threads without.
UNWINDER = "libgcc_s.so.1"

EXTENSION = "bagua/_bagua.abi3.so"


class Target(NamedTuple):
    """What a wheel is built for."""

    #: As rustc names it.
    triple: str
    #: The tag of the wheel, without the processor.
    platform: str
    #: The processor, as tags and the kernel name it.
    machine: str

    @property
    def glibc(self) -> tuple[int, ...]:
        """The newest version of glibc's symbols that may be needed; empty for musl."""
        found = re.fullmatch(r"manylinux_(\d+)_(\d+)", self.platform)
        return (int(found[1]), int(found[2])) if found else ()


TARGETS = tuple(
    Target(triple, "musllinux_1_2" if triple.endswith("musl") else "manylinux_2_17", triple.split("-")[0])
    for triple in crates.TARGETS
)


def here() -> Target:
    """The target of this machine."""
    libc = "gnu" if platform.libc_ver()[0] == "glibc" else "musl"
    return by_triple(f"{platform.machine()}-unknown-linux-{libc}")


def by_triple(triple: str) -> Target:
    """The target with a name of rustc's. ValueError for one that no wheel is built for."""
    for target in TARGETS:
        if target.triple == triple:
            return target
    raise ValueError(f"no wheel is built for {triple}; for {', '.join(target.triple for target in TARGETS)}")


def unwinder(target: Target) -> str:
    """The file of libgcc_s for a target with glibc; "" where this machine has none."""
    compiler = "cc" if target.machine == platform.machine() else f"{target.machine}-linux-gnu-gcc"
    try:
        command = [compiler, f"-print-file-name={UNWINDER}"]
        found = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""
    return found if Path(found).is_absolute() else ""


def missing(target: Target) -> str:
    """What this machine needs first to build for a target; "" where nothing is missing."""
    command = [os.environ.get("RUSTC", "rustc"), "--print", "target-libdir", "--target", target.triple]
    libraries = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()
    if not Path(libraries).is_dir():
        return f"rustup target add {target.triple}"
    if target.glibc and not unwinder(target):
        return f"apt-get install gcc-{target.machine.replace('_', '-')}-linux-gnu, for {UNWINDER}"
    return ""


def built(target: Target) -> list[Path]:
    """The wheels of a target in dist/."""
    return list(DIST.glob(f"bagua_rs-*{target.platform}_{target.machine}*.whl"))


def build(target: Target) -> Path:
    """Builds the wheel of a target into dist/, instead of one that is there. CalledProcessError where that fails."""
    for old in built(target):
        old.unlink()
    folder = Path(sys.executable).parent
    environment = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"}
    if target.glibc:
        # Zig would link an unwinder of its own, and glibc ends threads by that of libgcc_s, which cannot read its
        # frames. The library of this machine asks for a newer glibc than the wheel does; the loader finds the user's.
        environment["RUSTFLAGS"] = f"-Clink-arg={unwinder(target)} -Clink-arg=-Wl,--allow-shlib-undefined"
    command: list[str | Path] = [folder / "maturin", "build", "--profile", "wheel", "--zig", "--strip", "--out", DIST]
    command += ["--target", target.triple, "--compatibility", target.platform, "--compression-level", "9"]
    command.append("--no-default-features")
    subprocess.run(command, cwd=ROOT, env=environment, check=True)
    (wheel,) = built(target)
    description.complete(wheel)
    return wheel


def target_of(wheel: Path) -> Target | None:
    """The target that a wheel's last tag names."""
    tags = wheel.stem.split("-")[-1].split(".")
    return next((one for one in TARGETS if f"{one.platform}_{one.machine}" in tags), None)


def audit(wheel: Path, linked: Iterable[crates.Crate] | None = None) -> list[str]:
    """What is wrong with the wheel; empty when nothing is.

    `linked` are the crates of its extension; those of Cargo.lock by default.
    """
    problems = []
    tags = wheel.stem.split("-")[2:]
    if len(tags) != 3 or tags[:2] != ["cp310", "abi3"]:
        problems.append(f"{wheel.name}: not one wheel for every Python from 3.10 on (cp310-abi3)")
    target = target_of(wheel)
    if target is None:
        known = ", ".join(f"{one.platform}_{one.machine}" for one in TARGETS)
        return [*problems, f"{wheel.name}: not for every Linux: its tag is none of {known}"]
    size = wheel.stat().st_size
    if size > LIMIT:
        problems.append(f"{wheel.name}: {mebibytes(size)}, more than {mebibytes(LIMIT)}")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        problems += [
            f"{wheel.name}: {one.filename} has {mebibytes(one.file_size)}, more than {mebibytes(LIMIT)}"
            for one in archive.infolist()
            if one.file_size > LIMIT
        ]
        extensions = [name for name in names if name.endswith(".so")]
        if extensions != [EXTENSION]:
            problems.append(f"{wheel.name}: its extensions are {extensions}, not {EXTENSION} alone")
        problems += [
            f"{wheel.name}: lacks {name}"
            for name in ("bagua/__init__.py", "bagua/py.typed", "bagua/_bagua.pyi")
            if name not in names
        ]
        entries = [archive.read(name).decode() for name in names if name.endswith(".dist-info/entry_points.txt")]
        if not any(BACKEND in text.splitlines() for text in entries):
            problems.append(f"{wheel.name}: lacks the entry point by which torch.distributed finds the backend")
        linked = crates.linked([target.triple]) if linked is None else list(linked)
        problems += [f"{wheel.name}: {problem}" for problem in papers(archive, linked)]
        with tempfile.TemporaryDirectory() as folder:
            for name in extensions:
                problems += [f"{name} {problem}" for problem in links(archive.extract(name, folder), target)]
    return problems


def mebibytes(size: int) -> str:
    """A number of bytes, as people read it."""
    return f"{size / 2**20:.2f} MiB"


def papers(archive: zipfile.ZipFile, linked: Iterable[crates.Crate]) -> list[str]:
    """What is missing of the licences and of the SBOM of a wheel whose extension has these crates."""
    linked = list(linked)
    names = archive.namelist()
    problems = []
    if not any(name.endswith("licenses/LICENSE") for name in names):
        problems.append("lacks the licence")
    of_others = {str(crate) for crate in crates.of_others(linked)}
    texts = [archive.read(name).decode() for name in names if name.endswith(f"licenses/{crates.LICENCES.name}")]
    given = set().union(*map(crates.named_in, texts))
    problems += [f"lacks the licence text of {crate}" for crate in sorted(of_others - given)]
    boms = [json.loads(archive.read(name)) for name in names if re.search(r"\.dist-info/sboms/.*\.json$", name)]
    if not boms:
        return [*problems, "lacks an SBOM"]
    listed = {f"{one['name']} {one['version']}" for bom in boms for one in components(bom)}
    problems += [f"its SBOM does not list {crate}" for crate in linked if str(crate) not in listed]
    return problems


def components(bom: dict[str, object]) -> list[dict[str, str]]:
    """The components of a CycloneDX document, the one that it describes included."""
    about: dict[str, object] = bom.get("metadata", {})  # type: ignore[assignment]
    own = about.get("component")
    return [*bom.get("components", []), *([own] if own else [])]  # type: ignore[list-item, misc]


def links(extension: str, target: Target) -> list[str]:
    """What an extension links or needs that a machine of the target need not have."""
    libraries = elf.needed(extension)
    problems = [f"links {library}" for library in elf.foreign(libraries)]
    if elf.machine(extension) != target.machine:
        problems.append(f"is for {elf.machine(extension)}, not {target.machine}")
    if target.glibc and UNWINDER not in libraries:
        problems.append(f"does not link {UNWINDER}: it has an unwinder of its own")
    if not target.glibc and UNWINDER in libraries:
        problems.append(f"links {UNWINDER}, which not every system with musl has")
    problems += [f"needs {symbol}" for symbol in elf.of_cuda(elf.undefined(extension))]
    needed = [version.removeprefix("GLIBC_") for version in elf.versions(extension) if version.startswith("GLIBC_")]
    newest = max((tuple(map(int, version.split("."))) for version in needed if version[0].isdigit()), default=())
    if newest > target.glibc:
        problems.append(f"needs glibc {'.'.join(map(str, newest))}, and its tag says {target.platform}")
    return problems


def install(what: Path, python: str, folder: Path) -> Path:
    """Makes an environment with one wheel or sdist and what it requires, and returns its interpreter."""
    inside = folder / "venv" / "bin" / "python"
    uv = Path(sys.executable).parent / "uv"
    if uv.exists():
        subprocess.run([uv, "venv", "--quiet", "--python", python, folder / "venv"], check=True)
        subprocess.run([uv, "pip", "install", "--quiet", "--python", inside, what.resolve()], check=True)
    else:
        subprocess.run([python, "-m", "venv", folder / "venv"], check=True)
        subprocess.run([inside, "-m", "pip", "install", "--quiet", what.resolve()], check=True)
    return inside


def smoke_test(what: Path, python: str = sys.executable) -> list[str]:
    """What went wrong when two ranks ran from an environment with nothing else; empty when nothing did."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            return smoke.run(install(what, python, Path(folder)))
        except subprocess.CalledProcessError as error:
            return [f"{what.name} could not be installed: exit status {error.returncode}"]


def success(wheel: Path, target: Target) -> str:
    """Returns what is said of a wheel without problems."""
    ran = "smoke test passed: pip install it" if target == here() else f"for {target.triple}, not run on this machine"
    return f"wheel: {wheel.parent.name}/{wheel.name}, {wheel.stat().st_size / 2**20:.1f} MiB, {ran}"


def main(arguments: list[str]) -> int:
    """Command line."""
    match arguments:
        case ["build", *triple] if len(triple) < 2:
            target = by_triple(*triple) if triple else here()
            if reason := missing(target):
                print(f"{target.triple} is not built: {reason}", file=sys.stderr)
                return 1
            build(target)
            problems = []
        case ["check", *triple] if len(triple) < 2:
            target = by_triple(*triple) if triple else here()
            (wheel,) = built(target)
            problems = [*audit(wheel), *(smoke_test(wheel) if target == here() else [])]
            if not problems:
                print(success(wheel, target))
        case ["audit", name]:
            problems = audit(Path(name))
            if not problems:
                print(f"{name}: {mebibytes(Path(name).stat().st_size)}, nothing wrong")
        case ["smoke", name, *python] if len(python) < 2:
            problems = smoke_test(Path(name), *python)
            if not problems:
                print(f"{name}: smoke test passed with {' '.join(python) or sys.executable}")
        case _:
            print(__doc__, file=sys.stderr)
            return 2
    for problem in problems:
        print(problem, file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
