"""A model has one wrapper: what a dropped, a replaced and a second one do, with every algorithm."""

from __future__ import annotations

import copy
import gc
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import bagua.torch_api as bagua
from bagua.errors import BaguaError
from bagua.torch_api.algorithms import Algorithm, AlgorithmImpl
from bagua.torch_api.algorithms.q_adam import QAdamOptimizer
from bagua.torch_api.data_parallel import DistributedDataParallel
from bagua.torch_api.model_engine.engine import owner_of
from tests.distributed.torch_ranks import cases_in, each_case, same_everywhere

Make = Callable[[torch.optim.Optimizer], Algorithm]


class HoldsItsModel(AlgorithmImpl):
    """An algorithm of a user whose hooks hold the model's engine, as closures of the original's algorithms do."""

    def init_operations(self, bagua_ddp: Any, bucket: Any) -> None:
        bucket.clear_ops()
        bucket.append_python_op(lambda name: self.seen(bagua_ddp))
        bucket.append_centralized_synchronous_op(average=True, group=self.process_group)

    def init_post_optimizer_step_hook(self, bagua_ddp: Any) -> Callable[[Any], None]:
        return lambda optimizer: self.seen(bagua_ddp)

    def seen(self, bagua_ddp: Any) -> None:
        """Uses the argument."""


class HoldsItsModelAlgorithm(Algorithm):
    _implementation = HoldsItsModel


ALGORITHMS: dict[str, Make] = {
    name: (lambda optimizer, name=name: Algorithm.init(name))  # type: ignore[misc]
    for name in ("gradient_allreduce", "bytegrad", "powersgd", "decentralized", "low_precision_decentralized")
} | {
    "local_sgd": lambda optimizer: Algorithm.init("local_sgd", communication_interval=2),
    "diloco": lambda optimizer: Algorithm.init("diloco", communication_interval=2),
    "qadam": lambda optimizer: Algorithm.init("qadam", q_adam_optimizer=optimizer),
    "async": lambda optimizer: Algorithm.init("async", sync_interval_ms=1),
    "async, warm-up": lambda optimizer: Algorithm.init("async", sync_interval_ms=1, warmup_steps=100),
    "a user's own": lambda optimizer: HoldsItsModelAlgorithm(),
}


def optimizer_of(name: str, module: nn.Module) -> torch.optim.Optimizer:
    if name == "qadam":
        return QAdamOptimizer(module.parameters(), lr=0.1, warmup_steps=2)
    return torch.optim.SGD(module.parameters(), lr=0.1)


def by_wrapper(module: nn.Module, optimizer: torch.optim.Optimizer, algorithm: Algorithm) -> nn.Module:
    return DistributedDataParallel(module, optimizers=[optimizer], algorithm=algorithm)


def in_place(module: nn.Module, optimizer: torch.optim.Optimizer, algorithm: Algorithm) -> nn.Module:
    return bagua.with_bagua(module, [optimizer], algorithm)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(2, 4)).square().mean().backward()
        optimizer.step()


@contextmanager
def without_a_collector() -> Iterator[None]:
    """Inside, an object in a cycle of references stays. What a dropped wrapper warns of is not shown."""
    gc.collect()
    gc.disable()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            yield
    finally:
        gc.enable()


def a_dropped_wrapper_ends_at_once(rank: int) -> None:
    for name, make in ALGORITHMS.items():
        for steps in (0, 1, 3):
            module = nn.Linear(4, 3)
            optimizer = optimizer_of(name, module)
            with without_a_collector():
                model = by_wrapper(module, optimizer, make(optimizer))
                train(model, optimizer, steps)
                impl = model.bagua_algorithm
                del model
                assert owner_of(module.weight) is None, (name, steps)
                if name == "async":
                    # The thread that writes to the weights has ended.
                    assert impl.stats()["state"] == "stopped", steps
                # The module can be wrapped again.
                again = by_wrapper(module, optimizer, Algorithm.init("gradient_allreduce"))
                train(again, optimizer, 1)
                assert same_everywhere(*module.parameters()), (name, steps)


def a_dropped_model_ends_at_once(rank: int) -> None:
    for name, make in ALGORITHMS.items():
        for steps in (0, 1, 3):
            module = nn.Linear(4, 3)
            weight, optimizer = module.weight, optimizer_of(name, module)
            with without_a_collector():
                model = in_place(module, optimizer, make(optimizer))
                train(model, optimizer, steps)
                del model, module
                assert owner_of(weight) is None, (name, steps)


def a_newer_wrapper_of_the_same_module_takes_over(rank: int) -> None:
    for name, make in ALGORITHMS.items():
        module = nn.Linear(4, 3)
        optimizer = optimizer_of(name, module)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            first = by_wrapper(module, optimizer, make(optimizer))
            train(first, optimizer, 1)
            second = by_wrapper(first.module, optimizer, make(optimizer))
            train(second, optimizer, 1)
            with pytest.raises(BaguaError, match="a newer DistributedDataParallel of the same Linear has replaced"):
                first(torch.ones(2, 4))
            assert not hasattr(first, "bagua_algorithm")
            # A copy has a module of its own.
            copy.deepcopy(first).eval()(torch.ones(2, 4))
            # with_bagua replaces what it did before.
            third = in_place(nn.Linear(4, 3), optimizer_of("", nn.Linear(4, 3)), Algorithm.init("gradient_allreduce"))
            train(in_place(third, optimizer_of("", third), Algorithm.init("gradient_allreduce")), optimizer, 1)


def a_newer_wrapper_that_is_refused_leaves_the_older_one_as_it_is(rank: int) -> None:
    for name, make in ALGORITHMS.items():
        for wrap in (by_wrapper, in_place):
            module = nn.Linear(4, 3)
            optimizer = optimizer_of(name, module)
            older = wrap(module, optimizer, make(optimizer))
            train(older, optimizer, 1)
            # Its optimizer is another one.
            bad = Algorithm.init("qadam", q_adam_optimizer=optimizer_of("qadam", nn.Linear(4, 3)))
            with pytest.raises(ValueError, match="q_adam_optimizer does not have the parameters"):
                wrap(module, optimizer, bad)
            with pytest.raises(BaguaError, match="rank 1"):
                wrap(module, optimizer, Algorithm.init("gradient_allreduce" if rank else "bytegrad"))
            assert owner_of(module.weight) is older.bagua_ddp
            train(older, optimizer, 1)
            assert older.bagua_ddp.bagua_train_step_counter == 2
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", RuntimeWarning)
                bagua.unwrap(older)


def torchs_wrapper_beside_ours_is_refused(rank: int) -> None:
    twice = "wrapped by Bagua and by torch's DistributedDataParallel"

    def ours(module: nn.Module) -> nn.Module:
        return in_place(module, torch.optim.SGD(module.parameters(), lr=0.1), Algorithm.init("bytegrad"))

    for outer in (
        TorchDDP(ours(nn.Linear(4, 3))),
        TorchDDP(DistributedDataParallel(nn.Linear(4, 3))),
        TorchDDP(nn.Sequential(nn.Linear(4, 4), ours(nn.Linear(4, 3)))),
    ):
        with pytest.raises(BaguaError, match=twice):
            outer(torch.ones(2, 4))
    for inner in (TorchDDP(nn.Linear(4, 3)), nn.Sequential(TorchDDP(nn.Linear(4, 3)))):
        for wrap in (ours, DistributedDataParallel):
            with pytest.raises(ValueError, match=r"wrap its \.module instead"):
                wrap(inner)
    outer = TorchDDP(nn.Linear(4, 3))
    ours(outer.module)
    with pytest.raises(BaguaError, match=twice):
        outer(torch.ones(2, 4))
    # Two models, of which one is called inside the other, send no gradient twice.
    alone = ours(nn.Linear(4, 4))

    class Calls(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(alone(x))

    TorchDDP(Calls(4, 3))(torch.ones(2, 4)).sum().backward()
    # A model that torch's wrapper was told to leave alone.
    whole = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
    TorchDDP._set_params_and_buffers_to_ignore_for_model(whole, ["1.weight", "1.bias"])
    ours(whole[1])
    TorchDDP(whole)(torch.ones(2, 4)).sum().backward()
    dist.barrier()


CASES = cases_in(globals())

test = each_case(CASES, 2)


def ends(rank: int, how: str) -> list[str]:
    bagua.init_process_group()
    module = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    # No round becomes due by itself.
    model = by_wrapper(module, optimizer, Algorithm.init("async", sync_interval_ms=1e9))
    train(model, optimizer, 3)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", RuntimeWarning)
        if how != "without a round":
            model.bagua_algorithm.synchronize(model)
        if how == "after another step":
            train(model, optimizer, 1)
        if how == "as the documents say":
            model.bagua_algorithm.abort(model)
            # Alone, on purpose.
            train(model, optimizer, 1)
        dist.barrier()
        bagua.destroy_process_group()
    return [str(warning.message) for warning in caught]


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("without a round", "async ended after 0 averaging rounds, none of which averaged the last 3 optimizer steps"),
        ("after another step", "async ended after 1 averaging rounds, none of which averaged the last 1 optimizer"),
        ("as the documents say", ""),
    ],
)
def test_async_warns_of_steps_that_no_round_has_averaged(world: Any, how: str, expected: str) -> None:
    for messages in world(2, torch=True).run(ends, how):
        assert len(messages) == bool(expected), messages
        assert "".join(messages).startswith(expected)
