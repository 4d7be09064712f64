"""Batch normalisation over the batches of all ranks, with Horovod's arguments."""

from __future__ import annotations

import torch

from bagua.torch_api.contrib.sync_batchnorm import Group
from bagua.torch_api.contrib.sync_batchnorm import SyncBatchNorm as _SyncBatchNorm

from .process_sets import ProcessSet, global_process_set

__all__ = ["SyncBatchNorm"]


class SyncBatchNorm(_SyncBatchNorm):
    """Batch normalisation whose statistics in training are those of all ranks of ``process_set`` together.

    See :class:`bagua.torch_api.contrib.sync_batchnorm.SyncBatchNorm`. ValueError for a process set that is not
    registered.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_set: ProcessSet = global_process_set,
        *,
        process_group: Group = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        if process_set is not global_process_set:
            if process_group is not None:
                raise ValueError("process_set and process_group say the same: give one of them")
            process_group = process_set.group()
        super().__init__(
            num_features,
            eps,
            momentum,
            affine,
            track_running_stats,
            process_group=process_group,
            device=device,
            dtype=dtype,
        )
