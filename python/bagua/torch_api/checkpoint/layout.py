"""Paths of a checkpoint's files, and the keys that belong to experts.

    <path>/latest_checkpointed_iteration.txt            the tracker: the iteration to load
    <path>/iter_0000005/                                a complete checkpoint
        mp_rank_00_model_states.pt                      iteration, model, optimizer, lr_scheduler
        expert_<expert>_mp_rank_00_model_states.pt      with experts: the parameters of one expert of the job
        expert_parallel_rank_<rank>_mp_rank_00_optim_states.pt      with experts: the optimizer of one rank
    <path>/iter_0000005.saving/                         being written; a later process may delete it
    <path>/iter_0000005.replaced/                       the old checkpoint, while a new one of that iteration is renamed

A directory gets its final name when all its files are on disk, and only then does the tracker name it. The tracker
therefore always names a complete checkpoint. Between two renames, it may still have the name ``.replaced``.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import torch

from bagua.errors import BaguaError

from ..model_parallel.moe import MOELayer

SAVING = ".saving"
REPLACED = ".replaced"

# The original's name for a checkpoint that is a released model, without an iteration.
RELEASE = "release"

_EXPERTS = "experts.bagua_experts."


def tracker_file(path: Path) -> Path:
    """Returns the path of the file that names the newest complete checkpoint."""
    return path / "latest_checkpointed_iteration.txt"


def directory(path: Path, iteration: int | str) -> Path:
    """Returns the path of a checkpoint that is complete."""
    return path / (iteration if isinstance(iteration, str) else f"iter_{iteration:07d}")


def model_file(folder: Path) -> Path:
    """Returns the path of the file that rank 0 writes."""
    return folder / "mp_rank_00_model_states.pt"


def expert_file(folder: Path, expert: int) -> Path:
    """Returns the path of one expert's parameters in all layers."""
    return folder / f"expert_{expert}_mp_rank_00_model_states.pt"


def optimizer_file(folder: Path, rank: int) -> Path:
    """Returns the path of one rank's optimizer state, for a model with experts."""
    return folder / f"expert_parallel_rank_{rank}_mp_rank_00_optim_states.pt"


def read_tracker(path: Path) -> int | str | None:
    """The iteration that the tracker names, or ``"release"``; ``None`` without a tracker."""
    try:
        text = tracker_file(path).read_text(encoding="ascii").strip()
    except FileNotFoundError:
        return None
    if text == RELEASE:
        return text
    if not re.fullmatch(r"[0-9]+", text):
        raise BaguaError(f"{tracker_file(path)} holds {text[:50]!r}, which is neither an iteration nor 'release'")
    return int(text)


def find(path: Path, iteration: int | str) -> Path:
    """Returns the directory of a complete checkpoint. Raises FileNotFoundError if there is none."""
    final = directory(path, iteration)
    for folder in (final, final.with_name(final.name + REPLACED)):
        if model_file(folder).exists():
            return folder
    raise FileNotFoundError(f"{tracker_file(path)} names iteration {iteration}, but {model_file(final)} does not exist")


class ExpertKeys:
    """The keys of a model's state_dict that belong to experts, recognised by their modules and not by their names."""

    def __init__(self, model: torch.nn.Module, rank: int) -> None:
        self.rank = rank
        layers = [(name, child) for name, child in model.named_modules() if isinstance(child, MOELayer)]
        # Of the experts' keys, by layer.
        self._prefixes = [f"{name}.{_EXPERTS}" if name else _EXPERTS for name, _ in layers]
        counts = {layer.experts.num_local_experts for _, layer in layers}
        if len(counts) > 1:
            raise NotImplementedError(
                f"layers with {', '.join(map(str, sorted(counts)))} experts per rank cannot be in one checkpoint: save "
                "each rank's model.state_dict() with torch.save"
            )
        # Number of experts of each layer on a rank.
        self._count = max(counts, default=0)

    def __bool__(self) -> bool:
        return bool(self._prefixes)

    def split(self, state: dict[str, Any]) -> tuple[dict[str, Any], dict[int, dict[str, Any]]]:
        """Splits a state into the entries that all ranks share, and those of each expert by its number in the job."""
        shared: dict[str, Any] = {}
        experts: dict[int, dict[str, Any]] = {number: {} for number in self.numbers()}
        for key, value in state.items():
            place = self._place(key)
            if place is None:
                shared[key] = value
                continue
            prefix, local, rest = place
            number = self.rank * self._count + local
            experts[number][f"{prefix}{number}{rest}"] = value
        return shared, experts

    def numbers(self) -> range:
        """Returns the numbers in the job of this rank's experts."""
        return range(self.rank * self._count, (self.rank + 1) * self._count)

    def localise(self, state: dict[str, Any]) -> dict[str, Any]:
        """Renames the keys of an expert's file from the expert's number in the job to its number on this rank."""
        found = {}
        for key, value in state.items():
            place = self._place(key)
            if place is None:
                raise BaguaError(
                    f"the file of an expert holds {key!r}, which does not belong to an expert of this model"
                )
            prefix, number, rest = place
            found[f"{prefix}{number - self.rank * self._count}{rest}"] = value
        return found

    def _place(self, key: str) -> tuple[str, int, str] | None:
        """Returns prefix, expert number, and the rest of the key from its dot on; None for a key of all ranks."""
        for prefix in self._prefixes:
            if key.startswith(prefix):
                number, _, rest = key.removeprefix(prefix).partition(".")
                return prefix, int(number), f".{rest}"
        return None


def sync_directory(folder: Path) -> None:
    """Makes renames in a directory survive a power failure."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
