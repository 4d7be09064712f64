"""Weights of ranks in averages: every algorithm that has them, in both wrappers, against simulations.

Gradients are what the forward is given, and most are integers, so that sums are exact and results equal to the bit.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

import bagua as neutral
import bagua.torch_api as bagua
from bagua.torch_api.algorithms import (
    Algorithm,
    AlgorithmImpl,
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
from bagua.torch_api.data_parallel import DistributedDataParallel
from tests.distributed.compressed_oracle import CompressedAllReduce, Values
from tests.distributed.test_bytegrad import CODECS, of_bucket
from tests.distributed.torch_ranks import HOSTED, cases_in, each_case, hosts, same_everywhere
from tests.world import World

#: By number of ranks: the weights of the ranks.
WEIGHTS: dict[int, list[tuple[float, ...]]] = {
    1: [(3.0,)],
    2: [(1.0, 2.0), (0.0, 3.0)],
    3: [(0.5, 0.5, 7.0), (0.0, 3.0, 0.0)],
    4: [(1.0, 2.0, 0.0, 5.0)],
}
SHAPES = {"matrix": (12, 20), "bias": (5,), "scale": (7,)}
WRAPPERS = ("with_bagua", "DistributedDataParallel")
#: Bytes: several buckets.
SMALL = 96

Gradients = dict[str, torch.Tensor]


class Given(torch.nn.Module):
    """Parameters whose gradients are what the forward is given."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(2)
        for name, shape in SHAPES.items():
            values = torch.randint(-3, 4, shape, generator=generator).to(dtype)
            self.register_parameter(name, torch.nn.Parameter(values))

    def forward(self, gradients: Gradients) -> torch.Tensor:
        return sum(((getattr(self, name) * grad).sum() for name, grad in gradients.items()), torch.zeros(()))


def size() -> int:
    return bagua.get_world_size()


def gradients(rank: int, step: int, dtype: torch.dtype = torch.float32) -> Gradients:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return {name: torch.randint(-8, 9, shape, generator=generator).to(dtype) for name, shape in SHAPES.items()}


def everybody(step: int) -> list[Gradients]:
    return [gradients(rank, step) for rank in range(size())]


def sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.25, momentum=0.5)


def wrap(
    kind: str,
    algorithm: Algorithm,
    model: torch.nn.Module | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    **options: Any,
) -> tuple[Any, torch.optim.Optimizer]:
    """A wrapped model, and its optimizer."""
    model = Given() if model is None else model
    optimizer = sgd(model) if optimizer is None else optimizer
    if kind == "with_bagua":
        return model.with_bagua([optimizer], algorithm, **options), optimizer
    if "bucket_size" in options:
        options["bucket_cap_mb"] = options.pop("bucket_size") / 2**20
    return DistributedDataParallel(model, optimizers=[optimizer], algorithm=algorithm, **options), optimizer


def inner(model: torch.nn.Module) -> torch.nn.Module:
    return model.module if isinstance(model, DistributedDataParallel) else model


def grads_of(model: torch.nn.Module) -> Gradients:
    return {name: param.grad.clone() for name, param in inner(model).named_parameters() if param.grad is not None}


def mean_of(values: Sequence[torch.Tensor], weights: Sequence[float]) -> torch.Tensor:
    """The weighted mean, computed in float64 and rounded once."""
    total = sum((value.double() * weight for value, weight in zip(values, weights, strict=True)), torch.zeros(()))
    return (total / math.fsum(weights)).to(values[0].dtype)


def means_of(given: Sequence[Gradients], weights: Sequence[float]) -> Gradients:
    return {name: mean_of([each[name] for each in given], weights) for name in given[0]}


def equal(found: Gradients, expected: Gradients) -> bool:
    assert found.keys() == expected.keys()
    return all(torch.equal(found[name], expected[name]) for name in expected)


def close(found: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-6) -> None:
    scale = max(1.0, float(expected.abs().max()))
    torch.testing.assert_close(found, expected.to(found.dtype), rtol=0.0, atol=tolerance * scale)


def backward(model: Any, given: Gradients) -> None:
    inner(model).zero_grad()
    model(given).backward()


def gradient_allreduce_divides_by_the_sum(rank: int) -> None:
    for kind in WRAPPERS:
        for hierarchical in (False, True):
            for flat in (True, False):
                views = {"do_flatten": flat} if kind == "with_bagua" else {"gradient_as_bucket_view": flat}
                algorithm = GradientAllReduceAlgorithm(hierarchical)
                model, _ = wrap(kind, algorithm, bucket_size=SMALL, **views)
                backward(model, gradients(rank, 0))
                for step, weights in enumerate(WEIGHTS[size()], 1):
                    bagua.set_weight(model, weights[rank])
                    # The weight stays until it is set again.
                    for each in (step, 10 + step):
                        backward(model, gradients(rank, each))
                        assert equal(grads_of(model), means_of(everybody(each), weights)), (kind, flat, step)


def weights_of_one_change_no_bit(rank: int) -> None:
    generator = torch.Generator().manual_seed(rank)
    given = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
    found = []
    for weight in (None, 1.0):
        model, _ = wrap("with_bagua", GradientAllReduceAlgorithm(), bucket_size=SMALL)
        if weight is not None:
            bagua.set_weight(model, weight)
        backward(model, given)
        found.append(grads_of(model))
    assert equal(*found)


def half_precision_has_exact_weights(rank: int) -> None:
    weights = [1000.5 + other for other in range(size())]
    for dtype in (torch.bfloat16, torch.float64):
        model, _ = wrap("with_bagua", GradientAllReduceAlgorithm(), Given(dtype))
        bagua.set_weight(model, weights[rank])
        backward(model, {name: torch.ones(shape, dtype=dtype) for name, shape in SHAPES.items()})
        for grad in grads_of(model).values():
            close(grad.double(), torch.ones_like(grad, dtype=torch.float64), 0.02 if dtype == torch.bfloat16 else 1e-15)


def bytegrad_equals_the_oracle(rank: int) -> None:
    for kind, weights in itertools.product(WRAPPERS, WEIGHTS[size()]):
        for codec, options in CODECS:
            for hierarchical, feedback in ((False, True), (True, True), (False, False)):
                members = hosts() if hierarchical else [[each] for each in range(size())]
                compression = neutral.Codec(codec, **options)
                algorithm = ByteGradAlgorithm(hierarchical, compression=compression, error_feedback=feedback)
                model, _ = wrap(kind, algorithm, bucket_size=SMALL)
                buckets = model.bagua_buckets
                oracles = [
                    CompressedAllReduce(codec, options, len(members), size(), False, feedback=feedback) for _ in buckets
                ]
                bagua.set_weight(model, weights[rank])
                for step in range(3):
                    alone = []
                    for other, weight in enumerate(weights):
                        made = Given()
                        made({name: grad * weight for name, grad in gradients(other, step).items()}).backward()
                        alone.append(made)
                    backward(model, gradients(rank, step))
                    for bucket, oracle in zip(buckets, oracles, strict=True):
                        given = [of_bucket(bucket, each) for each in alone]
                        sums = [np.sum([given[each] for each in host], axis=0, dtype=np.float32) for host in members]
                        expected: Values = oracle.step(sums, -len(sums[0]) % size())
                        total = np.float32(math.fsum(weights) if size() > 1 else 1)
                        if size() == 1:
                            expected = expected / np.float32(weights[0])
                        found = of_bucket(bucket, inner(model))
                        assert np.array_equal(found, expected / total), (kind, codec, hierarchical, feedback, step)


def bytegrad_may_choose_by_itself(rank: int) -> None:
    weights = WEIGHTS[size()][0]
    model, _ = wrap("with_bagua", ByteGradAlgorithm(False, compression="auto"), bucket_size=SMALL)
    bagua.set_weight(model, weights[rank])
    for step in range(12):
        backward(model, gradients(rank, step))
        for name, grad in grads_of(model).items():
            close(grad, means_of(everybody(step), weights)[name], 0.02)
        assert same_everywhere(*grads_of(model).values())


def powersgd_equals_the_simulation(rank: int) -> None:
    if size() == 1:
        return
    for kind in WRAPPERS:
        for weights in WEIGHTS[size()]:
            model, _ = wrap(kind, PowerSGDAlgorithm(2, seed=7))
            bagua.set_weight(model, weights[rank])
            shape = SHAPES["matrix"]
            q: Values = np.random.default_rng([7, 0, 0]).standard_normal((shape[1], 2))
            errors = [np.zeros(shape) for _ in weights]
            for step in range(4):
                backward(model, gradients(rank, step))
                found, given = grads_of(model), everybody(step)
                m = [each["matrix"].double().numpy() + error for each, error in zip(given, errors, strict=True)]
                p, _ = np.linalg.qr(sum(w * (x @ q) for w, x in zip(weights, m, strict=True)))
                q = sum(w * (x.T @ p) for w, x in zip(weights, m, strict=True)) / math.fsum(weights)
                errors = [x - p @ (p.T @ x) if w else error for w, x, error in zip(weights, m, errors, strict=True)]
                close(found["matrix"], torch.from_numpy(p @ q.T), 3e-5)
                expected = means_of(given, weights)
                assert all(torch.equal(found[name], expected[name]) for name in ("bias", "scale"))
            state = model.bagua_algorithm.state_dict()
            close(state["error"]["matrix"], torch.from_numpy(errors[rank]), 3e-5)


def qadam_steps_as_on_the_joined_batch(rank: int) -> None:
    for kind in WRAPPERS:
        for compression, tolerance in ((None, 1e-6), ("minmax_u8", 0.05)):
            for weights in WEIGHTS[size()]:
                model = Given()
                optimizer = QAdamOptimizer(model.parameters(), lr=0.01, warmup_steps=2, weight_decay=0.1)
                algorithm = QAdamAlgorithm(optimizer, hierarchical=False, compression=compression)
                model, _ = wrap(kind, algorithm, model, optimizer, bucket_size=SMALL)
                bagua.set_weight(model, weights[rank])
                one = Given()
                alone = QAdamOptimizer(one.parameters(), lr=0.01, warmup_steps=2, weight_decay=0.1)
                for step in range(5):
                    backward(model, gradients(rank, step))
                    optimizer.step()
                    backward(one, means_of(everybody(step), weights))
                    alone.step()
                assert optimizer.warmed_up
                for mine, theirs in zip(inner(model).parameters(), one.parameters(), strict=True):
                    close(mine.detach(), theirs.detach(), tolerance)
                assert same_everywhere(*inner(model).parameters())


def rounds_of_local_steps_are_weighted(rank: int) -> None:
    for kind in WRAPPERS:
        for algorithm in (
            LocalSGDAlgorithm(2),
            DiLoCoAlgorithm(2, outer_lr=0.5, outer_momentum=0.5),
            LocalSGDAlgorithm(2, hierarchical=False, compression="f16", error_feedback=True),
        ):
            for weights in WEIGHTS[size()]:
                model, optimizer = wrap(kind, algorithm, bucket_size=SMALL)
                bagua.set_weight(model, weights[rank])
                alone = [Given() for _ in weights]
                optimizers = [sgd(each) for each in alone]
                anchors = {name: param.detach().clone() for name, param in alone[0].named_parameters()}
                momenta = {name: torch.zeros_like(anchor) for name, anchor in anchors.items()}
                outer_lr = getattr(algorithm, "outer_lr", 1.0)
                momentum = getattr(algorithm, "outer_momentum", 0.0)
                for step in range(4):
                    backward(model, gradients(rank, step))
                    optimizer.step()
                    for other, (each, its) in enumerate(zip(alone, optimizers, strict=True)):
                        backward(each, gradients(other, step))
                        its.step()
                    if step % 2 == 0:
                        continue
                    for name, anchor in anchors.items():
                        d = mean_of([anchor - each.get_parameter(name).detach() for each in alone], weights)
                        momenta[name] = momentum * momenta[name] + d
                        move = d + momentum * momenta[name] if momentum else d
                        anchors[name] = anchor - outer_lr * move
                        for each in alone:
                            each.get_parameter(name).data.copy_(anchors[name])
                    for name, param in inner(model).named_parameters():
                        close(param.detach(), anchors[name], 1e-2 if algorithm.compression else 1e-6)
                    assert same_everywhere(*inner(model).parameters())


def decentralized_weights_the_models(rank: int) -> None:
    for kind in WRAPPERS:
        for hierarchical in (False, True):
            for weights in WEIGHTS[size()]:
                model, optimizer = wrap(kind, DecentralizedAlgorithm(hierarchical), bucket_size=SMALL)
                bagua.set_weight(model, weights[rank])
                alone = [Given() for _ in weights]
                optimizers = [sgd(each) for each in alone]
                for step in range(3):
                    backward(model, gradients(rank, step))
                    optimizer.step()
                    before = [[param.detach().clone() for param in each.parameters()] for each in alone]
                    for other, (each, its) in enumerate(zip(alone, optimizers, strict=True)):
                        backward(each, gradients(other, step))
                        for param, values in zip(each.parameters(), zip(*before, strict=True), strict=True):
                            param.data.copy_(mean_of(values, weights))
                        its.step()
                for mine, theirs in zip(inner(model).parameters(), alone[rank].parameters(), strict=True):
                    close(mine.detach(), theirs.detach())


#: Algorithms that keep something from step to step, which a first set_weight() in the middle must not lose.
KEEPING: list[Callable[[], Algorithm]] = [
    lambda: ByteGradAlgorithm(False, compression="minmax_u8", error_feedback=True),
    lambda: ByteGradAlgorithm(False, compression=neutral.Codec("random_k", k=0.3, seed=5), error_feedback=True),
    lambda: PowerSGDAlgorithm(2),
    lambda: LocalSGDAlgorithm(2, hierarchical=False, compression="minmax_u8", error_feedback=True),
    lambda: DiLoCoAlgorithm(2),
    lambda: DecentralizedAlgorithm(False),
]


def the_first_weight_may_come_in_the_middle(rank: int) -> None:
    for make in KEEPING:
        states = []
        for first in (0, 3):
            algorithm = make()
            model, optimizer = wrap("with_bagua", algorithm, bucket_size=SMALL)
            for step in range(5):
                if step == first:
                    before = model.bagua_algorithm.state_dict()
                    bagua.set_weight(model, 1.0)
                    after = model.bagua_algorithm.state_dict()
                    assert after["round"] == before["round"]
                    for kind in ("error", "q", "anchor", "outer_momentum"):
                        assert equal(after.get(kind, {}), before.get(kind, {})), (algorithm, kind)
                backward(model, gradients(rank, step))
                optimizer.step()
            states.append([param.detach().clone() for param in model.parameters()])
        for one, other in zip(*states, strict=True):
            # The algorithms with a codec encode a sum instead of an average.
            close(one, other, 0.2 if getattr(algorithm, "compression", None) else 1e-6)


def the_first_weight_may_come_after_the_forward(rank: int) -> None:
    weights = WEIGHTS[size()][0]
    for step in (0, 1):
        for algorithm in (GradientAllReduceAlgorithm(), ByteGradAlgorithm(False, compression="bf16")):
            model, _ = wrap("with_bagua", algorithm, bucket_size=SMALL)
            if step:
                backward(model, gradients(rank, 0))
            model.zero_grad()
            with bagua.no_sync(model):
                model(gradients(rank, 1)).backward()
            loss = model(gradients(rank, 2))
            bagua.set_weight(model, weights[rank])
            loss.backward()
            added = [
                {name: grad + gradients(other, 2)[name] for name, grad in gradients(other, 1).items()}
                for other in range(size())
            ]
            for name, grad in grads_of(model).items():
                close(grad, means_of(added, weights)[name], 0.02 if isinstance(algorithm, ByteGradAlgorithm) else 1e-6)
    if size() > 1:
        model, _ = wrap("with_bagua", DecentralizedAlgorithm())
        loss = model(gradients(rank, 0))
        with pytest.raises(neutral.BaguaError, match="before the forward"):
            bagua.set_weight(model, 1.0)
        loss.backward()


def accumulated_gradients_have_one_weight(rank: int) -> None:
    for kind, weights in itertools.product(WRAPPERS, WEIGHTS[size()]):
        for algorithm, tolerance in (
            (GradientAllReduceAlgorithm(), 0.0),
            (ByteGradAlgorithm(False, compression="f16", error_feedback=True), 1e-3),
        ):
            model, _ = wrap(kind, algorithm, bucket_size=SMALL)
            bagua.set_weight(model, weights[rank])
            for _ in range(2):
                inner(model).zero_grad()
                for step in range(2):
                    with model.no_sync() if kind == WRAPPERS[1] else bagua.no_sync(model):
                        model(gradients(rank, step)).backward()
                model(gradients(rank, 2)).backward()
                added = [
                    {name: sum(gradients(other, step)[name] for step in range(3)) for name in SHAPES}
                    for other in range(size())
                ]
                for name, grad in grads_of(model).items():
                    close(grad, means_of(added, weights)[name], tolerance)


def unused_parameters_count_as_zeros(rank: int) -> None:
    feedback = ByteGradAlgorithm(False, compression="f16", error_feedback=True)
    for algorithm in (GradientAllReduceAlgorithm(), feedback, PowerSGDAlgorithm(2)):
        for kind in WRAPPERS:
            for weights in WEIGHTS[size()]:
                model, _ = wrap(kind, algorithm, bucket_size=SMALL, find_unused_parameters=True)
                bagua.set_weight(model, weights[rank])
                for step in range(2):
                    given = everybody(step)
                    for other, each in enumerate(given):
                        # No rank uses "scale", and only the last rank "bias".
                        del each["scale"]
                        if other != size() - 1:
                            del each["bias"]
                    backward(model, given[rank])
                    found = grads_of(model)
                    assert found.keys() == {"matrix", "bias"}
                    zeros = torch.zeros(SHAPES["bias"])
                    close(found["bias"], mean_of([each.get("bias", zeros) for each in given], weights), 1e-3)
                    if not isinstance(algorithm, PowerSGDAlgorithm):
                        close(found["matrix"], mean_of([each["matrix"] for each in given], weights), 1e-3)


def sparse_gradients_are_weighted(rank: int) -> None:
    for weights in WEIGHTS[size()]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Embedding(10, 3, sparse=True), torch.nn.Linear(3, 1, bias=False))
        torch.nn.init.ones_(model[1].weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model.with_bagua([optimizer], GradientAllReduceAlgorithm())
        bagua.set_weight(model, weights[rank])
        for _ in range(2):
            model.zero_grad()
            model(torch.tensor([rank, rank + 1, 7])).sum().backward()
            dense = []
            for other in range(size()):
                rows = torch.zeros(10, 3)
                for row in (other, other + 1, 7):
                    rows[row] += 1
                dense.append(rows)
            grad = model[0].weight.grad
            assert grad is not None
            assert grad.is_sparse
            assert torch.equal(grad.to_dense(), mean_of(dense, weights))


def a_scaler_skips_on_all_ranks_or_on_none(rank: int) -> None:
    weights = WEIGHTS[size()][-1]
    idle = [other for other, weight in enumerate(weights) if weight == 0]
    algorithms = (GradientAllReduceAlgorithm(), ByteGradAlgorithm(False))
    for kind, algorithm in itertools.product(WRAPPERS, algorithms):
        model, optimizer = wrap(kind, algorithm)
        bagua.set_weight(model, weights[rank])
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        before = [param.detach().clone() for param in model.parameters()]
        for step, ranks in enumerate((idle, [other for other in range(size()) if other not in idle])):
            given = gradients(rank, step)
            if rank in ranks:
                given["bias"][0] = math.inf
            inner(model).zero_grad()
            scaler.scale(model(given)).backward()
            scaler.step(optimizer)
            scaler.update()
            # What a rank with weight 0 has computed does not count.
            assert scaler.get_scale() == (4.0 if step == 0 else 2.0), (kind, algorithm)
            changed = any(not torch.equal(one, other) for one, other in zip(before, model.parameters(), strict=True))
            assert changed
            assert same_everywhere(*model.parameters())


def no_rank_with_a_weight_is_an_error_on_all(rank: int) -> None:
    makers: list[Callable[[], Algorithm]] = [
        GradientAllReduceAlgorithm,
        lambda: ByteGradAlgorithm(False),
        lambda: PowerSGDAlgorithm(2),
        lambda: LocalSGDAlgorithm(1),
        lambda: DiLoCoAlgorithm(1),
        lambda: DecentralizedAlgorithm(False),
    ]
    for make in makers if size() > 1 else makers[:-1]:
        model, optimizer = wrap("with_bagua", make(), bucket_size=SMALL)
        bagua.set_weight(model, 0.0)
        backwards = not isinstance(model.bagua_ddp.algorithm, (LocalSGDAlgorithm, DiLoCoAlgorithm))
        before = [param.detach().clone() for param in model.parameters()]
        fails: Callable[[], object] = functools.partial(backward, model, gradients(rank, 0))
        if not backwards:
            fails()
            optimizer.zero_grad()
            fails = optimizer.step
        with pytest.raises(ValueError, match="the weight of every rank is 0"):
            fails()
        assert all(torch.equal(one, other) for one, other in zip(before, model.parameters(), strict=True))
        # Training goes on.
        bagua.set_weight(model, 1.0)
        backward(model, gradients(rank, 1))
        optimizer.step()
        assert (
            not backwards
            or isinstance(model.bagua_ddp.algorithm, DecentralizedAlgorithm)
            or same_everywhere(*model.parameters())
        )


class OfAUser(Algorithm):
    def reify(self, process_group: Any) -> AlgorithmImpl:
        return AlgorithmImpl(process_group)


def other_algorithms_say_so_by_name(rank: int) -> None:
    algorithms: list[tuple[Algorithm, str]] = [
        (AsyncModelAverageAlgorithm(), "AsyncModelAverageAlgorithm"),
        (LowPrecisionDecentralizedAlgorithm(), "LowPrecisionDecentralizedAlgorithm"),
        (DecentralizedAlgorithm(False, "ring"), "peer_selection_mode='ring'"),
        (GradientAllReduceAlgorithm(average=False), "average=False"),
        (OfAUser(), "OfAUser"),
    ]
    for algorithm, text in algorithms:
        model, _ = wrap("with_bagua", algorithm)
        with pytest.raises(NotImplementedError, match=text):
            bagua.set_weight(model, 2.0)
        bagua.unwrap(model)


def bad_weights_are_refused(rank: int) -> None:
    model, _ = wrap("with_bagua", GradientAllReduceAlgorithm())
    for weight in (-1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match="finite"):
            bagua.set_weight(model, weight)
    for other in ("1", None):
        with pytest.raises(TypeError, match="number"):
            bagua.set_weight(model, other)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="not wrapped"):
        bagua.set_weight(torch.nn.Linear(1, 1), 1.0)
    # Numbers of other libraries.
    bagua.set_weight(model, torch.tensor(3))  # type: ignore[arg-type]
    bagua.set_weight(model, np.float32(2.0))  # type: ignore[arg-type]
    backward(model, gradients(rank, 0))
    assert equal(grads_of(model), means_of(everybody(0), [2.0] * size()))


def calls() -> tuple[int, int]:
    """Number of collectives so far in all groups, and their bytes."""
    ops = [op for group in neutral.stats()["groups"].values() for op in group["ops"].values()]
    return sum(op["calls"] for op in ops), sum(op["payload_bytes"] for op in ops)


def weights_need_no_collective(rank: int) -> None:
    makers: list[Callable[[], Algorithm]] = [
        GradientAllReduceAlgorithm,
        lambda: ByteGradAlgorithm(False),
        lambda: PowerSGDAlgorithm(2),
        lambda: LocalSGDAlgorithm(1),
        lambda: DecentralizedAlgorithm(False),
    ]
    for make in makers if size() > 1 else []:
        model, optimizer = wrap("with_bagua", make(), bucket_size=SMALL)
        counts = []
        for step in range(4):
            if step == 2:
                bagua.set_weight(model, 1.0 + rank)
            before = calls()
            backward(model, gradients(rank, step))
            optimizer.step()
            counts.append([after - earlier for after, earlier in zip(calls(), before, strict=True)])
        assert counts[3][0] == counts[1][0], model.bagua_ddp.algorithm
        # Twelve elements per rank.
        assert 0 < counts[3][1] - counts[1][1] <= 48 * size()


CASES = cases_in(globals())

test_set_weight = each_case(CASES, 1, *HOSTED, timeout=60)


def a_rank_alone_sets_its_weight(rank: int) -> str:
    bagua.init_process_group()
    model, _ = wrap("with_bagua", GradientAllReduceAlgorithm())
    if rank == 1:
        bagua.set_weight(model, 2.0)
    with pytest.raises(neutral.MismatchError) as raised:
        backward(model, gradients(rank, 0))
    return str(raised.value)


def test_a_rank_that_sets_its_weight_alone_is_named(world: Callable[..., World]) -> None:
    for text in world(2).run(a_rank_alone_sets_its_weight):
        assert "called set_weight()" in text, text
        assert "rank 1" in text, text
