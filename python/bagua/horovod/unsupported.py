"""Names of Horovod's API that Bagua does not support: using one raises NotImplementedError with the alternative."""

from __future__ import annotations

from typing import Any, NoReturn

__all__ = ["find"]

_GROUPS = "for a part of the ranks use bagua.torch_api.new_group(ranks), and the collectives of bagua.torch_api with it"
_GROUPED = "call the function for each tensor; DistributedOptimizer puts gradients into few messages by itself"
_SCATTER = "use bagua.torch_api.reduce_scatter"
_TIMELINE = "use `bagua top` and bagua.stats() for times, and `bagua trace` for the order of operations"

#: Name -> what to do instead.
UNSUPPORTED = {
    "ProcessSet": _GROUPS,
    "SyncBatchNorm": "use bagua.torch_api.contrib.sync_batchnorm.SyncBatchNorm",
    "add_process_set": _GROUPS,
    "elastic": "use bagua.torch_api.rebuild() after a rank is lost, or python -m bagua.distributed.run --keep-going",
    "global_process_set": "every function uses all ranks: leave process_set out",
    "grouped_allgather": _GROUPED,
    "grouped_allgather_async": _GROUPED,
    "grouped_allreduce": _GROUPED,
    "grouped_allreduce_": _GROUPED,
    "grouped_allreduce_async": _GROUPED,
    "grouped_allreduce_async_": _GROUPED,
    "grouped_reducescatter": _SCATTER,
    "grouped_reducescatter_async": _SCATTER,
    "join": "give every rank the same number of batches (DistributedSampler does), or use torch's DDP and its join()",
    "reducescatter": _SCATTER,
    "reducescatter_async": _SCATTER,
    "remove_process_set": _GROUPS,
    "run": "start the ranks with torchrun --nproc-per-node N script.py, mpirun, srun or baguarun",
    "sparse_allreduce_async": "use allreduce of tensor.to_dense(), or bagua.torch_api.with_bagua",
    "start_timeline": _TIMELINE,
    "stop_timeline": _TIMELINE,
}


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
    """Returns the object for a name in `UNSUPPORTED`. Raises AttributeError for other names."""
    if name not in UNSUPPORTED:
        raise AttributeError(f"module 'bagua.horovod.torch' has no attribute {name!r}")
    return Unsupported(name, UNSUPPORTED[name])
