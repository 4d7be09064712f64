"""Flags and skipped steps: all ranks agree in the same step, with every algorithm in which ranks have votes."""

from __future__ import annotations

import random
from collections.abc import Callable
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
    PowerSGDAlgorithm,
    QAdamAlgorithm,
    QAdamOptimizer,
)
from tests.distributed.test_set_weight import (
    SHAPES,
    SMALL,
    WRAPPERS,
    Given,
    backward,
    calls,
    equal,
    everybody,
    gradients,
    grads_of,
    inner,
    means_of,
    sgd,
    size,
    wrap,
)
from tests.distributed.torch_ranks import cases_in, each_case, same_everywhere

NAMES = ("stop", "save", "bad batch")

#: Every algorithm in which ranks have votes, and the number of steps in the long test.
TABLE: list[tuple[Callable[[torch.optim.Optimizer], Algorithm], int]] = [
    (lambda _: GradientAllReduceAlgorithm(), 1000),
    (lambda _: GradientAllReduceAlgorithm(average=False), 100),
    (lambda _: ByteGradAlgorithm(False, compression="f16", error_feedback=True), 300),
    (lambda _: ByteGradAlgorithm(), 100),
    (lambda _: PowerSGDAlgorithm(2), 100),
    (lambda optimizer: QAdamAlgorithm(optimizer, hierarchical=False), 100),  # type: ignore[arg-type]
    (lambda _: LocalSGDAlgorithm(1), 100),
    (lambda _: DiLoCoAlgorithm(1, hierarchical=False, compression="f16", error_feedback=True), 100),
    (lambda _: DecentralizedAlgorithm(False), 100),
]


def optimizer_for(make: Callable[..., Algorithm], model: torch.nn.Module) -> torch.optim.Optimizer:
    return QAdamOptimizer(model.parameters(), 0.01, 3) if make is TABLE[5][0] else sgd(model)


def wrapped(
    kind: str, make: Callable[..., Algorithm], flags: Any = NAMES, **options: Any
) -> tuple[Any, torch.optim.Optimizer]:
    model = Given()
    optimizer = optimizer_for(make, model)
    return wrap(kind, make(optimizer), model, optimizer, bucket_size=SMALL, flags=flags, **options)


def all_ranks_agree_in_the_same_step(rank: int) -> None:
    for number, (make, steps) in enumerate(TABLE):
        model, optimizer = wrapped(WRAPPERS[number % 2], make)
        chance = random.Random(number)
        for step in range(steps):
            raised = [{name for name in NAMES if chance.random() < 0.1} for _ in range(size())]
            skipping = [other for other in range(size()) if chance.random() < 0.3]
            for name in raised[rank]:
                bagua.raise_flag(model, name)
            inner(model).zero_grad()
            if rank in skipping:
                bagua.skip_step(model)
            else:
                model(gradients(rank, step)).backward()
            if make is TABLE[0][0]:
                given = [each for other, each in enumerate(everybody(step)) if other not in skipping]
                zeros = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
                assert equal(grads_of(model), means_of(given, [1.0] * len(given)) if given else zeros)
            optimizer.step()
            expected = set().union(*raised) | ({"skip"} if skipping else set())
            assert bagua.flags(model) == expected, (model.bagua_ddp.algorithm, step)
        if not isinstance(model.bagua_ddp.algorithm, DecentralizedAlgorithm):
            assert same_everywhere(*inner(model).parameters())
        assert all(bool(param.isfinite().all()) for param in inner(model).parameters())


def a_skipped_step_is_one_with_weight_0(rank: int) -> None:
    for make, _ in TABLE:
        found = []
        for skips in (True, False):
            model, optimizer = wrapped("with_bagua", make)
            for step in range(6):
                optimizer.zero_grad()
                idle = step % size() == rank and size() > 1
                if idle and skips:
                    bagua.skip_step(model)
                else:
                    if model.bagua_ddp.policy.votes_divide:
                        bagua.set_weight(model, 0.0 if idle else 1.0)
                    given = gradients(rank, step)
                    # Where nothing is divided, there are no weights.
                    if idle and not model.bagua_ddp.policy.votes_divide:
                        given = {name: grad * 0 for name, grad in given.items()}
                    model(given).backward()
                if idle and not model.bagua_ddp.exchange.needs_gradients:
                    # A rank that skips has no gradient of its own to step with.
                    optimizer.zero_grad()
                optimizer.step()
            found.append([param.detach().clone() for param in model.parameters()])
        for one, other in zip(*found, strict=True):
            assert torch.equal(one, other), model.bagua_ddp.algorithm


def if_all_ranks_skip_nothing_changes(rank: int) -> None:
    for make, _ in TABLE:
        model, optimizer = wrapped("with_bagua", make)
        plain = Given()
        alone = optimizer_for(make, plain)
        for step in range(5):
            optimizer.zero_grad()
            bagua.skip_step(model)
            exchanges = model.bagua_ddp.exchange.needs_gradients
            if exchanges:
                assert all(not grad.count_nonzero() for grad in grads_of(model).values())
            else:
                assert not grads_of(model)
            optimizer.step()
            assert bagua.flags(model) == {"skip"}, step
            if exchanges:
                backward(plain, {name: torch.zeros(shape) for name, shape in SHAPES.items()})
                alone.step()
        for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-6)


def a_late_flag_counts_for_the_next_step(rank: int) -> None:
    for kind in WRAPPERS:
        model, _ = wrapped(kind, TABLE[0][0])

        def hook(_: torch.Tensor, model: torch.nn.Module = model) -> None:
            bagua.raise_flag(model, "stop")

        # Its gradient comes last.
        handle = inner(model).get_parameter("matrix").register_hook(hook)
        if rank > 0:
            handle.remove()
        found = []
        for step in range(3):
            backward(model, gradients(rank, step))
            found.append(bagua.flags(model))
            handle.remove()
        assert found == [set(), {"stop"}, set()]


def flags_stay_between_exchanges(rank: int) -> None:
    model, _ = wrapped("with_bagua", TABLE[0][0])
    assert bagua.flags(model) == set()
    bagua.raise_flag(model, "save")
    with bagua.no_sync(model):
        model(gradients(rank, 0)).backward()
        # There is nothing to take part in.
        bagua.skip_step(model)
    assert bagua.flags(model) == set()
    model(gradients(rank, 1)).backward()
    assert bagua.flags(model) == {"save"}
    with bagua.no_sync(model):
        model(gradients(rank, 0)).backward()
    assert bagua.flags(model) == {"save"}
    backward(model, gradients(rank, 2))
    assert bagua.flags(model) == set()


def accumulated_gradients_are_dropped(rank: int) -> None:
    if size() == 1:
        return
    model, _ = wrapped("with_bagua", TABLE[0][0])
    with bagua.no_sync(model):
        model(gradients(rank, 0)).backward()
    if rank == 0:
        bagua.skip_step(model)
    else:
        model(gradients(rank, 1)).backward()
    pairs = zip(everybody(0)[1:], everybody(1)[1:], strict=True)
    added = [{name: grad + later[name] for name, grad in each.items()} for each, later in pairs]
    assert equal(grads_of(model), means_of(added, [1.0] * len(added)))


def parameters_that_no_rank_uses_have_no_gradient(rank: int) -> None:
    for make, _ in TABLE[:5]:
        model, _ = wrapped("with_bagua", make, find_unused_parameters=True)
        given = gradients(rank, 0)
        del given["scale"]
        model.zero_grad()
        if rank == 0 and size() > 1:
            bagua.skip_step(model)
        else:
            model(given).backward()
        assert grads_of(model).keys() == {"matrix", "bias"}
        model.zero_grad()
        bagua.skip_step(model)
        assert not grads_of(model)


def buffers_and_sparse_gradients_go_on(rank: int) -> None:
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Embedding(10, 4, sparse=True), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.with_bagua([optimizer], "gradient_allreduce", flags=[])
    for step in range(6):
        optimizer.zero_grad()
        if step == 5 or step % (size() + 1) == rank:
            bagua.skip_step(model)
        else:
            model(torch.tensor([rank, step, 9])).square().sum().backward()
        optimizer.step()
        assert same_everywhere(*model.parameters(), *model.buffers())
    assert bagua.flags(model) == {"skip"}


def a_scaler_waits_for_no_rank(rank: int) -> None:
    """A rank whose gradients overflow sends its part without a wait. Its flags are those of the others."""
    model, optimizer = wrapped("with_bagua", lambda _: LocalSGDAlgorithm(1))
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for step in range(4):
        given = gradients(rank, step)
        if step == 1 and rank == size() - 1:
            given["bias"][0] = float("inf")
        if step == 1 and rank == 0:
            bagua.raise_flag(model, "bad batch")
        optimizer.zero_grad()
        scaler.scale(model(given)).backward()
        scaler.step(optimizer)
        scaler.update()
        assert bagua.flags(model) == ({"bad batch"} if step == 1 else set())
        assert same_everywhere(*model.parameters())


def votes_need_no_collective(rank: int) -> None:
    model, _ = wrapped("with_bagua", TABLE[0][0])
    plain, _ = wrap("with_bagua", GradientAllReduceAlgorithm(), bucket_size=SMALL)
    counts = []
    for each in (plain, model):
        before = calls()[0]
        for step in range(3):
            backward(each, gradients(rank, step))
            if each is model:
                bagua.raise_flag(model, "save")
                bagua.flags(model)
        counts.append(calls()[0] - before)
    assert counts[0] == counts[1]


def misuse_is_refused(rank: int) -> None:
    model, _ = wrapped("with_bagua", TABLE[0][0], flags=None)
    for call in (bagua.flags, bagua.skip_step):
        with pytest.raises(neutral.BaguaError, match=r"pass flags=\[\.\.\.\]"):
            call(model)
    with pytest.raises(ValueError, match="unknown flag 'stop'"):
        bagua.raise_flag(model, "stop")
    for flags in ("stop", [1]):
        with pytest.raises(TypeError, match="a list of names"):
            wrapped("with_bagua", TABLE[0][0], flags=flags)
    for names in (["skip"], ["a", "a"], [str(number) for number in range(17)]):
        with pytest.raises(ValueError, match="at most 16 different names"):
            wrapped("with_bagua", TABLE[0][0], flags=names)
    with pytest.raises(NotImplementedError, match="AsyncModelAverageAlgorithm"):
        wrapped("with_bagua", lambda _: AsyncModelAverageAlgorithm())
    if size() > 1:
        with pytest.raises(neutral.MismatchError, match="flags"):
            wrapped("with_bagua", TABLE[0][0], flags=["a"] if rank else ["b"])
    model, _ = wrapped("with_bagua", TABLE[0][0], flags=[str(number) for number in range(16)])
    with pytest.raises(ValueError, match="unknown flag 'skip'"):
        bagua.raise_flag(model, "skip")
    bagua.raise_flag(model, "15")
    loss = model(gradients(rank, 0))
    with pytest.raises(neutral.BaguaError, match="between a forward and its backward"):
        bagua.skip_step(model)
    loss.backward()
    assert bagua.flags(model) == {"15"}
    model.eval()
    with pytest.raises(neutral.BaguaError, match="in training mode"):
        bagua.skip_step(model)


CASES = cases_in(globals())

test_flags = each_case(CASES, 1, 2, 3, "2+1", timeout=60)
