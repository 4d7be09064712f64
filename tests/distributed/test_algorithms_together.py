"""Behaviour of all algorithms: switching, resuming, several models. Each algorithm is a row of the table."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import bagua as neutral
import bagua.torch_api as bagua
from bagua.torch_api.algorithms import (
    Algorithm,
    AsyncModelAverageAlgorithm,
    ByteGradAlgorithm,
    DecentralizedAlgorithm,
    DiLoCoAlgorithm,
    GradientAllReduceAlgorithm,
    LocalSGDAlgorithm,
    LowPrecisionDecentralizedAlgorithm,
    PowerSGDAlgorithm,
    QAdamAlgorithm,
    QAdamOptimizer,
)
from tests.distributed.states import load, saved
from tests.distributed.torch_ranks import cases_in, each_case, same_everywhere

pytestmark = pytest.mark.slow

#: Bytes of a bucket: several buckets in the models of this file, of other tensors with each.
SMALL, OTHER = 96, 200


def net() -> torch.nn.Module:
    return torch.nn.Sequential(
        torch.nn.Linear(5, 7), torch.nn.BatchNorm1d(7), torch.nn.Tanh(), torch.nn.Linear(7, 4), torch.nn.Linear(4, 3)
    )


def sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


@dataclass(frozen=True)
class Entry:
    """One algorithm with options."""

    name: str
    #: Called with the model's optimizer.
    make: Callable[[torch.optim.Optimizer], Algorithm]
    #: The ranks' weights are equal after 10 steps.
    keeps_equal: bool = True
    #: The same values whatever the bucket size is: codecs that encode each element by itself, and no error feedback,
    #: whose memory is at the rank that encodes an element a second time.
    any_bucket_size: bool = True
    #: One object may serve several models.
    several_models: bool = True
    #: Works with GradScaler.
    takes_scaled_gradients: bool = True
    #: Two runs give the same bits: no thread decides when ranks communicate.
    repeatable: bool = True
    #: do_flatten=False is possible.
    may_be_scattered: bool = True
    optimizer: Callable[[torch.nn.Module], torch.optim.Optimizer] = sgd


def bytegrad(codec: str, feedback: bool, **options: Any) -> Callable[[object], Algorithm]:
    compression = neutral.Codec(codec, **options)
    return lambda _: ByteGradAlgorithm(False, compression=compression, error_feedback=feedback)


TABLE = [
    Entry("gradient_allreduce", lambda _: GradientAllReduceAlgorithm()),
    Entry("bytegrad by host", lambda _: ByteGradAlgorithm(), any_bucket_size=False),
    Entry("bytegrad minmax_u8", bytegrad("minmax_u8", False), any_bucket_size=False),
    Entry("bytegrad minmax_u8 feedback", bytegrad("minmax_u8", True), any_bucket_size=False),
    Entry("bytegrad bf16", bytegrad("bf16", False)),
    Entry("bytegrad f16 feedback", bytegrad("f16", True), any_bucket_size=False),
    Entry("bytegrad top_k feedback", bytegrad("top_k", True, k=0.3), any_bucket_size=False),
    Entry("bytegrad random_k feedback", bytegrad("random_k", True, k=0.3), any_bucket_size=False),
    Entry("bytegrad onebit feedback", bytegrad("onebit", True), any_bucket_size=False),
    Entry("bytegrad block_i8", bytegrad("block_i8", False, block=16), any_bucket_size=False),
    Entry("powersgd", lambda _: PowerSGDAlgorithm(1)),
    Entry("powersgd cold", lambda _: PowerSGDAlgorithm(2, warm_start=False, min_compression=1.0)),
    Entry(
        "qadam",
        lambda optimizer: QAdamAlgorithm(optimizer, hierarchical=False),
        any_bucket_size=False,
        several_models=False,
        takes_scaled_gradients=False,
        optimizer=lambda model: QAdamOptimizer(model.parameters(), lr=0.01, warmup_steps=4),
    ),
    # One bucket, whatever its size.
    Entry("decentralized", lambda _: DecentralizedAlgorithm(), keeps_equal=False, any_bucket_size=False),
    Entry(
        "decentralized ring",
        lambda _: DecentralizedAlgorithm(False, "ring", 2),
        keeps_equal=False,
        any_bucket_size=False,
    ),
    Entry(
        "low_precision_decentralized",
        lambda _: LowPrecisionDecentralizedAlgorithm(False, 2),
        keeps_equal=False,
        any_bucket_size=False,
    ),
    # A codec that draws, differently in each round of each model.
    Entry(
        "low_precision_decentralized random_k",
        lambda _: LowPrecisionDecentralizedAlgorithm(False, compression=neutral.Codec("random_k", k=0.4, seed=3)),
        keeps_equal=False,
        any_bucket_size=False,
    ),
    Entry("local_sgd", lambda _: LocalSGDAlgorithm(5)),
    Entry("local_sgd every step", lambda _: LocalSGDAlgorithm(1)),
    Entry("diloco", lambda _: DiLoCoAlgorithm(5)),
    Entry(
        "diloco minmax_u8 feedback",
        lambda _: DiLoCoAlgorithm(5, hierarchical=False, compression="minmax_u8", error_feedback=True),
        any_bucket_size=False,
    ),
    Entry(
        "async",
        lambda _: AsyncModelAverageAlgorithm(sync_interval_ms=5),
        keeps_equal=False,
        any_bucket_size=False,
        repeatable=False,
        may_be_scattered=False,
    ),
    Entry(
        "async after two steps",
        lambda _: AsyncModelAverageAlgorithm(sync_interval_ms=5, warmup_steps=2),
        keeps_equal=False,
        any_bucket_size=False,
        repeatable=False,
        may_be_scattered=False,
    ),
    Entry(
        "async in its warm-up",
        lambda _: AsyncModelAverageAlgorithm(warmup_steps=1000),
        may_be_scattered=False,
    ),
]


def data(rank: int, step: int) -> torch.Tensor:
    return torch.randn(6, 5, generator=torch.Generator().manual_seed(1000 * rank + step))


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, rank: int, first: int, last: int) -> float:
    """Steps first to last - 1; the last loss."""
    loss = torch.zeros(())
    for step in range(first, last):
        optimizer.zero_grad()
        loss = model(data(rank, step)).square().mean()
        loss.backward()
        optimizer.step()
    return loss.item()


def values(model: torch.nn.Module) -> list[torch.Tensor]:
    return [*model.parameters(), *model.buffers()]


def averages_now(model: torch.nn.Module) -> bool:
    """Returns True if the weights may change at any moment, on one rank a little before the others."""
    stats = getattr(model.bagua_algorithm, "stats", None)
    return stats is not None and stats()["state"] == "running"


def equal(mine: list[torch.Tensor], theirs: list[torch.Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(mine, theirs, strict=True))


def one_model_is_trained_with_each_in_turn(rank: int) -> None:
    model = net()
    for entry in [*TABLE, *reversed(TABLE)]:
        optimizer = entry.optimizer(model)
        model.with_bagua([optimizer], entry.make(optimizer), bucket_size=SMALL)
        if not averages_now(model):
            assert same_everywhere(*values(model)), entry.name
        loss = train(model, optimizer, rank, 0, 10)
        assert torch.isfinite(torch.tensor(loss)), entry.name
        if entry.keeps_equal:
            assert same_everywhere(*model.parameters()), entry.name
        assert model.bagua_ddp.step == 9


def a_resumed_run_goes_on_to_the_bit(rank: int) -> None:
    for entry in TABLE:
        if not entry.repeatable:
            continue
        torch.manual_seed(rank)
        model = net()
        optimizer = entry.optimizer(model)
        model.with_bagua([optimizer], entry.make(optimizer), bucket_size=SMALL)
        train(model, optimizer, rank, 0, 7)
        states = saved(model, optimizer)
        train(model, optimizer, rank, 7, 13)

        resumed = net()
        optimizer = entry.optimizer(resumed)
        bucket_size = OTHER if entry.any_bucket_size else SMALL
        resumed.with_bagua([optimizer], entry.make(optimizer), bucket_size=bucket_size)
        assert (len(resumed.bagua_buckets) == len(model.bagua_buckets)) != entry.any_bucket_size
        load(resumed, optimizer, states)
        train(resumed, optimizer, rank, 7, 13)
        assert equal(values(resumed), values(model)), entry.name
        assert _same(resumed.bagua_algorithm.state_dict(), model.bagua_algorithm.state_dict()), entry.name


def _same(mine: Any, theirs: Any) -> bool:
    if isinstance(mine, dict):
        return mine.keys() == theirs.keys() and all(_same(mine[key], theirs[key]) for key in mine)
    return torch.equal(mine, theirs) if isinstance(mine, torch.Tensor) else bool(mine == theirs)


def a_state_of_another_algorithm_is_refused(rank: int) -> None:
    found: dict[str, dict[str, Any]] = {}
    for entry in TABLE:
        model = net()
        optimizer = entry.optimizer(model)
        model.with_bagua([optimizer], entry.make(optimizer))
        algorithm = model.bagua_algorithm
        for name, state in found.items():
            if name != algorithm.name:
                with pytest.raises(ValueError, match=rf"(?s)'{name}'.*'{algorithm.name}'"):
                    algorithm.load_state_dict(state)
        found[algorithm.name] = algorithm.state_dict()
    assert len(found) > 3


def a_state_of_another_number_of_ranks_is_refused_where_it_belongs_to_one_rank(rank: int) -> None:
    """Only what all ranks have alike, as the momentum of DiLoCo, is of use to other ranks."""
    of_one_rank = {"error", "weight", "left_peer_weight", "right_peer_weight"}
    size = bagua.get_world_size()
    refused = []
    for entry in TABLE:
        model = net()
        optimizer = entry.optimizer(model)
        model.with_bagua([optimizer], entry.make(optimizer), bucket_size=SMALL)
        algorithm = model.bagua_algorithm
        state = algorithm.state_dict()
        assert (state["rank"], state["world_size"]) == (rank, size), entry.name
        before = copy.deepcopy(state)
        for other, pattern in (
            (
                {"world_size": size + 1},
                rf"state of rank {rank} of {size + 1}, and this is rank {rank} of {size}: its '",
            ),
            ({"rank": rank + 1}, rf"state of rank {rank + 1} of {size}, and this is rank {rank} of {size}: its '"),
            (
                {"members": [0, 1, 2, 3, 4]},
                rf"state of rank {rank} of {size} among \[0, 1, 2, 3, 4\], and this is it among \[0, ",
            ),
        ):
            if of_one_rank & state.keys():
                with pytest.raises(ValueError, match=pattern):
                    algorithm.load_state_dict({**state, **other})
                assert _same(algorithm.state_dict(), before), entry.name
                refused.append(entry.name)
            else:
                algorithm.load_state_dict({**state, **other})
    if size > 1:
        assert {"powersgd", "low_precision_decentralized", "diloco minmax_u8 feedback"} <= {*refused}
        assert not {"qadam", "local_sgd", "diloco", "decentralized"} & {*refused}


def one_overflow_makes_every_rank_skip_where_gradients_travel(rank: int) -> None:
    for make in (
        lambda _: GradientAllReduceAlgorithm(),
        bytegrad("minmax_u8", False),
        bytegrad("f16", True),
        bytegrad("onebit", True),
        bytegrad("top_k", True, k=0.2),
        bytegrad("block_i8", False),
        lambda _: PowerSGDAlgorithm(1),
    ):
        model = net()
        optimizer = sgd(model)
        algorithm = make(optimizer)
        model.with_bagua([optimizer], algorithm, bucket_size=SMALL)
        scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
        for step in range(5):
            optimizer.zero_grad()
            before = [param.detach().clone() for param in model.parameters()]
            overflow = step == 2 and rank == bagua.get_world_size() - 1
            loss = model(data(rank, step)).square().mean() * (float("inf") if overflow else 1.0)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            skipped = equal(before, list(model.parameters()))
            assert skipped == (step == 2), f"{algorithm.describe()} step {step}"
            assert scaler.get_scale() == (16.0 if step < 2 else 8.0)
            assert same_everywhere(*model.parameters())
        assert all(torch.isfinite(param).all() for param in model.parameters())


def one_overflow_ends_with_weights_that_are_equal_and_finite_where_weights_travel(rank: int) -> None:
    for entry in TABLE:
        if not entry.takes_scaled_gradients:
            continue
        model = net()
        optimizer = entry.optimizer(model)
        model.with_bagua([optimizer], entry.make(optimizer), bucket_size=SMALL)
        scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
        for step in range(10):
            optimizer.zero_grad()
            # In a step with a round of local_sgd and diloco, and in one without.
            overflow = step in (2, 4) and rank == 0
            loss = model(data(rank, step)).square().mean() * (float("inf") if overflow else 1.0)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        assert all(torch.isfinite(param).all() for param in model.parameters()), entry.name
        if entry.keeps_equal:
            assert same_everywhere(*model.parameters()), entry.name


CASES = cases_in(globals())


test = each_case(CASES, 2, 3, "2+2", "2+1")
