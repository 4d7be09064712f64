"""Finds this process's rank in the variables of its launcher: torchrun, PyTorchJob, Slurm, OpenMPI, MPICH or Intel MPI.

`bagua.init`, `init_process_group` and `bagua.torch_api.env` all ask here. Arguments take precedence, then RANK and
WORLD_SIZE, then a Slurm step, then OpenMPI, then MPICH and Intel MPI. The first one that is recognised is used.
MASTER_ADDR and MASTER_PORT take precedence over a derived address.

Sources: the output environment variables of srun(1), the OMPI_* variables of OpenMPI's mpirun(1), the PMI_* variables
of Hydra. The port of a Slurm job is computed as in Lightning, so that both agree; that of an OpenMPI job is in the same
range.
"""

from __future__ import annotations

import re
import socket
import time
import zlib
from dataclasses import dataclass

from bagua import config
from bagua.errors import BaguaError

__all__ = [
    "Found",
    "RankInfo",
    "found",
    "known_master",
    "local_rank_of",
    "master",
    "place",
    "require_name",
    "unresolved",
]


@dataclass(frozen=True)
class _Variables:
    """The variables by which a launcher passes a process its rank; None for a value that it does not pass."""

    rank: str
    world_size: str
    local_rank: str | None = None
    local_world_size: str | None = None
    node_rank: str | None = None


_ENVIRONMENT = _Variables("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK")

# Launchers in order of precedence: name, a variable that only its ranks have, and the variables to read.
_LAUNCHERS = (
    # Not SLURM_JOB_ID, because the batch script has it too, and the batch script is not a rank.
    (
        "slurm",
        "SLURM_STEP_ID",
        _Variables("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", None, "SLURM_NODEID"),
    ),
    (
        "openmpi",
        "OMPI_COMM_WORLD_RANK",
        _Variables(
            "OMPI_COMM_WORLD_RANK",
            "OMPI_COMM_WORLD_SIZE",
            "OMPI_COMM_WORLD_LOCAL_RANK",
            "OMPI_COMM_WORLD_LOCAL_SIZE",
        ),
    ),
    ("mpich", "PMI_RANK", _Variables("PMI_RANK", "PMI_SIZE")),
)

# How to pass the address of rank 0, for error texts.
_HOW = {
    "slurm": "set it before srun, as in MASTER_ADDR=host0 MASTER_PORT=29500 srun ...",
    "openmpi": "pass it to every rank, as in mpirun -x MASTER_ADDR=host0 -x MASTER_PORT=29500 ...",
    "mpich": "pass it to every rank, as in mpiexec -genv MASTER_ADDR host0 -genv MASTER_PORT 29500 ...",
}
# Seconds between two attempts to resolve a name.
_PAUSE = 0.5

_HOW_ELSE = "start the ranks with a launcher such as torchrun, set it"


@dataclass(frozen=True)
class Found:
    """The rank as the environment gives it, unchecked. A field is None if the environment does not set it."""

    #: "torchrun", "environment" (RANK and WORLD_SIZE), "slurm", "openmpi", "mpich", or "none".
    name: str
    rank: int | None = None
    world_size: int | None = None
    local_rank: int | None = None
    local_world_size: int | None = None
    node_rank: int | None = None
    #: Names of the variables for rank and world size, whether set or not.
    variables: tuple[str, str] = ("RANK", "WORLD_SIZE")


@dataclass(frozen=True)
class RankInfo:
    """The rank of this process in its job and on its host."""

    rank: int
    world_size: int
    #: The local rank; None if the launcher does not say. The joined group then counts the ranks on its host.
    local_rank: int | None
    local_world_size: int | None


def found() -> Found:
    """Returns what the launcher says about this process. Raises ValueError naming a variable that is not an integer."""
    if config.text("RANK") is not None or config.text("WORLD_SIZE") is not None:
        name = "environment" if config.text("TORCHELASTIC_RUN_ID") is None else "torchrun"
        return _read(name, _ENVIRONMENT)
    for name, mark, variables in _LAUNCHERS:
        if config.text(mark) is not None:
            return _read(name, variables)
    return _read("none", _ENVIRONMENT)


def place(
    rank: int | None = None,
    world_size: int | None = None,
    local_rank: int | None = None,
    local_world_size: int | None = None,
) -> RankInfo:
    """Returns this process's rank: from the arguments, then from the launcher, else as the only rank of a world of one.

    Raises BaguaError if only one of rank and world size is known, and ValueError for a rank outside its world.
    """
    launcher = found()
    found_rank = launcher.rank if rank is None else rank
    found_size = launcher.world_size if world_size is None else world_size
    if found_rank is None and found_size in (None, 1):
        found_rank, found_size = 0, 1
    if found_rank is None or found_size is None:
        what = "rank" if found_rank is None else "world_size"
        variable = launcher.variables[0 if found_rank is None else 1]
        raise BaguaError(
            f"{what} ({variable}) is not set: pass both rank and world_size, or use a launcher such as torchrun"
        )
    if found_size < 1:
        raise ValueError(f"world size {found_size} is not positive")
    if not 0 <= found_rank < found_size:
        raise ValueError(f"rank {found_rank} is not in a world of {found_size} ranks")
    # With explicit ranks, the launcher's variables may describe another world.
    if rank is None and world_size is None:
        local_rank = launcher.local_rank if local_rank is None else local_rank
        local_world_size = launcher.local_world_size if local_world_size is None else local_world_size
    return RankInfo(found_rank, found_size, local_rank, local_world_size)


def local_rank_of(rank: int, world_size: int) -> int | None:
    """Returns the local rank that the launcher gave to this rank; None if it started another rank or says nothing."""
    try:
        started = found()
    except ValueError:
        return None
    return started.local_rank if (started.rank, started.world_size) == (rank, world_size) else None


def known_master() -> tuple[str | None, int | None]:
    """Returns the host and port of rank 0, from the environment or a Slurm or OpenMPI job; None if unknown."""
    host = config.text("MASTER_ADDR")
    port = None if config.text("MASTER_PORT") is None else config.integer("MASTER_PORT", 0, 0, 65535)
    # Do this even if RANK is set: init_process_group sets it, and may be called again.
    if config.text("SLURM_STEP_ID") is not None:
        nodes, job = config.text("SLURM_STEP_NODELIST"), config.text("SLURM_JOB_ID")
        if host is None and nodes is not None:
            try:
                host = _first_host(nodes)
            except ValueError as error:
                raise ValueError(f"SLURM_STEP_NODELIST: {error}") from None
        if port is None and job is not None:
            if not (job.isascii() and job.isdigit()):
                raise ValueError(f"SLURM_JOB_ID={job!r} is not an integer")
            port = 15000 + int(job[-4:])
    # This id is equal on all ranks of one mpirun.
    mpi_job = config.text("PMIX_NAMESPACE") or config.text("OMPI_MCA_ess_base_jobid")
    if port is None and mpi_job is not None and config.text("OMPI_COMM_WORLD_RANK") is not None:
        port = 15000 + zlib.crc32(mpi_job.encode()) % 10000
    return host, port


def master() -> tuple[str, int]:
    """Returns the host and port of rank 0. Raises BaguaError that says how to pass them if one is missing."""
    host, port = known_master()
    launcher = found()
    # Default to this host, unless the launcher may have started ranks on several hosts without passing an address.
    one_host = launcher.local_world_size is not None and launcher.local_world_size == launcher.world_size
    if host is None and (one_host or launcher.name not in _HOW):
        host = "127.0.0.1"
    if host is None or port is None:
        missing = "MASTER_ADDR" if host is None else "MASTER_PORT"
        if config.text("BAGUA_ELASTIC") is not None:
            raise BaguaError(
                f"{missing} is not set, because this is an elastic job (BAGUA_ELASTIC): join it by "
                "bagua.torch_api.init_process_group, or start the ranks without --keep-going"
            )
        how = _HOW.get(launcher.name, _HOW_ELSE)
        raise BaguaError(f"{missing} is not set: {how}, or give bagua.init an init_method")
    return host, port


def unresolved(host: str) -> str:
    """Returns why a host name cannot be resolved; "" if it can."""
    try:
        socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        return getattr(error, "strerror", None) or str(error)
    return ""


def require_name(host: str, what: str, limit: float, *, given_by: str = "MASTER_ADDR") -> None:
    """Raises BaguaError if rank 0's host name cannot be resolved; `what` is the function that the user called.

    Raises at once, because a misspelt name stays wrong. In a Kubernetes pod, raises after `limit` seconds: the name of
    another pod exists only once that pod has an address.
    """
    until = time.monotonic() + limit
    while why := unresolved(host):
        if config.text("KUBERNETES_SERVICE_HOST") is None or time.monotonic() >= until:
            raise BaguaError(
                f"{what}: cannot resolve {host!r}, the host of rank 0: {why}; give {given_by} a name or an address "
                "that this host can look up"
            )
        time.sleep(_PAUSE)


def _first_host(nodes: str) -> str:
    """Returns the first host of a Slurm node list: "rack1n08" of "rack[1-2]n[08-10,12],login".

    Raises ValueError for anything but a node list.
    """
    first = re.match(r"(?:[^\[\],\s]|\[[0-9][0-9,-]*\])+(?=,|$)", nodes)
    if first is None:
        raise ValueError(f"{nodes!r} is not a list of host names")
    return re.sub(r"\[([0-9]+)[^\]]*\]", r"\1", first[0])


def _read(name: str, variables: _Variables) -> Found:
    def integer(*names: str | None) -> int | None:
        return next((config.integer(name, 0) for name in names if name and config.text(name) is not None), None)

    # GROUP_RANK is the host's number only if torchrun has set all of its variables.
    torchrun = all(config.text(name) is not None for name in ("RANK", "GROUP_RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE"))
    local_rank = integer("LOCAL_RANK", variables.local_rank)
    local_world_size = integer("LOCAL_WORLD_SIZE", variables.local_world_size)
    return Found(
        name,
        integer(variables.rank),
        integer(variables.world_size),
        # A host with one rank, such as a pod, has only one local rank.
        0 if local_rank is None and local_world_size == 1 else local_rank,
        local_world_size,
        integer("GROUP_RANK" if torchrun else None, "NODE_RANK", variables.node_rank),
        (variables.rank, variables.world_size),
    )
