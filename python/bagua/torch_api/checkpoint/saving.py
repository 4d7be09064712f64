"""Saving: every file on the disk first, then the directory's name, then the tracker."""

from __future__ import annotations

import collections
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from .coordination import Coordinator
from .layout import (
    REPLACED,
    SAVING,
    ExpertKeys,
    directory,
    expert_file,
    model_file,
    optimizer_file,
    sync_directory,
    tracker_file,
)
from .weights import state_of

# What torch.load reads with weights_only=True, besides tensors and containers.
_SAFE = (bool, int, float, complex, str, bytes, type(None), torch.Size, torch.dtype, torch.device)


def save_checkpoint(
    iteration: int,
    checkpoints_path: str | os.PathLike[str],
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    lr_scheduler: Any = None,
) -> None:
    """Saves what a training job needs to go on, on a file system that all ranks share. All ranks call this.

    Rank 0 writes model, optimizer and scheduler; of a model with experts, each rank its experts and its optimizer. A
    crash at any moment, of any rank, leaves the checkpoint that was the newest before; also when the iteration was
    saved before and is replaced. Returns when everything is on the disk.

    TypeError, before anything is written, where a state holds what a safe load would refuse. An OSError of one rank is
    a BaguaError on the others.
    """
    if not isinstance(iteration, int) or isinstance(iteration, bool) or iteration < 0:
        raise ValueError(f"iteration must be an integer from 0 on, not {iteration!r}")
    ranks, path = Coordinator(), Path(checkpoints_path)
    final = directory(path, iteration)
    folder = final.with_name(final.name + SAVING)
    files: dict[Path, dict[str, Any]] = {}

    def collect() -> None:
        files.update(_contents(iteration, folder, model, optimizer, lr_scheduler, ranks.rank))
        for content in files.values():
            _require_safe(content, "")

    ranks.together("collect their state", collect)
    ranks.first_only("begin a checkpoint", lambda: _begin(path, final, folder))
    ranks.together("write a checkpoint", lambda: _write_all(files))
    ranks.first_only("finish a checkpoint", lambda: _finish(path, final, folder, iteration))


def _contents(
    iteration: int,
    folder: Path,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None,
    lr_scheduler: Any,
    rank: int,
) -> dict[Path, dict[str, Any]]:
    keys = ExpertKeys(model, rank)
    if not keys and rank != 0:
        return {}
    shared, experts = keys.split(state_of(model))
    whole: dict[str, Any] = {"iteration": iteration, "model": shared}
    if lr_scheduler is not None:
        whole["lr_scheduler"] = lr_scheduler.state_dict()
    files = {expert_file(folder, number, layer): state for (number, layer), state in experts.items()}
    if optimizer is not None:
        if keys:
            files[optimizer_file(folder, rank)] = {"optimizer": optimizer.state_dict()}
        else:
            whole["optimizer"] = optimizer.state_dict()
    if rank == 0:
        files[model_file(folder)] = whole
    return files


def _require_safe(value: Any, where: str) -> None:
    """Everything that is written must be whole, and readable again without running code from the file."""
    if hasattr(value, "placements") and hasattr(value, "to_local"):
        raise TypeError(
            f"{where} is a {type(value).__name__}, of which this rank has a part only: save sharded models with "
            "torch.distributed.checkpoint"
        )
    if isinstance(value, torch.Tensor) or type(value) in _SAFE:
        return
    if type(value) in (dict, collections.OrderedDict, collections.Counter, collections.defaultdict) or (
        isinstance(value, Mapping) and type(value).__module__ == "torch"
    ):
        for key, entry in value.items():
            _require_safe(key, f"{where}, key {key!r}")
            _require_safe(entry, f"{where}[{key!r}]")
    elif type(value) in (list, tuple, set):
        for i, entry in enumerate(value):
            _require_safe(entry, f"{where}[{i}]")
    else:
        raise TypeError(
            f"{where} is a {type(value).__module__}.{type(value).__qualname__}, which loading with weights_only=True "
            "refuses: a checkpoint holds tensors, numbers, strings and containers of them"
        )


def _begin(path: Path, final: Path, folder: Path) -> None:
    path.mkdir(parents=True, exist_ok=True)
    replaced = final.with_name(final.name + REPLACED)
    if replaced.exists():
        # A former run ended between two renames: before anything else, the complete one gets its name back.
        if final.exists():
            shutil.rmtree(replaced)
        else:
            replaced.rename(final)
    for rest in path.glob(f"*{SAVING}"):
        shutil.rmtree(rest)
    folder.mkdir()


def _write_all(files: Mapping[Path, dict[str, Any]]) -> None:
    for path, content in files.items():
        with open(path, "wb") as file:
            torch.save(content, file)
            file.flush()
            os.fsync(file.fileno())


def _finish(path: Path, final: Path, folder: Path, iteration: int) -> None:
    sync_directory(folder)
    replaced = final.with_name(final.name + REPLACED)
    if final.exists():
        final.rename(replaced)
    folder.rename(final)
    sync_directory(path)
    tracker = tracker_file(path)
    new = tracker.with_name(tracker.name + ".new")
    with open(new, "w", encoding="ascii") as file:
        file.write(str(iteration))
        file.flush()
        os.fsync(file.fileno())
    os.replace(new, tracker)
    sync_directory(path)
    if replaced.exists():
        shutil.rmtree(replaced)
