"""Loads the checkpoint that the tracker names, without running code from its files."""

from __future__ import annotations

import os
from collections import Counter, OrderedDict, defaultdict
from pathlib import Path
from typing import Any

import torch

from bagua.errors import BaguaError

from .coordination import Coordinator
from .layout import RELEASE, ExpertKeys, expert_file, find, model_file, optimizer_file, read_tracker, tracker_file
from .weights import load_weights


def load_checkpoint(
    checkpoints_path: str | os.PathLike[str],
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    lr_scheduler: Any = None,
    strict: bool = True,
) -> int:
    """Loads the newest complete checkpoint, and returns its iteration; 0 if there is no checkpoint.

    All ranks call this function, and all load the checkpoint that rank 0's tracker names. A model with experts must be
    loaded by the number of ranks that saved it.

    - ``checkpoints_path``: A directory on a file system that all ranks share.
    - ``model``: The model to load into.
    - ``optimizer``: The optimizer to load into.
    - ``lr_scheduler``: The learning-rate scheduler to load into.
    - ``strict``: As in ``Module.load_state_dict``.

    Raises FileNotFoundError if the tracker names a checkpoint that does not exist. Raises BaguaError if the checkpoint
    holds no state for the given optimizer or scheduler, or if another rank failed.
    """
    ranks, path = Coordinator(), Path(checkpoints_path)

    def iteration_to_load() -> int | str | None:
        return read_tracker(path) if ranks.rank == 0 else None

    iteration = ranks.from_first(ranks.together("read the tracker", iteration_to_load))
    if iteration is None:
        return 0

    def load() -> int:
        folder = find(path, iteration)
        whole = _read(model_file(folder))
        keys = ExpertKeys(model, ranks.rank)
        state, states = dict(whole["model"]), whole
        if keys:
            for number in keys.numbers():
                state.update(keys.localise(_read(expert_file(folder, number))))
            if optimizer is not None:
                states = {**whole, **_read_optimizer(folder, ranks)}
        for what, target in (("optimizer", optimizer), ("lr_scheduler", lr_scheduler)):
            if target is not None and what not in states:
                raise BaguaError(f"{folder} holds no state for the {what} that is to be loaded")
        model.load_state_dict(state, strict=strict)
        if optimizer is not None:
            optimizer.load_state_dict(states["optimizer"])
        if lr_scheduler is not None:
            lr_scheduler.load_state_dict(states["lr_scheduler"])
        if iteration == RELEASE:
            return 0
        if whole["iteration"] != iteration:
            raise BaguaError(
                f"{tracker_file(path)} names iteration {iteration}, but {model_file(folder)} holds iteration "
                f"{whole['iteration']}"
            )
        return int(iteration)

    return load_weights(model, ranks, load)


def _read_optimizer(folder: Path, ranks: Coordinator) -> dict[str, Any]:
    saved = len(list(folder.glob(optimizer_file(folder, 0).name.replace("_0_", "_*_", 1))))
    if saved != ranks.size:
        raise BaguaError(f"{folder} was saved by {saved} ranks, but {ranks.size} load it: use {saved} ranks")
    return _read(optimizer_file(folder, ranks.rank))


def _read(path: Path) -> dict[str, Any]:
    # Containers in schedulers' states that some versions of torch do not list as safe.
    with torch.serialization.safe_globals([Counter, OrderedDict, defaultdict, dict]):
        found: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    return found
