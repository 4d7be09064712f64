"""A rank of an elastic job that does what its standard input says, a command per line, and answers in JSON."""

from __future__ import annotations

import contextlib
import functools
import json
import sys
from typing import Any

import torch

import bagua as neutral
import bagua.torch_api as bagua
from bagua import process_state
from bagua.torch_api.algorithms import Algorithm, AsyncModelAverageAlgorithm


class Model(torch.nn.Module):
    """Four weights and a buffer."""

    def __init__(self, value: float, count: int = 4) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((count,), value))
        self.register_buffer("seen", torch.full((3,), value, dtype=torch.float64))

    def forward(self, x: float) -> torch.Tensor:
        """A sum whose gradient is ``x``."""
        return (self.weight * x).sum()


def answer(value: Any) -> None:
    """Prints one line."""
    print(json.dumps(value), flush=True)


def wrap(value: float, count: int) -> tuple[Model, torch.optim.Optimizer]:
    """A model that is averaged."""
    model = Model(value, count)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model.with_bagua([optimizer], AsyncModelAverageAlgorithm(sync_interval_ms=20))  # type: ignore[operator]
    return model, optimizer


def join() -> None:
    """Joins the job."""
    bagua.init_process_group()


def attempt(work: Any) -> Any:
    """Returns the result of ``work``, or the class and text of its exception."""
    try:
        return work()
    except Exception as error:
        return [type(error).__name__, str(error)]


def main() -> None:
    """Joins, then obeys."""
    error = attempt(join)
    answer(error or {"rank": bagua.get_rank(), "rejoined": bagua.rejoined()})
    if error:
        return
    model: Any = None
    optimizer: Any = None
    held = contextlib.ExitStack()
    for line in sys.stdin:
        command, *words = line.split()
        if command == "wrap":
            outcome = attempt(functools.partial(wrap, float(words[0]), int(words[1])))
            if isinstance(outcome, list):
                answer(outcome)
                continue
            model, optimizer = outcome
            answer("wrapped")
        elif command == "set":
            with model.bagua_algorithm.lock(model), torch.no_grad():
                model.weight.fill_(float(words[0]))
                model.seen.fill_(float(words[0]))
            answer("set")
        elif command == "lock":
            held.enter_context(model.bagua_algorithm.lock(model))
            answer("locked")
        elif command == "unlock":
            held.close()
            answer("unlocked")
        elif command == "train":
            answer(attempt(functools.partial(train, model, optimizer, float(words[0]))))
        elif command == "state":
            with model.bagua_algorithm.lock(model):
                weights, seen = model.weight.tolist(), model.seen.tolist()
            stats = model.bagua_algorithm.stats()
            counter = model.bagua_ddp.bagua_train_step_counter
            elastic = neutral.stats()["elastic"]
            jobs = process_state.process.jobs
            answer({**stats, "weights": weights, "seen": seen, "counter": counter, "elastic": elastic, "jobs": jobs})
        elif command == "verb":
            answer(attempt(lambda: bagua.barrier()))
        elif command == "other":
            other = Model(0.0)
            algorithm = Algorithm.init("gradient_allreduce")
            answer(attempt(lambda other=other, algorithm=algorithm: other.with_bagua([], algorithm) and None))
        else:
            raise ValueError(line)
    answer("left")


def train(model: Model, optimizer: torch.optim.Optimizer, gradient: float) -> str:
    """One step."""
    optimizer.zero_grad()
    model(gradient).backward()
    optimizer.step()
    return "trained"
