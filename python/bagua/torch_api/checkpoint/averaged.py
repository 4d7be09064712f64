"""Weights that a thread averages beside the training (`async`): copied between two rounds, and replaced outside of any.

A rank that loads while another one has not yet would be averaged with weights of before, and both keep a mixture.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from ..algorithms.async_model_average import AsyncModelAverageAlgorithmImpl
from ..model_engine.engine import owner_of
from .coordination import Coordinator


def state_of(model: torch.nn.Module) -> dict[str, Any]:
    """The model's ``state_dict()``; copies, made between two rounds, where weights are averaged."""
    averaging = _averaging(model)
    if not averaging:
        return model.state_dict()
    with contextlib.ExitStack() as locks:
        for algorithm in averaging:
            locks.enter_context(algorithm.lock(algorithm.bagua_ddp))
        return {
            name: value.detach().clone() if isinstance(value, torch.Tensor) else value
            for name, value in model.state_dict().items()
        }


@contextlib.contextmanager
def outside_of_rounds(model: torch.nn.Module, ranks: Coordinator) -> Iterator[None]:
    """Inside, no rank takes part in a round of the model's weights. Collective where they are averaged: all ranks have
    to be through with the weights when it ends.
    """
    averaging = _averaging(model)
    taking_part = [algorithm for algorithm in averaging if not algorithm.is_aborted]

    def step_out() -> None:
        for algorithm in taking_part:
            algorithm.abort(algorithm.bagua_ddp)

    if averaging:
        ranks.together("leave the rounds of averaging", step_out)
    try:
        yield
    finally:
        for algorithm in taking_part:
            algorithm.resume(algorithm.bagua_ddp)


def _averaging(model: torch.nn.Module) -> list[AsyncModelAverageAlgorithmImpl]:
    """What averages its weights so."""
    owners = {id(owner): owner for param in model.parameters() if (owner := owner_of(param)) is not None}
    algorithms = [owner.bagua_algorithm for owner in owners.values()]
    return [algorithm for algorithm in algorithms if isinstance(algorithm, AsyncModelAverageAlgorithmImpl)]
