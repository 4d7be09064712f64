"""The states of a training as a file keeps them."""

from __future__ import annotations

import io
from typing import Any

import torch


def saved(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """The states of the model, its optimizer and its algorithm, read from a file that they were written to."""
    file = io.BytesIO()
    torch.save([model.state_dict(), optimizer.state_dict(), model.bagua_algorithm.state_dict()], file)
    file.seek(0)
    states: list[dict[str, Any]] = torch.load(file, weights_only=True)
    return states


def load(model: torch.nn.Module, optimizer: torch.optim.Optimizer, states: list[dict[str, Any]]) -> None:
    """Gives the states to another training."""
    for owner, state in zip((model, optimizer, model.bagua_algorithm), states, strict=True):
        owner.load_state_dict(state)
