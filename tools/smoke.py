"""Programs that two ranks of an installed wheel must be able to run, each in processes of its own."""

from __future__ import annotations

import os
import subprocess
import tempfile
from pathlib import Path
from typing import NamedTuple

#: A job of two ranks on a loaded machine.
DEADLINE_S = 120

#: Every program begins so.
_BEGINNING = """
import contextlib, os, sys
import numpy as np
import bagua

rank = int(os.environ["RANK"])

@contextlib.contextmanager
def raises(kind):
    try:
        yield
    except kind:
        pass
    else:
        raise SystemExit(f"rank {rank}: no {kind.__name__}")
    bagua.shutdown()
"""

#: Two ranks of the framework-neutral API, without torch. TRANSPORT is what they must have met by.
_ALL_REDUCE = """
group = bagua.init()
x = np.arange(5, dtype=np.float32) + group.rank
bagua.all_reduce(x)
assert x.tolist() == [1.0, 3.0, 5.0, 7.0, 9.0], x
large = np.full(1 << 20, group.rank + 1, dtype=np.float32)
bagua.all_reduce(large)
assert (large == 3).all(), large
assert "torch" not in sys.modules
used = bagua.stats()["groups"]["world"]["transports"][1 - rank]
assert used == os.environ["EXPECTED_TRANSPORT"], used
bagua.shutdown()
"""

#: Rank 0 ends while a callback computes: Python ends the callback's thread by unwinding its stack, through our frames.
_ENDING = """
group = bagua.init()
other = group.new_group([0, 1])
if rank == 1:
    with contextlib.suppress(bagua.PeerLostError):
        group.recv(np.ones(1), 0)
else:
    def compute(error):
        while True:
            sum(range(1000))

    other.barrier(async_op=True).then(compute)
"""

_LOST = """
group = bagua.init()
if rank == 1:
    os._exit(0)
with raises(bagua.PeerLostError):
    group.barrier()
"""

_TIMEOUT = """
group = bagua.init()
if rank == 0:
    with raises(bagua.BaguaTimeoutError):
        group.barrier(timeout=1)
else:
    # Returns when rank 0 has given up.
    with contextlib.suppress(bagua.BaguaError):
        group.recv(np.ones(1), 0)
"""

_RAISED = """
group = bagua.init()
if rank == 1:
    raise LookupError("a sample is missing")
with raises(bagua.PeerRaisedError):
    group.barrier()
"""

_MISMATCH = """
group = bagua.init()
with raises(bagua.MismatchError):
    group.all_reduce(np.ones(3 + rank, dtype=np.float32))
"""

_ABORTED = """
group = bagua.init()
with raises(bagua.AbortedError):
    group.abort("by the smoke test")
    group.barrier()
"""


class Program(NamedTuple):
    """A program of two ranks."""

    name: str
    code: str
    #: BAGUA_TRANSPORT.
    transport: str = "auto"
    #: What the ranks must have used, where the program looks.
    expected: str = ""
    #: The exit status of each rank.
    statuses: tuple[int, int] = (0, 0)


PROGRAMS = (
    Program("all_reduce by shared memory", _ALL_REDUCE, expected="shm"),
    Program("all_reduce by TCP", _ALL_REDUCE, "tcp", expected="tcp"),
    Program("an exit during a callback", _ENDING),
    Program("PeerLostError", _LOST),
    Program("BaguaTimeoutError", _TIMEOUT),
    Program("PeerRaisedError", _RAISED, statuses=(0, 1)),
    Program("MismatchError", _MISMATCH),
    Program("AbortedError", _ABORTED),
)


def run(python: Path) -> list[str]:
    """Runs every program with an interpreter that has the wheel; what went wrong, empty when nothing did."""
    return [f"{program.name}: {problem}" for program in PROGRAMS for problem in two_ranks(python, program)]


def two_ranks(python: Path, program: Program) -> list[str]:
    """Returns the problems of a program on two ranks. Empty if there are none."""
    with tempfile.TemporaryDirectory() as folder:
        # A file in the folder instead of a port, so that no other process can take it.
        code = _BEGINNING + program.code.replace("bagua.init(", f"bagua.init(init_method='file://{folder}/rendezvous'")
        ranks = []
        for rank in range(2):
            environment = {name: os.environ[name] for name in ("HOME", "LANG", "PATH") if name in os.environ}
            environment |= {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2"}
            environment |= {"BAGUA_TRANSPORT": program.transport, "EXPECTED_TRANSPORT": program.expected}
            environment |= {"BAGUA_TRACE_DIR": folder}
            ranks.append(subprocess.Popen([python, "-c", code], cwd=folder, env=environment, stderr=subprocess.PIPE))
        problems = []
        for rank, (process, status) in enumerate(zip(ranks, program.statuses, strict=True)):
            try:
                _, error = process.communicate(timeout=DEADLINE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.communicate()
                problems.append(f"rank {rank} was not done after {DEADLINE_S} s")
                continue
            if process.returncode != status:
                problems.append(f"rank {rank} exited with {process.returncode}: {error.decode(errors='replace')}")
        return problems
