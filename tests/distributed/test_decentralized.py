"""decentralized: weights averaged with peers during forward and backward equal those of a simulation to the bit."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

import bagua.torch_api as bagua
from bagua.errors import BaguaError
from bagua.torch_api.algorithms.decentralized import PEER_SELECTION_MODES
from tests.distributed.torch_ranks import HOSTED, cases_in, each_case, hosts
from tests.distributed.weights_oracle import (
    Decentralized,
    Net,
    assert_equals,
    batch,
    is_mode_of,
    loss,
    made_on_rank_0,
    train,
)
from tests.distributed.weights_oracle import wrapped as wrapped_with

DecentralizedAlgorithm = bagua.algorithms.DecentralizedAlgorithm


def wrapped(rank: int, algorithm: Any = None, **options: Any) -> tuple[Net, torch.optim.Optimizer]:
    return wrapped_with(rank, algorithm or DecentralizedAlgorithm(hierarchical=False), **options)


def simulated(mode: str = "all", hierarchical: bool = False, interval: int = 1) -> Decentralized:
    # An all_reduce adds up inside hosts first, hierarchical or not.
    by_host = hosts() if hierarchical or mode == "all" else None
    return Decentralized(made_on_rank_0(Net), bagua.get_world_size(), mode, by_host, interval)


def every_mode_equals_the_simulation(rank: int) -> None:
    for mode, hierarchical, interval in itertools.product(PEER_SELECTION_MODES, (False, True), (1, 2)):
        if not is_mode_of(mode, hierarchical):
            continue
        for do_flatten in (True, False):
            model, optimizer = wrapped(
                rank, DecentralizedAlgorithm(hierarchical, mode, interval), do_flatten=do_flatten
            )
            ranks = simulated(mode, hierarchical, interval)
            for step in range(6):
                train(model, optimizer, rank, step)
                ranks.train(step)
                what = f"{mode}, {hierarchical=}, {interval=}, {do_flatten=}, step {step}"
                assert_equals(model, ranks, rank, what)


def shift_one_among_an_odd_number_is_refused_with_the_number(rank: int) -> None:
    for hierarchical in (False, True):
        if is_mode_of("shift_one", hierarchical):
            continue
        with pytest.raises(ValueError, match=f"even number of members, not {bagua.get_world_size()}"):
            wrapped(rank, DecentralizedAlgorithm(hierarchical, "shift_one"))
    wrapped(rank)


def weights_that_change_meanwhile_keep_the_change(rank: int) -> None:
    model, optimizer = wrapped(rank)
    train(model, optimizer, rank, 0)
    x = model.scale.detach().clone()
    loss(model, batch(rank, 1))
    with torch.no_grad():
        model.scale += 1.0
    (model.deep * 1.0).sum().backward()
    size = bagua.get_world_size()
    mean = x.clone()
    bagua.allreduce_inplace(mean, bagua.ReduceOp.SUM)
    expected = mean / size + 1.0 if size > 1 else x + 1.0
    torch.testing.assert_close(model.scale.detach(), expected, rtol=0, atol=1e-6)


def a_graph_from_before_the_exchange_is_refused_afterwards(rank: int) -> None:
    if bagua.get_world_size() == 1:
        return
    model, optimizer = wrapped(rank)
    value = loss(model, batch(rank, 0))
    value.backward(retain_graph=True)
    with pytest.raises(BaguaError, match=r"backward of model 'Net_.*weights have been replaced.*no_sync.*retain_graph"):
        value.backward()
    # Another forward of the same step is before the exchange, too.
    first, second = loss(model, batch(rank, 0)), loss(model, batch(rank, 1))
    first.backward()
    with pytest.raises(BaguaError, match="weights have been replaced"):
        torch.autograd.grad(second, list(model.parameters()), allow_unused=True)
    value = loss(model, batch(rank, 0))
    with bagua.no_sync(model):
        value.backward(retain_graph=True)
    value.backward()
    optimizer.step()
    # In a step without an exchange nothing is replaced.
    model, optimizer = wrapped(rank, DecentralizedAlgorithm(False, communication_interval=2))
    train(model, optimizer, rank, 0)
    value = loss(model, batch(rank, 1))
    value.backward(retain_graph=True)
    value.backward()


def options_that_cannot_be_are_refused(rank: int) -> None:
    with pytest.raises(ValueError, match=r"'star'; known: all, shift_one, ring, exponential, one_peer_exponential"):
        DecentralizedAlgorithm(peer_selection_mode="star")
    for interval in (0, -1, 1.5):
        with pytest.raises(ValueError, match="communication_interval"):
            DecentralizedAlgorithm(communication_interval=interval)  # type: ignore[arg-type]
    assert isinstance(bagua.algorithms.Algorithm.init("decentralized"), DecentralizedAlgorithm)


CASES = cases_in(globals())

test = each_case(CASES, 1, *HOSTED, timeout=60)
