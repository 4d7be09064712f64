"""Saves a checkpoint: first all files, then the directory's final name, then the tracker."""

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

# Types that torch.load reads with weights_only=True, in addition to tensors and containers.
_SAFE = (bool, int, float, complex, str, bytes, type(None), torch.Size, torch.dtype, torch.device)


def save_checkpoint(
    iteration: int,
    checkpoints_path: str | os.PathLike[str],
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    lr_scheduler: Any = None,
) -> None:
    """Saves the state that a training job needs to continue. All ranks call this function.

    Rank 0 writes model, optimizer and scheduler. If the model has experts, each rank writes its experts and its
    optimizer. If a rank crashes at any moment, the newest checkpoint is still the one from before, even if the same
    iteration is being saved again. Returns when everything is on disk.

    - ``iteration``: Number of the checkpoint, from 0 on.
    - ``checkpoints_path``: A directory on a file system that all ranks share.
    - ``model``: The model to save.
    - ``optimizer``: The optimizer to save.
    - ``lr_scheduler``: The learning-rate scheduler to save.

    Raises ValueError for an unusable iteration, and TypeError, before anything is written, if a state holds objects
    that a safe load would refuse. If one rank raises OSError, the others raise BaguaError.
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
    ranks.first_only("begin a checkpoint", lambda: _begin_saving(path, final, folder))
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
    files = {expert_file(folder, number): state for number, state in experts.items()}
    if optimizer is not None:
        if keys:
            files[optimizer_file(folder, rank)] = {"optimizer": optimizer.state_dict()}
        else:
            whole["optimizer"] = optimizer.state_dict()
    if rank == 0:
        files[model_file(folder)] = whole
    return files


def _require_safe(value: Any, where: str) -> None:
    """Raises TypeError unless a value is whole on this rank and can be read without running code from the file."""
    if hasattr(value, "placements") and hasattr(value, "to_local"):
        raise TypeError(
            f"{where} is a {type(value).__name__}, whose parts are on several ranks: save sharded models with "
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


def _begin_saving(path: Path, final: Path, folder: Path) -> None:
    path.mkdir(parents=True, exist_ok=True)
    replaced = final.with_name(final.name + REPLACED)
    if replaced.exists():
        # An earlier process crashed between two renames. Give the complete checkpoint its name back.
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
