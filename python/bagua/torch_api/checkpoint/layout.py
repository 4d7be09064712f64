"""Where a checkpoint's files lie, and which of them belong to experts.

    <path>/latest_checkpointed_iteration.txt            the tracker: the iteration to load
    <path>/iter_0000005/                                a complete checkpoint
        mp_rank_00_model_states.pt                      iteration, model, optimizer, lr_scheduler
        expert_<expert>_mp_rank_00_model_states.pt      with experts: the parameters of one, under its number in the job
        expert_parallel_rank_<rank>_mp_rank_00_optim_states.pt      with experts: the optimizer of one rank
    <path>/iter_0000005.saving/                         being written; a later process may delete it
    <path>/iter_0000005.replaced/                       the former checkpoint of that iteration, while the new one
                                                        takes its place

A directory appears under its final name when every file in it is on the disk, and the tracker names it after that. At
each moment the tracker therefore names a complete checkpoint, under its own name or, for the moment between two
renames of an iteration that is saved again, as ``.replaced``.
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
    """The file that names the newest complete checkpoint."""
    return path / "latest_checkpointed_iteration.txt"


def directory(path: Path, iteration: int | str) -> Path:
    """Where a checkpoint lies once it is complete."""
    return path / (iteration if isinstance(iteration, str) else f"iter_{iteration:07d}")


def model_file(folder: Path) -> Path:
    """What rank 0 writes."""
    return folder / "mp_rank_00_model_states.pt"


def expert_file(folder: Path, expert: int, layer: int | None) -> Path:
    """Parameters of one expert; of one layer only where layers have different numbers of experts."""
    name = f"expert_{expert}_mp_rank_00_model_states.pt"
    return folder / (name if layer is None else f"layer_{layer}_{name}")


def optimizer_file(folder: Path, rank: int) -> Path:
    """The optimizer of one rank of a model with experts."""
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
    """The directory of a complete checkpoint."""
    final = directory(path, iteration)
    for folder in (final, final.with_name(final.name + REPLACED)):
        if model_file(folder).exists():
            return folder
    raise FileNotFoundError(f"{tracker_file(path)} names iteration {iteration}, and there is no {model_file(final)}")


class ExpertKeys:
    """Which keys of a model's state_dict belong to experts: by the modules they come from, not by their names."""

    def __init__(self, model: torch.nn.Module, rank: int) -> None:
        self.rank = rank
        layers = [(name, child) for name, child in model.named_modules() if isinstance(child, MOELayer)]
        # (prefix of an expert's keys before its number, how many experts a rank has)
        self._layers = [
            (f"{name}.{_EXPERTS}" if name else _EXPERTS, layer.experts.num_local_experts) for name, layer in layers
        ]
        # One file per expert holds that expert of all layers, if every layer has as many.
        self.uniform = len({count for _, count in self._layers}) <= 1

    def __bool__(self) -> bool:
        return bool(self._layers)

    def split(self, state: dict[str, Any]) -> tuple[dict[str, Any], dict[tuple[int, int | None], dict[str, Any]]]:
        """What all ranks share; and, by the expert's number in the job and the layer, what is that expert's."""
        shared: dict[str, Any] = {}
        experts: dict[tuple[int, int | None], dict[str, Any]] = {file: {} for file in self.files()}
        for key, value in state.items():
            place = self._place(key)
            if place is None:
                shared[key] = value
                continue
            layer, local, rest = place
            prefix, count = self._layers[layer]
            number = self.rank * count + local
            experts[number, None if self.uniform else layer][f"{prefix}{number}{rest}"] = value
        return shared, experts

    def files(self) -> list[tuple[int, int | None]]:
        """(number of the expert in the job, layer) of every file of this rank."""
        found: dict[tuple[int, int | None], None] = {}
        for layer, (_, count) in enumerate(self._layers):
            for local in range(count):
                found[self.rank * count + local, None if self.uniform else layer] = None
        return list(found)

    def localise(self, state: dict[str, Any]) -> dict[str, Any]:
        """The keys of an expert's file under the expert's number on this rank."""
        found = {}
        for key, value in state.items():
            place = self._place(key)
            if place is None:
                raise BaguaError(f"a file of an expert holds {key!r}, which belongs to no expert of this model")
            layer, number, rest = place
            prefix, count = self._layers[layer]
            found[f"{prefix}{number - self.rank * count}{rest}"] = value
        return found

    def _place(self, key: str) -> tuple[int, int, str] | None:
        """Layer, number after the prefix, and the rest of a key with its dot; ``None`` for a shared one."""
        for layer, (prefix, _) in enumerate(self._layers):
            if key.startswith(prefix):
                number, _, rest = key.removeprefix(prefix).partition(".")
                return layer, int(number), f".{rest}"
        return None


def sync_directory(folder: Path) -> None:
    """Makes names in a directory survive a power failure."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
