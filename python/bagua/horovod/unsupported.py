"""Names of Horovod's API that Bagua does not support: calling one raises NotImplementedError with the alternative."""

from __future__ import annotations

from fnmatch import fnmatch
from typing import Any, NoReturn

#: Names, as patterns, and what to do instead. The first pattern that fits a name counts.
INSTEAD = (
    ("Adasum", "use op=hvd.Average"),
    ("SyncBatchNorm", "use bagua.torch_api.contrib.sync_batchnorm.SyncBatchNorm"),
    ("*reducescatter*", "use bagua.torch_api.reduce_scatter"),
    ("grouped_*", "call the function for each tensor; DistributedOptimizer puts gradients into few messages by itself"),
    ("sparse_allreduce_async", "use allreduce of tensor.to_dense(), or bagua.torch_api.with_bagua"),
    ("global_process_set", "every function uses all ranks: leave process_set out"),
    ("ProcessSet", "use bagua.torch_api.new_group(ranks), and the collectives of bagua.torch_api with it"),
    ("*_process_set*", "use bagua.torch_api.new_group(ranks), and the collectives of bagua.torch_api with it"),
    ("elastic", "use bagua.torch_api.rebuild() after a rank is lost, or python -m bagua.distributed.run --keep-going"),
    ("join", "give every rank the same number of batches (DistributedSampler does), or use torch's DDP and its join()"),
    ("run", "start the ranks with torchrun --nproc-per-node N script.py, mpirun, srun or baguarun"),
    ("*_timeline", "use `bagua top` and bagua.stats() for times, and `bagua trace` for the order of operations"),
    ("is_homogeneous", "compare hvd.allgather_object(hvd.local_size())"),
    ("*_built", "leave the question out: Bagua communicates by itself, and the answer is always False"),
    ("*_enabled", "leave the question out: Bagua communicates by itself, and the answer is always False"),
    ("mpi_threads_supported", "leave the question out: Bagua does not use MPI"),
)


class Unsupported:
    """A name of Horovod's API that raises NotImplementedError when it is called or when an attribute of it is read."""

    def __init__(self, name: str, instead: str) -> None:
        self._error = f"hvd.{name} is not supported: {instead}"

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(self._error)

    def __getattr__(self, name: str) -> NoReturn:
        # Tools such as copy and inspect ask every object for special attributes.
        if name.startswith("__"):
            raise AttributeError(name)
        raise NotImplementedError(self._error)


def find(name: str) -> Unsupported:
    """Returns the object for a name that Horovod has. Raises AttributeError for other names."""
    for pattern, instead in INSTEAD:
        if fnmatch(name, pattern):
            return Unsupported(name, instead)
    raise AttributeError(f"module 'bagua.horovod.torch' has no attribute {name!r}")
