"""The compressed hook in torch's DistributedDataParallel, on gloo and on "bagua": every gradient against the oracle of
compressed all_reduce, which the algorithm bytegrad is tested against too.
"""

import functools
import gc
import io
import os
import signal
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

import bagua
from bagua.hooks import CompressedState, compressed_hook
from tests.distributed.c10d_ranks import LIMIT, Pair, cases_in, each_case, run_cases
from tests.distributed.compressed_oracle import CompressedAllReduce
from tests.waits import until
from tests.world import World

CODECS: list[tuple[str, dict[str, Any]]] = [
    ("minmax_u8", {}),
    ("f16", {}),
    ("bf16", {}),
    ("block_i8", {"block": 16}),
    ("top_k", {"k": 0.2}),
    ("random_k", {"k": 0.3, "seed": 5}),
    ("onebit", {}),
    ("int4", {}),
    ("top_k", {"k": 3, "chunk": 20}),
]
STEPS = 5


class Call(NamedTuple):
    """A bucket that was reduced."""

    index: int
    places: list[int]
    sizes: list[int]
    given: torch.Tensor
    result: torch.Tensor


class Mixed(nn.Module):
    """Layers of two element types, one of which only some steps use."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 4))
        self.head = nn.Linear(4, 3).half()
        self.sometimes = nn.Linear(5, 3)

    def forward(self, x: torch.Tensor, step: int) -> torch.Tensor:
        found: torch.Tensor = self.head(self.body(x).half()).float()
        return found + self.sometimes(x) if step % 2 else found


def net() -> nn.Module:
    torch.manual_seed(3)
    return Mixed()


def data(rank: int, step: int) -> torch.Tensor:
    return torch.randn(6, 5, generator=torch.Generator().manual_seed(1000 * rank + step))


def wrapped(
    group: dist.ProcessGroup, state: CompressedState, calls: list[Call] | None = None, **options: Any
) -> DistributedDataParallel:
    """A model whose parameters need several buckets, with the hook; `calls` gets each bucket."""
    module = net()
    model = DistributedDataParallel(module, process_group=group, bucket_cap_mb=100 / 2**20, **options)
    model.register_comm_hook(state, compressed_hook if calls is None else recording(module, calls))
    return model


def compressed(codec: str, options: dict[str, Any], group: dist.ProcessGroup, feedback: bool) -> CompressedState:
    return CompressedState(bagua.Codec(codec, **options), error_feedback=feedback, process_group=group)


def weights(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def equal(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(map(torch.equal, one, other))


def check_equal_on_all_ranks(model: nn.Module, pair: Pair) -> None:
    everyone: list[Any] = [None] * pair.size
    dist.all_gather_object(everyone, weights(model), group=pair.gloo)
    assert all(equal(each, everyone[0]) for each in everyone)


def train(model: nn.Module, rank: int, steps: range, *, alternates: bool = False, accumulates: bool = False) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in steps:
        if accumulates:
            with model.no_sync():
                model(data(rank, 100 + step), 1).square().mean().backward()
        model(data(rank, step), step if alternates else 1).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def recording(model: nn.Module, calls: list[Call]) -> Callable[..., torch.futures.Future[torch.Tensor]]:
    """The hook, which also keeps what it was given and what became of it."""
    places = {id(parameter): place for place, parameter in enumerate(model.parameters())}

    def hook(state: CompressedState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        parameters = bucket.parameters()
        found = [places[id(each)] for each in parameters], [each.numel() for each in parameters]
        # Results may come in another order on each rank.
        call, number = Call(bucket.index(), *found, bucket.buffer().clone(), torch.empty(0)), len(calls)
        calls.append(call)

        def kept(future: torch.futures.Future[torch.Tensor]) -> torch.Tensor:
            calls[number] = call._replace(result=future.value().clone())
            return future.value()

        return compressed_hook(state, bucket).then(kept)

    return hook


def check_against_oracle(
    calls: list[Call],
    pair: Pair,
    codec: str,
    options: dict[str, Any],
    feedback: bool,
    of_ranks: Sequence[float] | None = None,
) -> None:
    """Each result is the oracle's, bit for bit, from what all ranks have given, with the weights `of_ranks`."""
    times = [1.0] * pair.size if of_ranks is None else of_ranks
    scale = pair.size / sum(times)
    everyone: list[list[Call]] = [[] for _ in range(pair.size)]
    dist.all_gather_object(everyone, calls, group=pair.gloo)
    oracles: dict[int, CompressedAllReduce] = {}
    errors: dict[int, list[Any]] = {}
    for number, call in enumerate(calls):
        inputs = [theirs[number].given.mul(weight).numpy() for theirs, weight in zip(everyone, times, strict=True)]
        make = functools.partial(CompressedAllReduce, codec, options, pair.size, pair.size, True, feedback=feedback)
        oracle = oracles.setdefault(call.index, make())
        none = [[np.zeros(size, np.float32)] * pair.size for size in call.sizes]
        owed = [errors.get(place, zeros) for place, zeros in zip(call.places, none, strict=True)]
        oracle.errors = [np.concatenate([each[member] for each in owed]) for member in range(pair.size)]
        expected = torch.from_numpy(oracle.step(inputs)).mul(scale).numpy()
        assert np.array_equal(call.result.numpy(), expected), (number, call.index, codec)
        ends = np.cumsum(call.sizes)[:-1]
        for parts in zip(*(zip(call.places, np.split(each, ends), strict=True) for each in oracle.errors), strict=True):
            errors[parts[0][0]] = [part for _, part in parts]


def gradients_are_the_oracles(pair: Pair) -> None:
    for codec, options in CODECS:
        for feedback in (False, True):
            for group in (pair.gloo, pair.ours):
                calls: list[Call] = []
                model = wrapped(group, compressed(codec, options, group, feedback), calls)
                train(model, pair.rank, range(STEPS))
                assert len({call.index for call in calls}) > 2
                assert {call.given.dtype for call in calls} == {torch.float32, torch.float16}
                check_against_oracle(calls, pair, codec, options, feedback)
                check_equal_on_all_ranks(model, pair)


def ranks_have_weights(pair: Pair) -> None:
    of_ranks = (0.5, 2.0, 0.0, 5.0)[: pair.size]
    for codec, options in CODECS:
        for feedback, group in ((False, pair.ours), (True, pair.gloo)):
            calls: list[Call] = []
            state = compressed(codec, options, group, feedback)
            model = wrapped(group, state, calls)
            state.weight = of_ranks[pair.rank]
            train(model, pair.rank, range(3))
            check_against_oracle(calls, pair, codec, options, feedback, of_ranks)
            calls.clear()
            state.weight = None
            train(model, pair.rank, range(3, 4))
            if not feedback and codec != "random_k":
                check_against_oracle(calls, pair, codec, options, feedback)
            check_equal_on_all_ranks(model, pair)


def no_rank_with_a_weight_is_an_error(pair: Pair) -> None:
    for codec in ("minmax_u8", "top_k"):
        options = {"k": 0.2} if codec == "top_k" else {}
        state = CompressedState(bagua.Codec(codec, **options), process_group=pair.gloo, weight=0)
        model = wrapped(pair.gloo, state)
        with pytest.raises(RuntimeError, match="ValueError: the weight of every rank is 0"):
            train(model, pair.rank, range(1))
    for weight in (-1.0, float("nan")):
        with pytest.raises(ValueError, match="finite"):
            state.weight = weight


def options_of_ddp_change_nothing(pair: Pair) -> None:
    table: list[tuple[dict[str, bool], dict[str, bool]]] = [
        ({"find_unused_parameters": True}, {"alternates": True}),
        ({"static_graph": True}, {}),
        ({"gradient_as_bucket_view": True}, {}),
        ({}, {"accumulates": True}),
        ({"static_graph": True, "gradient_as_bucket_view": True, "broadcast_buffers": False}, {}),
    ]
    codecs: list[tuple[str, dict[str, Any]]] = [("minmax_u8", {}), ("int4", {}), ("onebit", {}), ("top_k", {"k": 0.2})]
    for number, (ddp, how) in enumerate(table):
        for codec, options in codecs:
            feedback = (number + codecs.index((codec, options))) % 2 == 0
            calls: list[Call] = []
            model = wrapped(pair.gloo, compressed(codec, options, pair.gloo, feedback), calls, **ddp)
            train(model, pair.rank, range(STEPS), **how)
            check_against_oracle(calls, pair, codec, options, feedback)
            check_equal_on_all_ranks(model, pair)


def ranks_with_fewer_batches_join(pair: Pair) -> None:
    for feedback in (False, True):
        model = wrapped(pair.gloo, compressed("minmax_u8", {}, pair.gloo, feedback))
        with Join([model]):
            train(model, pair.rank, range(2 + pair.rank))
        check_equal_on_all_ranks(model, pair)


def a_type_that_the_codec_does_not_encode_is_refused(pair: Pair) -> None:
    model = DistributedDataParallel(nn.Linear(2, 2).double(), process_group=pair.gloo)
    model.register_comm_hook(CompressedState(process_group=pair.gloo), compressed_hook)
    with pytest.raises(TypeError, match="codec minmax_u8 cannot encode float64"):
        model(torch.ones(1, 2, dtype=torch.float64)).sum().backward()


def a_state_goes_on_where_it_was_saved(pair: Pair) -> None:
    for codec, options in (("minmax_u8", {}), ("random_k", {"k": 0.3, "seed": 5})):
        state = compressed(codec, options, pair.gloo, True)
        model = wrapped(pair.gloo, state)
        train(model, pair.rank, range(3))
        file = io.BytesIO()
        torch.save([state.state_dict(), model.module.state_dict()], file)
        train(model, pair.rank, range(3, 6))
        file.seek(0)
        saved = torch.load(file, weights_only=True)
        for begins in ("before the first backward", "later"):
            again = compressed(codec, options, pair.gloo, True)
            other = wrapped(pair.gloo, again)
            if begins == "later":
                train(other, pair.rank, range(2))
            again.load_state_dict(saved[0])
            other.module.load_state_dict(saved[1])
            train(other, pair.rank, range(3, 6))
            if begins == "later":  # In its first step a model has other buckets, and so other records.
                assert equal(weights(other), weights(model)), codec
                assert again.state_dict()["calls"] == state.state_dict()["calls"]
            check_equal_on_all_ranks(other, pair)


def a_state_that_does_not_fit_is_refused(pair: Pair) -> None:
    state = compressed("minmax_u8", {}, pair.gloo, True)
    train(wrapped(pair.gloo, state), pair.rank, range(2))
    saved = state.state_dict()
    with pytest.raises(ValueError, match="pass error_feedback=True"):
        compressed("minmax_u8", {}, pair.gloo, False).load_state_dict(saved)
    fewer = {**saved, "errors": saved["errors"][:-1]}
    other = {**saved, "errors": [torch.zeros(3), *saved["errors"][1:]]}
    with pytest.raises(ValueError, match="error memory of 7 parameters, the model 8"):
        state.load_state_dict(fewer)
    with pytest.raises(ValueError, match="parameter 0, in the order of the first backward, has 3 elements"):
        state.load_state_dict(other)
    for wrong, message in ((fewer, "error memory of 7 parameters, the model 8"), (other, "has 3 elements")):
        again = compressed("minmax_u8", {}, pair.gloo, True)
        again.load_state_dict(wrong)
        with pytest.raises(ValueError, match=message):
            train(wrapped(pair.gloo, again), pair.rank, range(1))


def the_threads_end_with_the_model(pair: Pair) -> None:
    def hook_threads() -> list[str]:
        return [thread.name for thread in threading.enumerate() if thread.name.startswith("bagua-hook")]

    gc.collect()
    until(lambda: not hook_threads(), "the threads of earlier models end")
    gc.disable()
    try:
        model = wrapped(pair.gloo, CompressedState(process_group=pair.gloo))
        train(model, pair.rank, range(1))
        assert len(hook_threads()) == 2
        del model
        until(lambda: not hook_threads(), "the threads end")
    finally:
        gc.enable()


def consolidated_ranks_owe_the_same_in_total(pair: Pair) -> None:
    state = compressed("onebit", {}, pair.gloo, True)
    state.consolidate()
    assert state.state_dict()["errors"] == []
    model = wrapped(pair.gloo, state)
    train(model, pair.rank, range(3))
    before: list[Any] = [None] * pair.size
    dist.all_gather_object(before, state.state_dict()["errors"], group=pair.gloo)
    state.consolidate()
    after: list[Any] = [None] * pair.size
    dist.all_gather_object(after, state.state_dict()["errors"], group=pair.gloo)
    for parts in zip(*before, strict=True):
        assert any(part.count_nonzero() for part in parts)
    for theirs in after:
        for error, parts in zip(theirs, zip(*before, strict=True), strict=True):
            torch.testing.assert_close(error, torch.stack(parts).double().mean(0).float())
    # The memory that the next step takes is the one that was replaced.
    train(model, pair.rank, range(3, 5))
    check_equal_on_all_ranks(model, pair)


CASES = cases_in(globals())


def in_the_world(rank: int) -> dict[str, str]:
    return run_cases(rank, CASES)


test = each_case(CASES, 2, 3, 4, run=in_the_world)


def alone(rank: int) -> None:
    dist.init_process_group("gloo", timeout=LIMIT)
    module, plain = net(), net()
    model = DistributedDataParallel(module)
    model.register_comm_hook(CompressedState("onebit", error_feedback=True), compressed_hook)
    train(model, rank, range(STEPS))
    train(plain, rank, range(STEPS))
    assert equal(weights(model), weights(plain))
    dist.destroy_process_group()


def test_a_world_of_one_trains_as_without_a_hook() -> None:
    World(1).run(alone)


def with_a_killed_rank(rank: int) -> str:
    dist.init_process_group("gloo", timeout=LIMIT)
    model = wrapped(dist.group.WORLD, CompressedState())
    train(model, rank, range(2))
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(RuntimeError) as raised:
        train(model, rank, range(2, 100))
    return str(raised.value)


def test_a_killed_rank_ends_the_backward_of_the_others() -> None:
    found, _ = World(2, expect_exit={1: -signal.SIGKILL}).run(with_a_killed_rank)
    assert "gloo" in found.lower()
