"""Builds the wheel of a target, and checks a wheel as a user would meet it.

usage: tools/wheel.py build [TARGET]        builds it into dist/, for this machine without TARGET, and checks it
       tools/wheel.py check WHEEL           what its extension links, its files and its licences
       tools/wheel.py smoke WHEEL [PYTHON]  installs it, or an sdist, into an empty environment and runs two ranks there
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tools import smoke

ROOT = Path(__file__).resolve().parent.parent
PROGRAMS = Path(sys.executable).parent

#: In bytes. A larger wheel contains something by mistake, such as a library of another project.
LIMIT = 6 << 20


def here() -> str:
    """Returns the target of this machine, as rustc names it."""
    return f"{platform.machine()}-unknown-linux-{'gnu' if platform.libc_ver()[0] == 'glibc' else 'musl'}"


def build(target: str) -> Path:
    """Builds the wheel of a target into dist/. Raises CalledProcessError if that fails."""
    machine, _, _, libc = target.split("-")
    tag = "musllinux_1_2" if libc == "musl" else "manylinux_2_17"
    pattern = f"dist/bagua_rs-*{tag}_{machine}.whl"
    for old in ROOT.glob(pattern):
        old.unlink()
    environment = {**os.environ, "PATH": f"{PROGRAMS}:{os.environ['PATH']}"}
    if libc == "gnu":
        # Zig would link its own unwinder. glibc ends threads with the one in libgcc_s, which cannot read Zig's frames.
        # The libgcc_s of this machine needs a newer glibc than the wheel does; the loader finds the user's.
        compiler = "cc" if target == here() else f"{machine}-linux-gnu-gcc"
        unwinder = subprocess.check_output([compiler, "-print-file-name=libgcc_s.so.1"], text=True).strip()
        environment["RUSTFLAGS"] = f"-Clink-arg={unwinder} -Clink-arg=-Wl,--allow-shlib-undefined"
    command: list[str | Path] = [PROGRAMS / "maturin", "build", "--profile", "wheel", "--zig", "--strip"]
    command += ["--target", target, "--compatibility", tag, "--compression-level", "9", "--no-default-features"]
    subprocess.run([*command, "--out", "dist"], cwd=ROOT, env=environment, check=True)
    return next(ROOT.glob(pattern))


def check(wheel: Path) -> list[str]:
    """Returns what is wrong with a wheel."""
    problems = []
    *_, python, abi, tags = wheel.stem.split("-")
    if (python, abi) != ("cp310", "abi3"):
        problems.append(f"is tagged {python}-{abi}, not cp310-abi3 for every Python from 3.10 on")
    # The oldest system that has the symbols and libraries that the extension needs. It is "linux_MACHINE" if the
    # extension links libtorch, libpython, CUDA or another library that not every system has.
    audit = json.loads(subprocess.check_output([PROGRAMS / "auditwheel", "show", "--json", wheel]))
    needs = str(audit["overall_tag"])
    if not needs.startswith(("manylinux_2_17_", "musllinux_1_2_")) or needs not in tags.split("."):
        problems.append(f"is tagged {tags} and needs {needs}; it must need manylinux_2_17 or musllinux_1_2")
    if libraries := audit["external_libs"]:
        problems.append(f"links {', '.join(libraries)}")
    if wheel.stat().st_size > LIMIT:
        problems.append(f"has {wheel.stat().st_size} bytes, more than {LIMIT}")
    names = zipfile.ZipFile(wheel).namelist()
    for licence in ("LICENSE", "LICENSE-THIRD-PARTY.txt"):
        if not any(name.endswith(f".dist-info/licenses/{licence}") for name in names):
            problems.append(f"lacks {licence}")
    if subprocess.run([PROGRAMS / "check-wheel-contents", wheel], cwd=ROOT, check=False).returncode:
        problems.append("contains other files than python/bagua: see above")
    return [f"{wheel.name}: {problem}" for problem in problems]


def smoke_test(what: Path, python: str = sys.executable) -> list[str]:
    """Returns what went wrong when two ranks ran from an environment with nothing else."""
    with tempfile.TemporaryDirectory() as folder:
        inside = Path(folder) / "bin" / "python"
        subprocess.run([python, "-m", "venv", folder], check=True)
        subprocess.run([inside, "-m", "pip", "install", "--quiet", what.resolve()], check=True)
        return smoke.run(inside)


def main(arguments: list[str]) -> int:
    """Runs the command line."""
    match arguments:
        case ["build", *target] if len(target) < 2:
            wheel = build(*target or [here()])
            problems = [*check(wheel), *(smoke_test(wheel) if target in ([], [here()]) else [])]
            print(f"wheel: {wheel.relative_to(ROOT)}, {wheel.stat().st_size / 2**20:.1f} MiB")
        case ["check", wheel]:
            problems = check(Path(wheel).resolve())
        case ["smoke", what, *python] if len(python) < 2:
            problems = smoke_test(Path(what), *python)
        case _:
            print(__doc__, file=sys.stderr)
            return 2
    print("\n".join(problems) or f"{arguments[0]}: ok")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
