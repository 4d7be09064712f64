"""with_bagua and DistributedDataParallel on models on the simulated driver: the weights, the states and the order.

All cases of a number of ranks run in one world, because every rank that starts imports torch for seconds.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import bagua
import bagua.torch_api as api
from bagua.torch_api import algorithms
from bagua.torch_api.algorithms import Algorithm
from tests.cases import attempt
from tests.cuda.ranks import Ended, ended
from tests.cuda.torch_on_sim import install, joined

pytestmark = pytest.mark.slow

Optimizer = torch.optim.Optimizer

STEPS = 5


class Net(nn.Module):
    """With buffers, an unused parameter if it is asked for, and two dtypes of parameters."""

    def __init__(self, *, unused: bool = False) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(12, 16), nn.BatchNorm1d(16), nn.GELU(), nn.Linear(16, 8))
        self.head = nn.Linear(8, 5)
        self.scale = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
        if unused:
            self.spare = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x)) * self.scale.float().sum()


def sgd(model: nn.Module) -> Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def adamw(model: nn.Module) -> Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def qadam(model: nn.Module) -> Optimizer:
    return algorithms.QAdamOptimizer(model.parameters(), lr=0.01, warmup_steps=2)


class Variant(NamedTuple):
    """How a model is trained."""

    algorithm: Callable[[Any], Algorithm]
    optimizer: Callable[[nn.Module], Optimizer] = sgd
    options: dict[str, Any] = {}  # noqa: RUF012
    unused: bool = False
    #: Nothing of a step is read by the host.
    waits_not: bool = False
    #: A round of all ranks' averaging follows each step.
    rounds: bool = False


def all_reduce(optimizer: Any) -> Algorithm:
    return algorithms.GradientAllReduceAlgorithm()


BOTH: dict[str, Variant] = {
    "gradient_allreduce": Variant(all_reduce, adamw, waits_not=True),
    "gradient_allreduce of sums, not flattened": Variant(
        lambda _: algorithms.GradientAllReduceAlgorithm(average=False), options={"do_flatten": False}, waits_not=True
    ),
    "gradient_allreduce with an unused parameter": Variant(
        all_reduce, options={"find_unused_parameters": True}, unused=True, waits_not=True
    ),
    "bytegrad": Variant(lambda _: algorithms.ByteGradAlgorithm(hierarchical=False), waits_not=True),
    "bytegrad through bf16": Variant(
        lambda _: algorithms.ByteGradAlgorithm(hierarchical=False, compression="bf16"), waits_not=True
    ),
    "bytegrad with error feedback": Variant(
        lambda _: algorithms.ByteGradAlgorithm(hierarchical=False, error_feedback=True), waits_not=True
    ),
    "qadam": Variant(lambda optimizer: algorithms.QAdamAlgorithm(optimizer, hierarchical=False), qadam),
    "decentralized": Variant(lambda _: algorithms.DecentralizedAlgorithm(hierarchical=False), waits_not=True),
    "decentralized, shift_one, every second step": Variant(
        lambda _: algorithms.DecentralizedAlgorithm(False, "shift_one", 2), adamw, {"do_flatten": False}, waits_not=True
    ),
    "low_precision_decentralized": Variant(
        lambda _: algorithms.LowPrecisionDecentralizedAlgorithm(hierarchical=False), adamw
    ),
    "low_precision_decentralized, not flattened": Variant(
        lambda _: algorithms.LowPrecisionDecentralizedAlgorithm(hierarchical=False, compression="bf16"),
        options={"do_flatten": False},
    ),
    "local_sgd": Variant(lambda _: algorithms.LocalSGDAlgorithm(2, hierarchical=False), adamw),
    "local_sgd, compressed": Variant(
        lambda _: algorithms.LocalSGDAlgorithm(2, hierarchical=False, compression="minmax_u8", error_feedback=True)
    ),
    "diloco": Variant(lambda _: algorithms.DiLoCoAlgorithm(2, hierarchical=False), adamw),
    "powersgd": Variant(lambda _: algorithms.PowerSGDAlgorithm(1, min_compression=1.0)),
    "powersgd without memory": Variant(
        lambda _: algorithms.PowerSGDAlgorithm(2, min_compression=1.0, warm_start=False, error_feedback=False), adamw
    ),
}

#: On two hosts of two ranks, first inside them.
HIERARCHICAL: dict[str, Variant] = {
    "gradient_allreduce": Variant(lambda _: algorithms.GradientAllReduceAlgorithm(hierarchical=True), waits_not=True),
    "bytegrad": Variant(lambda _: algorithms.ByteGradAlgorithm(error_feedback=True), waits_not=True),
    "qadam": Variant(lambda optimizer: algorithms.QAdamAlgorithm(optimizer), qadam),
    "decentralized": Variant(lambda _: algorithms.DecentralizedAlgorithm(), adamw, waits_not=True),
    "low_precision_decentralized": Variant(lambda _: algorithms.LowPrecisionDecentralizedAlgorithm()),
    "diloco": Variant(lambda _: algorithms.DiLoCoAlgorithm(2, compression="minmax_u8")),
    "powersgd": Variant(lambda _: algorithms.PowerSGDAlgorithm(1, min_compression=1.0)),
}


def batch(rank: int, step: int, place: str) -> tuple[torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(1000 * rank + step)
    x, y = torch.randn(6, 12, generator=random), torch.randint(0, 5, (6,), generator=random)
    return x.to(place), y.to(place)


def tensors_in(state: Any) -> list[torch.Tensor]:
    if isinstance(state, torch.Tensor):
        return [state.detach().cpu()]
    if isinstance(state, dict):
        return [each for key in state for each in tensors_in(state[key])]
    if isinstance(state, (list, tuple)):
        return [each for entry in state for each in tensors_in(entry)]
    return []


def same_bits(one: Sequence[torch.Tensor], two: Sequence[torch.Tensor]) -> bool:
    return len(one) == len(two) and all(
        mine.dtype == other.dtype and mine.contiguous().view(-1).tolist() == other.contiguous().view(-1).tolist()
        for mine, other in zip(one, two, strict=True)
    )


def train(rank: int, variant: Variant, place: str) -> list[torch.Tensor]:
    """What there is after some steps: weights, buffers, and the states of optimizer and algorithm."""
    torch.manual_seed(1 + rank)
    model = Net(unused=variant.unused).to(place)
    optimizer = variant.optimizer(model)
    model.with_bagua([optimizer], variant.algorithm(optimizer), **variant.options)
    runtime = install()
    data = [batch(rank, step, place) for step in range(STEPS)]
    reads = runtime.reads_to_the_host
    for x, y in data:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        if variant.rounds:
            model.bagua_algorithm.synchronize(model)
    if variant.waits_not:
        assert runtime.reads_to_the_host == reads
    states = model.state_dict(), optimizer.state_dict(), model.bagua_algorithm.state_dict()
    found = tensors_in(states)
    assert all(each.isfinite().all() for each in found)
    model.bagua_ddp.close()
    return found


def ends_alike(rank: int, variant: Variant) -> None:
    here, there = train(rank, variant, "cpu"), train(rank, variant, "cuda")
    pairs = zip(here, there, strict=True)
    assert same_bits(here, there), [(mine - other).abs().max().item() for mine, other in pairs if mine.numel()]


# --- cases ------------------------------------------------------------------------------------------------------------


def accumulates_gradients_under_no_sync(rank: int) -> None:
    found = []
    for place in ("cpu", "cuda"):
        torch.manual_seed(1)
        model = Net().to(place)
        optimizer = sgd(model)
        model.with_bagua([optimizer], algorithms.GradientAllReduceAlgorithm())
        for step in range(3):
            optimizer.zero_grad()
            for part in range(3):
                x, y = batch(rank, 3 * step + part, place)
                if part < 2:
                    with model.bagua_ddp.no_sync():
                        nn.functional.cross_entropy(model(x), y).backward()
                else:
                    nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
        found.append(tensors_in(model.state_dict()))
        model.bagua_ddp.close()
    assert same_bits(*found)


def is_trained_by_the_wrapper(rank: int) -> None:
    found = []
    for place in ("cpu", "cuda"):
        for as_views in (True, False):
            torch.manual_seed(1 + rank)
            model = Net().to(place)
            wrapper = api.data_parallel.DistributedDataParallel(
                model,
                device_ids=None if place == "cpu" else [0],
                gradient_as_bucket_view=as_views,
                optimizers=[optimizer := adamw(model)],
            )
            for step in range(3):
                # The wrapper brings its inputs to its device.
                x, y = batch(rank, step, "cpu")
                with wrapper.no_sync():
                    nn.functional.cross_entropy(wrapper(x), y.to(place)).backward()
                nn.functional.cross_entropy(wrapper(x), y.to(place)).backward()
                optimizer.step()
                optimizer.zero_grad()
            found.append(tensors_in([wrapper.state_dict(), optimizer.state_dict()]))
            wrapper._engine.close()
    assert all(same_bits(found[0], other) for other in found[1:])
    for ids in ([1], [0, 1]):
        with pytest.raises(ValueError, match="device_ids"):
            api.data_parallel.DistributedDataParallel(Net().cuda(), device_ids=ids)


def may_have_forward_and_backward_on_streams_of_their_own(rank: int) -> None:
    found = []
    for algorithm in (algorithms.GradientAllReduceAlgorithm(), algorithms.DecentralizedAlgorithm(hierarchical=False)):
        for place in ("cpu", "cuda"):
            torch.manual_seed(1 + rank)
            model = Net().to(place)
            optimizer = sgd(model)
            model.with_bagua([optimizer], algorithm)
            main = torch.cuda.current_stream()
            forward, backward = torch.cuda.Stream(), torch.cuda.Stream()
            for step in range(STEPS):
                optimizer.zero_grad()
                forward.wait_stream(main)
                with torch.cuda.stream(forward):
                    x, y = batch(rank, step, place)
                    loss = nn.functional.cross_entropy(model(x), y)
                backward.wait_stream(forward)
                with torch.cuda.stream(backward):
                    loss.backward()
                    # Uses the results where nothing else has ordered them.
                    optimizer.step()
                main.wait_stream(backward)
                for each in (forward, backward):
                    for tensor in (x, y, loss, *(param.grad for param in model.parameters())):
                        if tensor.is_cuda:
                            tensor.record_stream(each)
                            tensor.record_stream(main)
            found.append(tensors_in(model.state_dict()))
            model.bagua_ddp.close()
    assert same_bits(found[0], found[1])
    assert same_bits(found[2], found[3])


def gets_the_state_of_the_first_ranks_optimizer(rank: int) -> None:
    """The counters of an optimizer are on the host, or on the device with ``capturable``."""
    for capturable in (False, True):
        torch.manual_seed(1)
        before = Net().cuda()
        optimizer = torch.optim.Adam(before.parameters(), lr=0.01)
        if rank == 0:  # The others' states are empty.
            nn.functional.cross_entropy(before(batch(0, 0, "cuda")[0]), batch(0, 0, "cuda")[1]).backward()
            optimizer.step()
            optimizer.zero_grad()
        for group in optimizer.param_groups:
            group["capturable"] = capturable
        if capturable:
            for state in optimizer.state.values():
                state["step"] = state["step"].cuda()
        before.with_bagua([optimizer], algorithms.GradientAllReduceAlgorithm())
        found = tensors_in([before.state_dict(), optimizer.state_dict()])
        counters = [state["step"] for state in optimizer.state.values()]
        assert len(counters) == len(list(before.parameters()))
        assert all(counter.is_cuda == capturable for counter in counters)
        assert same_bits(*(api.broadcast_object(found if rank == root else None, root) for root in range(2)))
        before.bagua_ddp.close()


class Split(nn.Module):
    def __init__(self, one: str, two: str) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(2, 2).to(one), nn.Linear(2, 2).to(two)


def is_refused_by_name_if_it_cannot_be_trained_and_the_group_goes_on(rank: int) -> None:
    for one, two in (("cuda:0", "cuda:1"), ("cpu", "cuda:0"), ("cuda:1", "cpu")):
        with pytest.raises(TypeError, match=rf"'one.weight' is on {one}, and parameter 'two.weight' on {two}"):
            Split(one, two).with_bagua([], algorithms.GradientAllReduceAlgorithm())
    embedding = nn.Embedding(5, 3, sparse=True).cuda()
    with pytest.raises(NotImplementedError, match=r"'weight' on cuda:0 has sparse gradients"):
        embedding.with_bagua([], algorithms.GradientAllReduceAlgorithm())
    # The CPU on one rank and a device on the other.
    with pytest.raises(bagua.MismatchError, match="on cuda"):
        nn.Linear(2, 2).to("cuda" if rank else "cpu").with_bagua([], algorithms.GradientAllReduceAlgorithm())
    # The group goes on.
    trained = nn.Linear(2, 2).cuda().with_bagua([], algorithms.GradientAllReduceAlgorithm())
    trained(torch.ones(1, 2, device="cuda")).sum().backward()
    assert trained.weight.grad.tolist() == [[1.0, 1.0]] * 2
    trained.bagua_ddp.close()


def trains_by_nccl_inside_hosts(rank: int) -> None:
    """NCCL has another version on each host, and ranks reach no memory of others. The lanes of a new group choose."""
    os.environ["BAGUA_SIM_NCCL_VERSION"] = "22703" if rank < 2 else "23007"
    os.environ["BAGUA_CUDA_COLLECTIVE"] = "auto"
    torch.cuda.set_device(rank)
    group = api.new_group()
    for variant in (HIERARCHICAL["gradient_allreduce"], HIERARCHICAL["bytegrad"], BOTH["powersgd"]):
        weights = []
        for place in ("cpu", "cuda"):
            torch.manual_seed(1 + rank)
            model = Net().to(place)
            optimizer = variant.optimizer(model)
            model.with_bagua([optimizer], variant.algorithm(optimizer), group)
            for step in range(STEPS):
                x, y = batch(rank, step, place)
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(x), y).backward()
                optimizer.step()
            weights.append([param.detach().cpu() for param in model.parameters()])
            model.bagua_ddp.close()
        here, there = weights
        # NCCL's order of addition is its own; an element of bytegrad may be rounded to the next step.
        for mine, other in zip(here, there, strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-3, atol=1e-3)
        assert same_bits(there, api.broadcast_object(there if rank == 0 else None, 0))
    chosen = bagua.stats()["groups"][group.group_name]["cuda"]
    assert chosen["collective"] == "hier"
    assert chosen["why"].endswith("; nccl inside the 2 hosts, staged between")


# Each closes its models. An engine that is not closed ends when Python collects it, at another time on each rank; the
# first to end waits 5 s for the others to close its memory, and leaves that behind then.
TOGETHER = (
    accumulates_gradients_under_no_sync,
    is_trained_by_the_wrapper,
    may_have_forward_and_backward_on_streams_of_their_own,
    gets_the_state_of_the_first_ranks_optimizer,
    is_refused_by_name_if_it_cannot_be_trained_and_the_group_goes_on,
)


# --- worlds -----------------------------------------------------------------------------------------------------------


def run(rank: int, variants: str) -> dict[str, str]:
    """Runs all cases on this rank; by name, what each raised ("" when nothing)."""
    torch.set_num_threads(1)
    cases: dict[str, Callable[[int], None]] = {
        name: lambda rank, variant=variant: ends_alike(rank, variant) for name, variant in globals()[variants].items()
    }
    more = TOGETHER if variants == "BOTH" else (trains_by_nccl_inside_hosts,)
    cases |= {case.__name__: case for case in more}
    with joined():
        return attempt({name: functools.partial(case, rank) for name, case in cases.items()}, api.barrier)


#: By staged the bits are those of the CPU.
NAMED: dict[str, Any] = {"timeout": 240.0, "BAGUA_TIMEOUT": 30, "BAGUA_CUDA_COLLECTIVE": "staged"}


@pytest.fixture(scope="module")
def two(_driver_of_ranks: Path) -> Ended:
    return ended(_driver_of_ranks, 2, run, "BOTH", **NAMED)


@pytest.fixture(scope="module")
def four(_driver_of_ranks: Path) -> Ended:
    hosts = ((0, 1), (2, 3))
    return ended(_driver_of_ranks, 4, run, "HIERARCHICAL", hosts=hosts, BAGUA_SIM_DEVICES=4, **NAMED)


@pytest.mark.parametrize("name", BOTH)
def test_training_on_two_devices_ends_with_the_weights_and_states_of_the_cpu(two: Ended, name: str) -> None:
    two.check(name)


@pytest.mark.parametrize("name", HIERARCHICAL)
def test_training_on_two_hosts_ends_with_the_weights_and_states_of_the_cpu(four: Ended, name: str) -> None:
    four.check(name)


def test_training_by_nccl_inside_hosts_ends_with_equal_weights_near_those_of_the_cpu(four: Ended) -> None:
    four.check("trains_by_nccl_inside_hosts")
    assert all(report["calls"].get("ncclReduce", 0) > 0 for report in four.ranks.reports)


@pytest.mark.parametrize("case", TOGETHER, ids=lambda case: case.__name__)
def test_a_model_on_a_device(two: Ended, case: Callable[[int], None]) -> None:
    two.check(case.__name__)


def test_training_makes_no_fault_leaves_nothing_and_does_not_wait_for_the_device(two: Ended, four: Ended) -> None:
    two.ranks.check()
    four.ranks.check()
