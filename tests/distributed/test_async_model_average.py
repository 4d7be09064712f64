"""Asynchronous model averaging: where the weights of ranks go that train at different speeds, and who takes part."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch

import bagua.torch_api as bagua
from bagua.errors import BaguaError, BaguaTimeoutError, MismatchError
from bagua.torch_api.algorithms import Algorithm, GradientAllReduceAlgorithm
from bagua.torch_api.algorithms.async_model_average import AsyncModelAverageAlgorithm, AsyncModelAverageAlgorithmImpl
from tests.distributed.async_ranks import (
    LAYOUTS,
    NEVER,
    SHORT,
    Slopes,
    all_are,
    fill_together,
    gathered,
    rest,
    rounds,
    rounds_pass,
    same_bits,
    step,
    until,
    values,
    wrapped,
)
from tests.distributed.torch_ranks import cases_in, each_case, hosts


def trained_alone(model: Slopes, momentum: float, slope: float, count: int) -> list[torch.Tensor]:
    """How far a rank gets in so many steps, in float64."""
    alone = copy.deepcopy(model).to(torch.float64)
    optimizer = torch.optim.SGD(alone.parameters(), lr=2**-6, momentum=momentum)
    begin = [param.detach().clone() for param in alone.parameters()]
    for _ in range(count):
        step(alone, optimizer, slope)
    return [param.detach() - old for param, old in zip(alone.parameters(), begin, strict=True)]


def ranks_at_different_speeds_keep_the_sum_and_all_progress(rank: int) -> None:
    size = bagua.get_world_size()
    for dtypes, momentum in (
        ((torch.float32,), 0.0),
        ((torch.float64,), 0.0),
        ((torch.float16,), 0.0),
        ((torch.float32,), 0.5),
        ((torch.float32, torch.float64, torch.bfloat16), 0.0),
    ):
        model, optimizer, impl = wrapped(*dtypes, momentum=momentum)
        assert len(model.bagua_buckets) == len(dtypes)
        begin = Slopes(*dtypes)
        slope, count = float(rank + 1), 0
        # Every rank trains alone what all have trained: no more than that takes a moment, however slow the rounds are.
        while count < 20 * (rank + 1) or (rounds(model) < 3 and count < 300):
            step(model, optimizer, slope)
            count += 1
        found = rest(model)
        assert same_bits(*found)
        assert impl.stats()["ranks"] == list(range(size))
        counts = [int(each[0]) for each in gathered(count)]
        assert rank == 0 or counts[rank] >= 20 * (rank + 1)
        progress = [trained_alone(begin, momentum, other + 1.0, counts[other]) for other in range(size)]
        for at, (param, old) in enumerate(zip(found, begin.parameters(), strict=True)):
            mean = torch.stack([parts[at] for parts in progress]).mean(dim=0)
            expected = old.detach().to(torch.float64) + mean
            operations = sum(counts) + 3 * rounds(model)
            allowed = operations * torch.finfo(param.dtype).eps * float(expected.abs().max())
            # Far below what another divisor or the loss of a rank's progress would change.
            assert allowed < float(mean.abs().max()) / 3 or param.dtype not in (torch.float32, torch.float64)
            assert float((param.to(torch.float64) - expected).abs().max()) <= allowed, (param.dtype, momentum)


def ranks_at_rest_become_the_average_in_rank_order_to_the_bit(rank: int) -> None:
    size = bagua.get_world_size()
    for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
        model, _, impl = wrapped(dtype, interval=NEVER)
        each = [torch.randn(37, generator=torch.Generator().manual_seed(other)).to(dtype) for other in range(size)]
        with impl.lock(model), torch.no_grad():
            model.weight0.copy_(each[rank])
        impl.synchronize(model)
        wide = dtype if dtype.itemsize > 2 else torch.float32
        total = each[0].to(wide)
        for other in each[1:]:
            total = total + other.to(wide)
        (found,) = values(model)
        assert same_bits(found)
        # The sums of a host's ranks are rounded to the type before they travel to other hosts.
        if wide == dtype or len(hosts()) == 1:
            assert torch.equal(found, (total / size).to(dtype)), dtype
        assert rounds(model) == 1


def net(count: int = 4) -> torch.nn.Module:
    return torch.nn.Sequential(
        torch.nn.Linear(5, 7), torch.nn.BatchNorm1d(7), torch.nn.Tanh(), torch.nn.Linear(7, count)
    )


def batch(rank: int, number: int) -> torch.Tensor:
    return torch.randn(6, 5, generator=torch.Generator().manual_seed(1000 * rank + number))


def the_warm_up_is_gradient_allreduce_to_the_bit(rank: int) -> None:
    model, other = net(), net()
    other.load_state_dict(model.state_dict())
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9) for each in (model, other)]
    model.with_bagua(optimizers[:1], AsyncModelAverageAlgorithm(sync_interval_ms=SHORT, warmup_steps=4))
    other.with_bagua(optimizers[1:], GradientAllReduceAlgorithm())
    impl = model.bagua_algorithm
    for number in range(4):
        # None of this counts as a step: an evaluation, a forward without a backward, a micro-batch.
        for each, optimizer in zip((model, other), optimizers, strict=True):
            each.eval()
            each(batch(rank, 50 + number))
            each.train()
            each(batch(rank, 60 + number))
            optimizer.zero_grad()
            with bagua.distributed.no_sync(each):
                each(batch(rank, 70 + number)).square().mean().backward()
            each(batch(rank, number)).square().mean().backward()
            optimizer.step()
        assert impl.stats()["state"] == "warmup"
        assert impl.stats()["ranks"] == list(range(bagua.get_world_size()))
        assert all(
            torch.equal(a, b) for a, b in zip(model.state_dict().values(), other.state_dict().values(), strict=True)
        )
    model.eval()
    model(batch(rank, 99))
    model.train()
    impl.synchronize(model)
    assert (impl.stats()["state"], rounds(model)) == ("warmup", 0)
    model[1].running_mean.fill_(rank)
    model(batch(0, 100)).square().mean().backward()
    assert impl.stats()["state"] == "running"
    # The buffers of rank 0 do not travel any more: all have seen the same samples since.
    assert not same_bits(model[1].running_mean)
    rounds_pass(model)
    assert same_bits(*rest(model))


def an_abort_in_the_warm_up_counts_when_it_is_over(rank: int) -> None:
    model, optimizer, impl = wrapped(warmup_steps=2)
    if rank == 0:
        impl.abort(model)
        impl.abort(model, timeout=5)
    for _ in range(3):
        step(model, optimizer, 1.0)
    fill_together(model, float(rank))
    if rank == 0:
        assert impl.stats()["state"] == "stopped"
        assert all_are(model, 0.0)
        assert rounds(model) == 0
    else:
        until("a round without rank 0", lambda: 0 not in impl.stats()["ranks"])
        rounds_pass(model, 5)
        # The mean of 1, or of 1 and 2, or of 1, 2 and 3.
        assert all_are(model, sum(range(bagua.get_world_size())) / (bagua.get_world_size() - 1))
    bagua.barrier()
    assert rank or all_are(model, 0.0)
    if rank == 0:
        impl.resume(model)
        until("a round with all", lambda: rounds(model) > 1)
    bagua.barrier()
    assert same_bits(*rest(model))


def an_aborted_rank_is_left_alone_and_not_counted(rank: int) -> None:
    size = bagua.get_world_size()
    model, optimizer, impl = wrapped()
    views = [impl.stats()["view"]]
    for away in range(size):
        if rank == away:
            impl.abort(model)
            impl.abort(model)
            assert impl.stats()["state"] == "stopped"
            with pytest.raises(ValueError, match="does not take part"):
                impl.synchronize(model)
        fill_together(model, 8.0 * rank)
        others = [other for other in range(size) if other != away]
        if rank == away:
            done = rounds(model)
            step(model, optimizer, 64.0)
            assert all_are(model, 8.0 * rank - 1.0)
            bagua.barrier()
            assert all_are(model, 8.0 * rank - 1.0)
            assert rounds(model) == done
            impl.resume(model)
            impl.resume(model)
            assert impl.stats()["state"] == "running"
        else:
            until("a round of those left", lambda others=others: impl.stats()["ranks"] == others)
            rounds_pass(model)
            mean = 8.0 * sum(others) / len(others)
            assert all(torch.allclose(part, torch.tensor(mean)) for part in values(model))
            bagua.barrier()
        until("a round of all", lambda: impl.stats()["ranks"] == list(range(size)))
        found = rest(model)
        assert same_bits(*found)
        # Its step counts, as the sum does.
        assert torch.allclose(found[0], torch.tensor((8.0 * sum(range(size)) - 1.0) / size))
        views.append(impl.stats()["view"])
    assert all(later > earlier for earlier, later in itertools.pairwise(views))


def synchronize_makes_ranks_equal_at_once_or_names_who_never_called(rank: int) -> None:
    size = bagua.get_world_size()
    model, optimizer, impl = wrapped()
    for count in range(3):
        for _ in range(5 * rank + count):
            step(model, optimizer, float(rank))
        impl.synchronize(model)
        with impl.lock(model):
            # No other round has begun: its interval is not over. What a later one writes is equal on all as well.
            found = values(model)
        assert torch.allclose(found[0], values(model)[0])
        assert same_bits(*rest(model))
    with impl.lock(model):
        for call in (impl.synchronize, impl.abort):
            with pytest.raises(BaguaError, match="holds the weight lock"):
                call(model)
    bagua.barrier()
    if rank:
        with pytest.raises(BaguaTimeoutError, match=r"synchronize.*rank 0|rank 0.*synchronize") as caught:
            # The other ranks that call do so long before, also on a busy machine.
            impl.synchronize(model, timeout=8.0)
        assert list(caught.value.missing) == [0]
    bagua.barrier()
    # It did no harm.
    rounds_pass(model)
    impl.synchronize(model)
    if size > 2:
        # Those that take part suffice.
        if rank == 0:
            impl.abort(model)
        bagua.barrier()
        if rank:
            impl.synchronize(model)
        bagua.barrier()


class Wrapper(torch.nn.Module):
    """A wrapper that holds a model as ``inner``, like wrappers similar to DDP."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner


def the_model_its_ddp_and_wrappers_are_known_and_others_refused(rank: int) -> None:
    model, _, impl = wrapped()
    other, _, _ = wrapped()
    for known in (model, model.bagua_ddp, Wrapper(model), Wrapper(Wrapper(model))):
        impl.abort(known)
        impl.resume(known)
        # While this rank is out, the others would synchronize without it.
        bagua.barrier()
        impl.synchronize(known)
        bagua.barrier()
        with impl.lock(known):
            pass
    for unknown in (other, Slopes(), other.bagua_ddp, Wrapper(other), None, 3):
        for call in (impl.abort, impl.resume, impl.synchronize):
            with pytest.raises(ValueError, match="is not the model that this algorithm averages"):
                call(unknown)
        with pytest.raises(ValueError, match="is not the model"), impl.lock(unknown):
            pass
    bagua.barrier()


def staleness_counts_the_steps_that_a_round_took(rank: int) -> None:
    model, optimizer, impl = wrapped()
    seen = 0

    def steps_in_a_round() -> bool:
        nonlocal seen
        step(model, optimizer, 1.0)
        seen = max(seen, impl.stats()["staleness"])
        return seen > 0

    until("a round with a step in it", steps_in_a_round, 20.0)
    assert seen < 10_000
    bagua.barrier()
    rounds_pass(model, 3)
    assert impl.stats()["staleness"] == 0
    bagua.barrier()


def a_codec_takes_ranks_to_equal_weights_near_the_average(rank: int) -> None:
    size = bagua.get_world_size()
    for compression in ("minmax_u8", "bf16"):
        model, _, impl = wrapped(compression=compression)
        rounds_pass(model, 2)
        with impl.lock(model), torch.no_grad():
            model.weight0.add_(torch.linspace(-1.0, 1.0, 37) * rank)
        found = rest(model)
        assert same_bits(*found)
        expected = Slopes().weight0.detach() + torch.linspace(-1.0, 1.0, 37) * sum(range(size)) / size
        assert float((found[0] - expected).abs().max()) < 0.05, compression
        if len(hosts()) == 3:
            sent, done = impl.stats()["wire_bytes_sent"], rounds(model)
            assert sent < 1000 * (done + 5)


def models_and_options_that_do_not_fit_are_refused_before_any_communication(rank: int) -> None:
    last = bagua.get_world_size() - 1
    whole = torch.nn.Linear(2, 2)
    with pytest.raises(ValueError, match="do_flatten=True"):
        whole.with_bagua([], AsyncModelAverageAlgorithm(), do_flatten=False)
    with pytest.raises(ValueError, match=r"warmup_steps=3 .*was given none"):
        whole.with_bagua([], AsyncModelAverageAlgorithm(warmup_steps=3))
    complex_ = torch.nn.Module()
    complex_.register_parameter("weight", torch.nn.Parameter(torch.zeros(2, dtype=torch.complex64)))
    with pytest.raises(TypeError, match=r"'weight' is torch\.complex64"):
        complex_.with_bagua([], AsyncModelAverageAlgorithm())
    double = torch.nn.Linear(2, 2).double()
    with pytest.raises(TypeError, match="parameter 'weight'"):
        double.with_bagua([], AsyncModelAverageAlgorithm(compression="minmax_u8"))
    # One rank's error is a mismatch on the others.
    kind = ValueError if rank == last else MismatchError
    with pytest.raises(kind):
        whole.with_bagua([], AsyncModelAverageAlgorithm(), do_flatten=rank != last)
    optimizer = torch.optim.SGD(whole.parameters(), lr=0.1)
    whole.with_bagua([optimizer], AsyncModelAverageAlgorithm(sync_interval_ms=SHORT))
    assert same_bits(*rest(whole))


CASES = cases_in(globals())

test = each_case(CASES, *LAYOUTS)


def test_options_out_of_range_are_refused() -> None:
    for mode in ("shift_one", "", None):
        with pytest.raises(ValueError, match="must be 'all'"):
            AsyncModelAverageAlgorithm(mode)  # type: ignore[arg-type]
    for interval in (0, -1, float("nan")):
        with pytest.raises(ValueError, match="sync_interval_ms must be positive"):
            AsyncModelAverageAlgorithm(sync_interval_ms=interval)
    with pytest.raises(ValueError, match="warmup_steps must not be negative; got -1"):
        AsyncModelAverageAlgorithm(warmup_steps=-1)
    with pytest.raises(ValueError, match="nonsense"):
        AsyncModelAverageAlgorithm(compression="nonsense")
    with pytest.raises(TypeError):
        AsyncModelAverageAlgorithm("all", 500, 0, "bf16")  # type: ignore[misc]


def test_it_is_registered_by_name() -> None:
    assert Algorithm.init("async", warmup_steps=3).describe() == (
        "async(peer_selection_mode='all', sync_interval_ms=500, warmup_steps=3, compression=None)"
    )
    assert AsyncModelAverageAlgorithmImpl.__init__.__code__.co_varnames[1] == "process_group"
