"""When a round of local_sgd happens: once at the end of each k-th step, whichever optimizers step; never a hang."""

from __future__ import annotations

import contextlib

import bagua.torch_api as bagua
from bagua.torch_api.algorithms import LocalSGDAlgorithm
from tests.distributed.local_sgd_simulation import Simulation, data, equal, net, rounds, sgd
from tests.distributed.torch_ranks import HOSTED, cases_in, each_case


def an_optimizer_that_is_not_called_delays_the_round_to_the_next_forward(rank: int) -> None:
    size = bagua.get_world_size()
    model = net()
    optimizer = sgd(model)
    model.with_bagua([optimizer], LocalSGDAlgorithm(2))
    simulated = Simulation(model)
    # Step: ranks that do not step, though their gradients are finite.
    idle = {0: [0], 1: [size - 1], 2: [0], 3: list(range(size)), 5: [0]}
    for step in range(6):
        optimizer.zero_grad()
        loss = model(data(rank, step)).square().mean()
        if step % 2 == 0:
            assert equal(model, simulated.models[rank]), f"before step {step}"
        loss.backward()
        if rank not in idle.get(step, []):
            optimizer.step()
        simulated.train(step, idle=idle.get(step, []))
        if step % 2:
            simulated.round()
    model.bagua_algorithm.state_dict()
    assert rounds(model) == 3
    assert equal(model, simulated.models[rank])


def no_sync_makes_one_step_of_several_backwards(rank: int) -> None:
    size = bagua.get_world_size()
    model = net()
    optimizer = sgd(model)
    model.with_bagua([optimizer], LocalSGDAlgorithm(2))
    simulated = Simulation(model)
    for step in range(4):
        for each, mine, who in [
            *zip(simulated.models, simulated.optimizers, range(size), strict=True),
            (model, optimizer, rank),
        ]:
            mine.zero_grad()
            # Another number of backwards on each rank.
            for part in range(who + 1):
                with bagua.no_sync(model) if each is model else contextlib.nullcontext():
                    each(data(who, 10 * step + part)).square().mean().backward()
            each(data(who, 10 * step + 9)).square().mean().backward()
            mine.step()
        if step % 2:
            simulated.round()
        assert equal(model, simulated.models[rank])
    assert rounds(model) == 2


CASES = cases_in(globals())

test = each_case(CASES, *HOSTED)
