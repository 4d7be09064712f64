"""Joining and leaving the job, and this process's place in it."""

from __future__ import annotations

from typing import Any

from bagua.torch_api import communication

from . import global_state

__all__ = [
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "gloo_built",
    "gloo_enabled",
    "init",
    "is_homogeneous",
    "is_initialized",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "rank",
    "rocm_built",
    "shutdown",
    "size",
]


def init(comm: Any = None, process_sets: Any = None) -> None:
    """Joins the job, as ``bagua.torch_api.init_process_group`` does, or adopts an existing default process group.

    Has no effect if called again. Raises NotImplementedError for ``comm`` and for ``process_sets``.
    """
    if comm is not None or process_sets is not None:
        raise NotImplementedError(
            "hvd.init takes neither comm nor process_sets: for a part of the ranks use bagua.torch_api.new_group(ranks)"
        )
    if global_state.is_begun():
        return
    joined = not communication.is_initialized()
    if joined:
        communication.init_process_group()
    global_state.begin(joined)


def shutdown() -> None:
    """Leaves the job if :func:`init` joined it. May be called twice."""
    global_state.end()


def is_initialized() -> bool:
    """True between :func:`init` and :func:`shutdown`."""
    return global_state.is_begun()


def rank() -> int:
    """This process's rank in the job. ValueError before :func:`init`, here and below."""
    return global_state.world().rank()


def size() -> int:
    """The number of ranks in the job."""
    return global_state.world().nranks()


def local_rank() -> int:
    """This process's rank on its host."""
    return global_state.world().group.local_rank


def local_size() -> int:
    """The number of ranks on this host."""
    return global_state.world().group.local_world_size


def _across() -> list[int]:
    """The hosts that have a rank of this local rank."""
    local = local_rank()
    return [number for number, host in enumerate(global_state.world().raw.hosts) if len(host) > local]


def cross_rank() -> int:
    """This host's place among those that have a rank of the same local rank."""
    mine = next(number for number, host in enumerate(global_state.world().raw.hosts) if rank() in host)
    return _across().index(mine)


def cross_size() -> int:
    """How many hosts have a rank of the same local rank."""
    return len(_across())


def is_homogeneous() -> bool:
    """Whether every host has as many ranks."""
    return len({len(host) for host in global_state.world().raw.hosts}) == 1


def _false() -> bool:
    """False: communication is Bagua's own, and uses none of these libraries."""
    return False


mpi_built = mpi_enabled = mpi_threads_supported = gloo_built = gloo_enabled = _false
nccl_built = ddl_built = ccl_built = cuda_built = rocm_built = _false
