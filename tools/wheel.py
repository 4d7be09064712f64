"""Checks a wheel as a user would meet it.

usage: tools/wheel.py audit WHEEL     its tags, its size, and what its extension links
       tools/wheel.py smoke WHEEL     installs it into an empty environment and runs two ranks there
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tools import elf

#: The wheel holds no CUDA kernels and no libraries of others; a larger one has taken something along by mistake.
LIMIT_MIB = 6
#: A job of two ranks on a loaded machine.
DEADLINE_S = 120

#: In its entry_points.txt.
BACKEND = "bagua=bagua.c10d:register"

#: Two ranks of the framework-neutral API, without torch.
PROGRAM = """
import sys
import numpy as np
import bagua

group = bagua.init()
x = np.arange(5, dtype=np.float32) + group.rank
bagua.all_reduce(x)
assert x.tolist() == [1.0, 3.0, 5.0, 7.0, 9.0], x
assert "torch" not in sys.modules
if group.rank == 0:
    print(f"bagua {bagua.__version__} from {bagua.__file__}: two ranks agree")
bagua.shutdown()
"""

#: Rank 0 ends while a callback computes: Python ends the callback's thread by unwinding its stack, through our frames.
ENDING = """
import contextlib
import numpy as np
import bagua

group = bagua.init()
other = group.new_group([0, 1])
if group.rank == 1:
    with contextlib.suppress(bagua.PeerLostError):
        group.recv(np.ones(1), 0)
else:
    def compute(error):
        while True:
            sum(range(1000))

    print("the exit names a callback that does not return:")
    other.barrier(async_op=True).then(compute)
"""

#: The library whose unwinder glibc uses to end a thread. With another one, linked statically, that is a crash.
UNWINDER = "libgcc_s.so.1"


def audit(wheel: Path) -> list[str]:
    """What is wrong with the wheel; empty when nothing is."""
    problems = []
    tags = wheel.stem.split("-")[2:]
    if len(tags) != 3 or tags[:2] != ["cp310", "abi3"]:
        problems.append(f"{wheel.name}: not one wheel for every Python from 3.10 on (cp310-abi3)")
    if "manylinux_2_17" not in tags[-1]:
        problems.append(f"{wheel.name}: not for every Linux with glibc 2.17 or newer (manylinux_2_17)")
    size = wheel.stat().st_size / 2**20
    if size > LIMIT_MIB:
        problems.append(f"{wheel.name}: {size:.1f} MiB, more than {LIMIT_MIB}")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        extensions = [name for name in names if name.endswith(".so")]
        if extensions != ["bagua/_bagua.abi3.so"]:
            problems.append(f"{wheel.name}: its extensions are {extensions}, not bagua/_bagua.abi3.so alone")
        problems += [
            f"{wheel.name}: lacks {name}"
            for name in ("bagua/__init__.py", "bagua/py.typed", "bagua/_bagua.pyi")
            if name not in names
        ]
        entries = [archive.read(name).decode() for name in names if name.endswith(".dist-info/entry_points.txt")]
        if not any(BACKEND in text.splitlines() for text in entries):
            problems.append(f"{wheel.name}: lacks the entry point by which torch.distributed finds the backend")
        if not any(name.endswith("LICENSE") for name in names):
            problems.append(f"{wheel.name}: lacks the licence")
        with tempfile.TemporaryDirectory() as folder:
            for name in extensions:
                extracted = archive.extract(name, folder)
                libraries = elf.needed(extracted)
                print(f"{name} links {', '.join(libraries)}")
                problems += [f"{name} links {library}" for library in elf.foreign(libraries)]
                if UNWINDER not in libraries:
                    problems.append(f"{name} does not link {UNWINDER}: it has an unwinder of its own")
                problems += [f"{name} needs {symbol}" for symbol in elf.of_cuda(elf.undefined(extracted))]
    print(f"{wheel.name}: {size:.2f} MiB")
    return problems


def smoke(wheel: Path) -> list[str]:
    """What went wrong when two ranks ran from an empty environment; empty when nothing did."""
    uv = Path(sys.executable).parent / "uv"
    with tempfile.TemporaryDirectory() as folder:
        python = Path(folder) / "venv" / "bin" / "python"
        subprocess.run([uv, "venv", "--quiet", "--python", sys.executable, python.parent.parent], check=True)
        subprocess.run([uv, "pip", "install", "--quiet", "--python", python, wheel.resolve()], check=True)
        return [problem for program in (PROGRAM, ENDING) for problem in two_ranks(python, program)]


def two_ranks(python: Path, program: str) -> list[str]:
    """What went wrong in a program that two ranks ran; empty when nothing did."""
    with tempfile.TemporaryDirectory() as folder:
        ranks = []
        for rank in range(2):
            environment = {name: os.environ[name] for name in ("HOME", "LANG", "PATH") if name in os.environ}
            environment |= {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2"}
            # A file in the folder instead of a port, so that no other process can take it.
            code = program.replace("bagua.init()", f"bagua.init(init_method='file://{folder}/rendezvous')")
            ranks.append(subprocess.Popen([python, "-c", code], cwd=folder, env=environment))
        problems = []
        for rank, process in enumerate(ranks):
            try:
                status = process.wait(DEADLINE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                problems.append(f"rank {rank} was not done after {DEADLINE_S} s")
                continue
            if status != 0:
                problems.append(f"rank {rank} exited with {status}")
        return problems


def main(arguments: list[str]) -> int:
    """Runs one of the two checks."""
    actions = {"audit": audit, "smoke": smoke}
    if len(arguments) != 2 or arguments[0] not in actions:
        print(__doc__, file=sys.stderr)
        return 2
    problems = actions[arguments[0]](Path(arguments[1]))
    for problem in problems:
        print(problem, file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
