"""What holds for the algorithms whose weights travel in every step: each joins by a row, with its simulation."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import pytest
import torch

import bagua as neutral
import bagua.torch_api as bagua
from bagua.torch_api.algorithms import (
    Algorithm,
    DecentralizedAlgorithm,
    LowPrecisionDecentralizedAlgorithm,
)
from bagua.torch_api.algorithms.decentralized import PEER_SELECTION_MODES
from tests.distributed.states import load, saved
from tests.distributed.torch_ranks import HOSTED, cases_in, each_case, hosts
from tests.distributed.weights_oracle import (
    Decentralized,
    LowPrecision,
    Net,
    Ranks,
    assert_equals,
    batch,
    is_mode_of,
    loss,
    made_on_rank_0,
    sgd,
    train,
    wrapped,
)

REPLICAS = {"weight", "left_peer_weight", "right_peer_weight"}


class Row(NamedTuple):
    """An algorithm, and what simulates it on so many ranks."""

    name: str
    algorithm: Callable[[], Algorithm]
    simulate: Callable[[Net, int], Ranks]
    net: Callable[[], Net]
    #: Otherwise the exchange is during forward and backward.
    after_optimizers: bool = False


def low_precision(model: Net, size: int) -> Ranks:
    names = [name for name, param in model.named_parameters() if param.requires_grad]
    return LowPrecision(model, size, neutral.Codec("minmax_u8"), [names[::-1]])


ROWS = [
    Row(
        "decentralized",
        lambda: DecentralizedAlgorithm(False),
        # An all_reduce adds up inside hosts first.
        lambda model, size: Decentralized(model, size, "all", hosts() if size == bagua.get_world_size() else None),
        Net,
    ),
    Row(
        "decentralized ring",
        lambda: DecentralizedAlgorithm(False, "ring"),
        lambda model, size: Decentralized(model, size, "ring"),
        Net,
    ),
    Row(
        "low_precision_decentralized",
        lambda: LowPrecisionDecentralizedAlgorithm(False),
        low_precision,
        functools.partial(Net, other=torch.float32),
        after_optimizers=True,
    ),
]


def begun(rank: int, row: Row, **options: Any) -> tuple[Net, torch.optim.Optimizer, Ranks]:
    model, optimizer = wrapped(rank, row.algorithm(), row.net, **options)
    return model, optimizer, row.simulate(made_on_rank_0(row.net), bagua.get_world_size())


def exchanges(model: Any) -> list[int]:
    return [bucket.backend_bucket.step for bucket in model.bagua_buckets]


def gradients_accumulate_under_no_sync(rank: int) -> None:
    for row in ROWS:
        model, optimizer, ranks = begun(rank, row)
        for step in range(3):
            before = exchanges(model)
            with bagua.no_sync(model):
                loss(model, batch(rank, 10 * step)).backward()
            assert exchanges(model) == before, row.name
            # All gradients of the step are at the same weights.
            train(model, optimizer, rank, 10 * step + 1)
            ranks.train(step, passes=[10 * step, 10 * step + 1])
            assert_equals(model, ranks, rank, f"{row.name}, step {step}")


def a_loss_without_parameters_on_one_rank_ends_the_step_with_the_optimizer(rank: int) -> None:
    for row in ROWS:
        model, optimizer, ranks = begun(rank, row)
        for step in range(4):
            if step in (1, 2) and rank == 0:
                model(batch(rank, step))
                if step == 1:
                    torch.ones(1, requires_grad=True).sum().backward()
                optimizer.step()
            else:
                train(model, optimizer, rank, step)
            ranks.train(step, without=[0] if step in (1, 2) else [])
            assert_equals(model, ranks, rank, f"{row.name}, step {step}")


def an_overflow_makes_one_rank_skip_alone(rank: int) -> None:
    for row in ROWS:
        model, optimizer, ranks = begun(rank, row)
        scaler = torch.amp.GradScaler("cpu", init_scale=1.0, growth_interval=1000)
        skipping = (1, 3)
        for step in range(4):
            value = loss(model, batch(rank, step))
            overflows = step in skipping and rank == 0
            scaler.scale(value * float("inf") if overflows else value).backward()
            # The other ranks may wait here until rank 0 begins its next step, or the model is closed.
            scaler.step(optimizer)
            scaler.update(1.0)
            optimizer.zero_grad()
            ranks.train(step, stepping=range(1 if step in skipping else 0, bagua.get_world_size()))
            if not (overflows and row.after_optimizers):
                assert_equals(model, ranks, rank, f"{row.name}, step {step}")
        # The last step of rank 0 was skipped too: wrapping the model again communicates what it owes.
        model.with_bagua([optimizer], row.algorithm())
        train(model, optimizer, rank, 9)


def a_model_trains_on_a_sub_group(rank: int) -> None:
    size = bagua.get_world_size()
    members = list(range(max(0, size - 2), size))
    group = bagua.new_group(members)
    if rank not in members:
        return
    place = members.index(rank)
    for row in [*ROWS, *map(of_mode, PEER_SELECTION_MODES)]:
        model, optimizer = wrapped(place, row.algorithm(), row.net, process_group=group)
        ranks = row.simulate(made_on_rank_0(row.net), len(members))
        for step in range(2):
            train(model, optimizer, place, step)
            ranks.train(step)
            assert_equals(model, ranks, place, f"{row.name}, step {step}")


def of_mode(mode: str) -> Row:
    return Row(
        mode, lambda: DecentralizedAlgorithm(False, mode), lambda model, size: Decentralized(model, size, mode), Net
    )


def resumable() -> Iterator[tuple[Algorithm, Callable[[], Net], Sequence[str]]]:
    """Algorithms, their nets, and what they remember of each parameter."""
    for hierarchical in (False, True):
        for mode in PEER_SELECTION_MODES:
            if is_mode_of(mode, hierarchical):
                yield DecentralizedAlgorithm(hierarchical, mode, communication_interval=3), Net, ()
        for codec in (neutral.Codec("minmax_u8"), neutral.Codec("random_k", k=0.4, seed=3)):
            algorithm = LowPrecisionDecentralizedAlgorithm(hierarchical, communication_interval=3, compression=codec)
            yield algorithm, functools.partial(Net, other=torch.float16), tuple(REPLICAS)


@pytest.mark.slow
def a_run_resumes_to_the_bit(rank: int) -> None:
    for (algorithm, net, remembered), do_flatten in itertools.product(resumable(), (True, False)):
        what = f"{algorithm.describe()} {do_flatten=}"
        whole, optimizer = wrapped(rank, algorithm, net, do_flatten=do_flatten)
        for step in range(5):
            train(whole, optimizer, rank, step)
        states = saved(whole, optimizer)
        state = states[2]
        # One rank alone has no one to take weights from.
        rounds = 0 if bagua.get_world_size() == 1 and not remembered else 2
        assert (state["algorithm"], state["step"], state["round"]) == (whole.bagua_algorithm.name, 5, rounds)
        names = {name for name, _ in whole.named_parameters()}
        assert state.keys() == {"algorithm", "step", "round", "rank", "world_size", "members", *remembered}
        assert all(state[kind].keys() == names for kind in remembered)
        # Another bucket size takes the same state.
        resumed, other = wrapped(rank, algorithm, net, do_flatten=do_flatten, bucket_size=None if remembered else 16)
        small, _ = wrapped(rank, algorithm, net, do_flatten=do_flatten, bucket_size=1)
        small.bagua_algorithm.load_state_dict(state)
        for kind in remembered:
            again = small.bagua_algorithm.state_dict()[kind]
            assert all(torch.equal(again[name], state[kind][name]) for name in names)
        # A forward before the states are loaded begins a step that ends there, and a backward leaves nothing behind.
        value = loss(resumed, batch(rank, 99))
        if remembered:
            value.backward()
            resumed.zero_grad()
        load(resumed, other, states)
        for step in range(5, 10):
            train(whole, optimizer, rank, step)
            train(resumed, other, rank, step)
            for a, b in zip(whole.parameters(), resumed.parameters(), strict=True):
                assert torch.equal(a, b), f"{what} step {step}"
        for kind in remembered:
            with pytest.raises(ValueError, match=f"'{kind}'"):
                resumed.bagua_algorithm.load_state_dict({**state, kind: {}})


def complex_parameters_are_refused(rank: int) -> None:
    for row in ROWS:
        model = torch.nn.Linear(3, 2)
        model.phase = torch.nn.Parameter(torch.zeros(2, dtype=torch.complex64))
        with pytest.raises(TypeError, match=r"'phase' is torch\.complex64"):
            model.with_bagua([sgd(model)], row.algorithm())


CASES = cases_in(globals())

test = each_case(CASES, 1, *HOSTED, timeout=60)
