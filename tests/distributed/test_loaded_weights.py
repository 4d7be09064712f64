"""Weights that are loaded in the middle of a training: what an algorithm keeps of those before does not reach them."""

from __future__ import annotations

import contextlib
import copy
import re
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import bagua as neutral
import bagua.torch_api as bagua
from bagua.errors import BaguaError, MismatchError
from bagua.torch_api.algorithms import (
    Algorithm,
    AsyncModelAverageAlgorithm,
    DecentralizedAlgorithm,
    DiLoCoAlgorithm,
    LocalSGDAlgorithm,
    LowPrecisionDecentralizedAlgorithm,
    QAdamAlgorithm,
    QAdamOptimizer,
)
from bagua.torch_api.checkpoint import load_checkpoint, save_checkpoint
from bagua.torch_api.process_group import ProcessGroup
from tests.distributed.local_sgd_simulation import data, equal, local_step, net, sgd
from tests.distributed.states import load, saved
from tests.distributed.torch_ranks import cases_in, each_case

#: Of the differences to what the ranks know, most are not sent.
FEW = neutral.Codec("top_k", k=0.1)


def that_keep_weights() -> list[Algorithm]:
    return [
        DiLoCoAlgorithm(2),
        LocalSGDAlgorithm(2, hierarchical=False, compression=FEW),
        LowPrecisionDecentralizedAlgorithm(hierarchical=False, communication_interval=2, compression=FEW),
    ]


def trained(
    rank: int, algorithm: Algorithm, steps: int = 4
) -> tuple[torch.nn.Module, torch.optim.Optimizer, dict[str, torch.Tensor]]:
    """A model after some steps, its optimizer, and its weights of before."""
    model = net()
    optimizer = sgd(model)
    model.with_bagua([optimizer], algorithm)
    start = copy.deepcopy(model.state_dict())
    for step in range(steps):
        local_step(model, optimizer, data(rank, step))
    return model, optimizer, start


def without_the_algorithms_state_they_are_an_error(rank: int) -> None:
    for algorithm in that_keep_weights():
        model, optimizer, start = trained(rank, algorithm)
        states = saved(model, optimizer)
        local_step(model, optimizer, data(rank, 4))
        # Of a part of the model.
        model[0].load_state_dict({name: start[f"0.{name}"] for name in ("weight", "bias")})
        model.eval()(data(rank, 5))
        model.train()
        for _ in range(2):
            with pytest.raises(
                BaguaError, match=rf"parameter '0\.\w+' .* which {model.bagua_algorithm.name} would take"
            ):
                model(data(rank, 5))
        load(model, optimizer, states)
        local_step(model, optimizer, data(rank, 4))
        model.bagua_algorithm.load_state_dict(states[2])
        model.load_state_dict(states[0])
        local_step(model, optimizer, data(rank, 4))
        # Wrapped again, all begin with them.
        model.load_state_dict(start)
        model.with_bagua([optimizer], algorithm)
        local_step(model, optimizer, data(rank, 5))
    bagua.barrier()


def weights_that_are_put_back_are_no_change(rank: int) -> None:
    for algorithm in that_keep_weights():
        model, optimizer, start = trained(rank, algorithm)
        own = copy.deepcopy(model.state_dict())
        model.load_state_dict(start)
        model.eval()(data(rank, 5))
        model.load_state_dict(own)
        model.train()
        local_step(model, optimizer, data(rank, 5))


def what_is_loaded_between_a_backward_and_its_step_is_not_taken_for_the_step(rank: int) -> None:
    for algorithm in that_keep_weights():
        for others in (False, True):
            model, optimizer, start = trained(rank, algorithm)
            optimizer.zero_grad()
            model(data(rank, 5)).square().mean().backward()
            model.load_state_dict(start if others else copy.deepcopy(model.state_dict()))
            optimizer.step()
            refused = pytest.raises(BaguaError, match="outside of training") if others else contextlib.nullcontext()
            with refused:
                model(data(rank, 6))
    bagua.barrier()


def load_checkpoint_has_all_ranks_begin_with_them(rank: int) -> None:
    folder = Path(bagua.broadcast_object(tempfile.mkdtemp() if rank == 0 else None))
    for number, algorithm in enumerate(that_keep_weights()):
        model, optimizer, _ = trained(rank, algorithm)
        path = folder / str(number)
        save_checkpoint(1, path, model, optimizer)
        local_step(model, optimizer, data(rank, 7))
        local_step(model, optimizer, data(rank, 8))
        assert load_checkpoint(path, model, optimizer) == 1
        fresh = net()
        other = sgd(fresh)
        assert load_checkpoint(path, fresh, other) == 1
        fresh.with_bagua([other], algorithm)
        for step in range(4):
            local_step(model, optimizer, data(rank, step))
            local_step(fresh, other, data(rank, step))
            assert equal(model, fresh), f"{algorithm.describe()} step {step}"
        # With its own state it goes on from there, in either order.
        states = saved(model, optimizer)
        model.bagua_algorithm.load_state_dict(states[2])
        load_checkpoint(path, model, optimizer)
        assert str(model.bagua_algorithm.state_dict()) == str(states[2])


@dataclass(frozen=True)
class Stepped:
    """A training whose ranks must make the same steps."""

    algorithm: Callable[[Any], Algorithm]
    #: After how many steps one rank loads the state.
    steps: int
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.SGD

    def begin(self, group: ProcessGroup) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        model = net()
        optimizer = self.optimizer(model.parameters(), lr=0.01)
        model.with_bagua([optimizer], self.algorithm(optimizer), process_group=group)
        return model, optimizer


STEPPED = [
    Stepped(lambda _: LocalSGDAlgorithm(3), 4),
    # The first round of a rank that loads it is in the step of the same number.
    Stepped(lambda _: LocalSGDAlgorithm(3), 1),
    Stepped(lambda _: DiLoCoAlgorithm(3), 2),
    Stepped(lambda _: LocalSGDAlgorithm(3, hierarchical=False, compression="f16"), 3),
    Stepped(lambda _: DiLoCoAlgorithm(2), 2),
    Stepped(lambda _: DecentralizedAlgorithm(communication_interval=2), 1),
    Stepped(lambda _: DecentralizedAlgorithm(hierarchical=False, peer_selection_mode="ring"), 2),
    Stepped(lambda _: LowPrecisionDecentralizedAlgorithm(communication_interval=2), 1),
    Stepped(lambda own: QAdamAlgorithm(own, False, compression=None), 3, partial(QAdamOptimizer, warmup_steps=2)),
    Stepped(lambda _: AsyncModelAverageAlgorithm(warmup_steps=4), 2),
]


def train(rank: int, model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for step in range(steps):
        local_step(model, optimizer, data(rank, step))


def a_state_that_one_rank_alone_has_loaded_is_an_error_of_all(rank: int) -> None:
    for row in STEPPED:
        # The error ends the group.
        group = bagua.new_group()
        model, optimizer = row.begin(group)
        train(rank, model, optimizer, row.steps)
        states = saved(model, optimizer)
        model, optimizer = row.begin(group)
        if rank == 0:
            load(model, optimizer, states)
        # No rank fails while another still begins.
        bagua.barrier()
        with pytest.raises(MismatchError) as caught:
            train(rank, model, optimizer, 6)
        step = r"in step (\d+(?:, the first after a state was loaded)?)"
        steps_of = dict(re.findall(rf"rank (\d) does .*? {step}", str(caught.value)))
        assert len(set(steps_of.values())) == 2, f"{model.bagua_algorithm.name}: {caught.value}"
        assert "load the same checkpoint on every rank" in str(caught.value), model.bagua_algorithm.name


CASES = cases_in(globals())

test = each_case(CASES, 2, 3)
