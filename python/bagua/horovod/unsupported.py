"""Horovod's functions that this package lacks: each raises NotImplementedError that names what to use instead."""

from __future__ import annotations

from typing import Any, NoReturn

__all__ = ["elastic", "join", "run", "sparse_allreduce_async", "start_timeline", "stop_timeline"]


class _Elastic:
    """The module ``hvd.elastic``."""

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        raise NotImplementedError(
            f"hvd.elastic.{name} does not exist here: use bagua.torch_api.rebuild() after a rank is lost, or the "
            "elastic jobs of python -m bagua.distributed.run --keep-going"
        )


#: `horovod.torch.elastic` does not exist here: each of its names raises NotImplementedError.
elastic = _Elastic()


def run(*args: Any, **kwargs: Any) -> NoReturn:
    """NotImplementedError."""
    raise NotImplementedError(
        "hvd.run does not exist here: start the ranks of a script by torchrun --nproc-per-node N script.py, by mpirun "
        "or by srun; on several hosts also by baguarun"
    )


def join(device: int = -1) -> NoReturn:
    """NotImplementedError."""
    raise NotImplementedError(
        "hvd.join does not exist here: give every rank as many batches, as DistributedSampler does, or use the join() "
        "of torch's DistributedDataParallel"
    )


def sparse_allreduce_async(*args: Any, **kwargs: Any) -> NoReturn:
    """NotImplementedError."""
    raise NotImplementedError(
        "hvd.sparse_allreduce_async does not exist here: use allreduce of tensor.to_dense(), "
        "DistributedOptimizer(sparse_as_dense=True), or model.with_bagua of bagua.torch_api, which sends sparse "
        "gradients"
    )


def start_timeline(file_path: str, mark_cycles: bool = False) -> NoReturn:
    """NotImplementedError."""
    raise NotImplementedError(
        "the timeline does not exist here: use `bagua top` and bagua.stats() for times, and the flight recorder of "
        "`bagua trace` for the order of operations"
    )


def stop_timeline() -> NoReturn:
    """NotImplementedError."""
    start_timeline("")
