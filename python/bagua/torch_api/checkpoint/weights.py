"""Reads and replaces weights of a model whose algorithm changes them in threads or keeps state derived from them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import torch

from ..model_engine.engine import engines_of
from .coordination import Coordinator

T = TypeVar("T")


def state_of(model: torch.nn.Module) -> dict[str, Any]:
    """Returns the model's ``state_dict()``, read as :attr:`ExchangePolicy.read_state` requires."""
    read: Callable[[], dict[str, Any]] = model.state_dict
    for engine in engines_of(model):
        read = partial(engine.policy.read_state, read)
    return read()


def load_weights(model: torch.nn.Module, ranks: Coordinator, load: Callable[[], T]) -> T:
    """Runs ``load``, which must load the same weights on all ranks. Collective.

    No thread averages weights meanwhile. Averaging with a rank that has not loaded yet would leave both ranks with a
    mixture of old and new weights.
    """
    engines = engines_of(model)

    def step_out() -> None:
        for engine in engines:
            engine.exchange.before_step()
            paused.enter_context(engine.policy.pause())

    with contextlib.ExitStack() as paused:
        if engines:
            ranks.together("end the last step", step_out)
        loaded = ranks.together("load a checkpoint", load)
        for engine in engines:
            engine.begin_anew()
    return loaded
