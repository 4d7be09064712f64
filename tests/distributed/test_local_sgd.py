"""local_sgd and diloco against a simulation of all ranks in one process, and what happens around a round."""

from __future__ import annotations

import contextlib
import copy
import io
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

import bagua as neutral
import bagua.torch_api as bagua
from bagua.lifecycle import torch_state
from bagua.torch_api.algorithms import Algorithm, DiLoCoAlgorithm, LocalSGDAlgorithm
from tests.distributed.compressed_oracle import CompressedAllReduce
from tests.distributed.torch_ranks import Case, Hosts, check, run_cases, same_everywhere
from tests.world import make_world

#: Bytes: several buckets in the models of this file.
SMALL = 64


def net(dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.Tanh(), torch.nn.Linear(4, 3)).to(dtype)


def sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def data(rank: int, step: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * rank + step)
    return torch.randn(6, 5, generator=generator).to(dtype)


def local_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()


def hosts() -> list[list[int]]:
    """The ranks of each host."""
    world: Any = torch_state().world
    return [list(ranks) for ranks in world.raw.hosts]


def rounds(model: Any) -> int:
    """How many rounds there were."""
    counts = {bucket.backend_bucket.step for bucket in model.bagua_buckets}
    assert len(counts) == 1
    return int(counts.pop())


def mean_of(values: Sequence[torch.Tensor]) -> torch.Tensor:
    """As the core adds: inside hosts first, in rank order, in float32; divided once."""
    added = []
    for host in hosts():
        total = values[host[0]].float()
        for rank in host[1:]:
            total = total + values[rank].float()
        added.append(total)
    total = added[0]
    for other in added[1:]:
        total = total + other
    return (total / len(values)).to(values[0].dtype)


class Simulation:
    """All ranks' models in one process: plain torch, and the formulas of the papers."""

    def __init__(self, model: torch.nn.Module, make_optimizer: Callable[..., torch.optim.Optimizer], size: int) -> None:
        self.models = [copy.deepcopy(model) for _ in range(size)]
        self.optimizers = [make_optimizer(each) for each in self.models]
        self.anchors = {name: param.detach().clone() for name, param in model.named_parameters()}
        self.momenta = {name: torch.zeros_like(param, dtype=torch.float32) for name, param in self.anchors.items()}

    def differences(self) -> dict[str, list[torch.Tensor]]:
        return {
            name: [anchor - model.get_parameter(name).detach() for model in self.models]
            for name, anchor in self.anchors.items()
        }

    def move(self, means: dict[str, torch.Tensor], lr: float, momentum: float, nesterov: bool) -> None:
        for name, mean in means.items():
            wide = mean.float()
            b = self.momenta[name] = momentum * self.momenta[name] + wide
            moved = self.anchors[name].float() - lr * (wide + momentum * b if nesterov else b)
            self.anchors[name] = moved.to(mean.dtype)
            for model in self.models:
                with torch.no_grad():
                    model.get_parameter(name).copy_(self.anchors[name])

    def round(self, lr: float = 1.0, momentum: float = 0.0, nesterov: bool = False) -> None:
        self.move({name: mean_of(each) for name, each in self.differences().items()}, lr, momentum, nesterov)


def equal(model: torch.nn.Module, expected: torch.nn.Module) -> bool:
    pairs = zip(model.parameters(), expected.parameters(), strict=True)
    return all(torch.equal(mine, theirs) for mine, theirs in pairs)


Outer = tuple[float, float, bool]
PLAIN: Outer = (1.0, 0.0, False)


def variants() -> list[tuple[Algorithm, Outer]]:
    return [
        (LocalSGDAlgorithm(3), PLAIN),
        (DiLoCoAlgorithm(3), (0.7, 0.9, True)),
        (DiLoCoAlgorithm(3, outer_lr=0.5, outer_momentum=0.8, nesterov=False), (0.5, 0.8, False)),
        (DiLoCoAlgorithm(3, outer_lr=0.9, outer_momentum=0.0), (0.9, 0.0, False)),
    ]


def weights_equal_the_simulation_after_every_step(rank: int) -> None:
    size = bagua.get_world_size()
    for algorithm, outer in variants():
        for do_flatten in (True, False):
            model = net()
            optimizer = sgd(model)
            model.with_bagua([optimizer], algorithm, do_flatten=do_flatten, bucket_size=SMALL)
            assert len(model.bagua_buckets) > 1
            simulated = Simulation(model, sgd, size)
            for step in range(8):
                local_step(model, optimizer, data(rank, step))
                for other in range(size):
                    local_step(simulated.models[other], simulated.optimizers[other], data(other, step))
                if step % 3 == 2:
                    simulated.round(*outer)
                    assert same_everywhere(*model.parameters())
                assert equal(model, simulated.models[rank]), f"{algorithm.describe()} step {step}"
            assert rounds(model) == 2


def half_types_are_rounded_as_the_file_says(rank: int) -> None:
    size = bagua.get_world_size()
    for dtype in (torch.bfloat16, torch.float16):
        model = net(dtype)
        optimizer = sgd(model)
        model.with_bagua([optimizer], DiLoCoAlgorithm(2))
        simulated = Simulation(model, sgd, size)
        for step in range(6):
            local_step(model, optimizer, data(rank, step, dtype))
            for other in range(size):
                local_step(simulated.models[other], simulated.optimizers[other], data(other, step, dtype))
            if step % 2:
                # Sums inside hosts are rounded to the type before they are sent: not simulated here.
                if len(hosts()) > 1:
                    assert same_everywhere(*model.parameters())
                    return
                simulated.round(0.7, 0.9, True)
            assert equal(model, simulated.models[rank])


def codecs_and_error_feedback_equal_the_oracle(rank: int) -> None:
    size = bagua.get_world_size()
    for codec, options, hierarchical, feedback in (
        ("minmax_u8", {}, False, True),
        ("minmax_u8", {}, True, True),
        ("top_k", {"k": 0.3}, False, True),
        ("bf16", {}, False, False),
    ):
        algorithm = DiLoCoAlgorithm(
            2, hierarchical=hierarchical, compression=neutral.Codec(codec, **options), error_feedback=feedback
        )
        model = net()
        optimizer = sgd(model)
        model.with_bagua([optimizer], algorithm, bucket_size=SMALL)
        simulated = Simulation(model, sgd, size)
        members = hosts() if hierarchical else [[each] for each in range(size)]
        if len(members) == 1:
            continue
        names = [[tensor.bagua_tensor_name for tensor in bucket.tensors] for bucket in model.bagua_buckets]
        oracles = [CompressedAllReduce(codec, options, len(members), size, True, feedback=feedback) for _ in names]
        for step in range(6):
            local_step(model, optimizer, data(rank, step))
            for other in range(size):
                local_step(simulated.models[other], simulated.optimizers[other], data(other, step))
            if step % 2:
                means = {}
                differences = simulated.differences()
                for oracle, bucket in zip(oracles, names, strict=True):
                    of_rank = [np.concatenate([differences[n][r].numpy().ravel() for n in bucket]) for r in range(size)]
                    given = [np.sum([of_rank[r] for r in member], axis=0, dtype=np.float32) for member in members]
                    found = torch.from_numpy(oracle.step(given, -given[0].size % size).copy())
                    parts = found.split([simulated.anchors[n].numel() for n in bucket])
                    means.update({n: p.view_as(simulated.anchors[n]) for n, p in zip(bucket, parts, strict=True)})
                simulated.move(means, 0.7, 0.9, True)
            assert equal(model, simulated.models[rank]), f"{algorithm.describe()} step {step}"


def an_interval_of_1_averages_weights(rank: int) -> None:
    size = bagua.get_world_size()

    def plain(model: torch.nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.1)

    model = net()
    optimizer = plain(model)
    model.with_bagua([optimizer], LocalSGDAlgorithm(1))
    alone = [copy.deepcopy(model) for _ in range(size)]
    for step in range(5):
        local_step(model, optimizer, data(rank, step))
        for other, each in enumerate(alone):
            local_step(each, plain(each), data(other, step))
        for params in zip(*(each.parameters() for each in alone), strict=True):
            mean = torch.stack([param.detach() for param in params]).mean(dim=0)
            for param in params:
                param.data.copy_(mean)
        for mine, theirs in zip(model.parameters(), alone[0].parameters(), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-6)


def buffers_become_those_of_rank_0_after_a_round_only(rank: int) -> None:
    for broadcast_buffers in (True, False):
        model = torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 3))
        optimizer = sgd(model)
        model.with_bagua([optimizer], LocalSGDAlgorithm(2), broadcast_buffers=broadcast_buffers)
        for step in range(6):
            local_step(model, optimizer, data(rank, step))
            assert same_everywhere(model[1].running_mean) == (step % 2 == 1 and broadcast_buffers)


def an_overflow_on_one_rank_delays_nobody(rank: int) -> None:
    size = bagua.get_world_size()
    model = net()
    optimizer = sgd(model)
    model.with_bagua([optimizer], DiLoCoAlgorithm(2))
    simulated = Simulation(model, sgd, size)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1000, backoff_factor=0.999)
    # Steps 1, 3 and 5 end with a round; in step 5 every rank overflows.
    overflows = {1: [size - 1], 2: [0], 3: [0], 5: list(range(size))}
    for step in range(8):
        optimizer.zero_grad()
        loss = model(data(rank, step)).square().mean()
        if rank in overflows.get(step, []):
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        # As programs do for their log, before the step and after it.
        bagua.allreduce_inplace(torch.zeros(1))
        scaler.step(optimizer)
        bagua.allreduce_inplace(torch.zeros(1))
        scaler.update(4.0)
        for other in range(size):
            if other not in overflows.get(step, []):
                optimizer_of = simulated.optimizers[other]
                optimizer_of.zero_grad()
                (simulated.models[other](data(other, step)).square().mean() * 4.0).backward()
                for param in simulated.models[other].parameters():
                    param.grad.mul_(0.25)
                optimizer_of.step()
        if step % 2:
            simulated.round(0.7, 0.9, True)
        if step % 2 == 0 or rank not in overflows.get(step, []):
            assert equal(model, simulated.models[rank]), f"step {step}"
    assert rounds(model) == 4
    assert same_everywhere(*model.parameters())


def an_overflow_in_the_last_step_does_not_hang(rank: int) -> None:
    model = net()
    optimizer = sgd(model)
    model.with_bagua([optimizer], LocalSGDAlgorithm(2))
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for step in range(2):
        optimizer.zero_grad()
        factor = float("inf") if step == 1 and rank == 0 else 1.0
        scaler.scale(model(data(rank, step)).square().mean() * factor).backward()
        scaler.step(optimizer)
        scaler.update()
    bagua.barrier()
    assert rounds(model) == 1
    model.bagua_algorithm.state_dict()
    assert same_everywhere(*model.parameters())


def an_optimizer_that_is_not_called_delays_the_round_to_the_next_forward(rank: int) -> None:
    size = bagua.get_world_size()
    model = net()
    optimizer = sgd(model)
    model.with_bagua([optimizer], LocalSGDAlgorithm(2))
    simulated = Simulation(model, sgd, size)
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
        for other in range(size):
            if other not in idle.get(step, []):
                local_step(simulated.models[other], simulated.optimizers[other], data(other, step))
        if step % 2:
            simulated.round()
    model.bagua_algorithm.state_dict()
    assert rounds(model) == 3
    assert equal(model, simulated.models[rank])


def every_optimizer_of_the_model_steps_before_a_round(rank: int) -> None:
    size = bagua.get_world_size()

    def both(model: Any) -> list[torch.optim.Optimizer]:
        return [torch.optim.SGD(model[0].parameters(), lr=0.1), torch.optim.Adam(model[2].parameters(), lr=0.01)]

    model = net()
    optimizers = both(model)
    stranger = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    model.with_bagua([*optimizers, stranger], LocalSGDAlgorithm(1))
    alone = Simulation(model, sgd, size)
    theirs = [both(each) for each in alone.models]
    for step in range(4):
        order = (0, 1) if step % 2 else (1, 0)
        for each, mine, who in [*zip(alone.models, theirs, range(size), strict=True), (model, optimizers, rank)]:
            each.zero_grad()
            each(data(who, step)).square().mean().backward()
            for number in order:
                assert each is not model or rounds(model) == step
                mine[number].step()
        assert rounds(model) == step + 1
        alone.round()
        assert equal(model, alone.models[rank])


def a_second_backward_of_a_step_brings_no_second_round(rank: int) -> None:
    model = net()
    optimizer = sgd(model)
    model.with_bagua([optimizer], LocalSGDAlgorithm(1))
    for step in range(3):
        optimizer.zero_grad()
        first = model(data(rank, step)).square().mean()
        second = model(data(rank, step + 9)).square().mean()
        first.backward()
        second.backward()
        optimizer.step()
        assert same_everywhere(*model.parameters())
        # Without a forward: no step begins.
        (model[2].bias.square().sum() * (rank + 1)).backward()
        optimizer.step()
        assert rounds(model) == step + 1
        assert not same_everywhere(model[2].bias)


def no_sync_makes_one_step_of_several_backwards(rank: int) -> None:
    size = bagua.get_world_size()
    model = net()
    optimizer = sgd(model)
    model.with_bagua([optimizer], LocalSGDAlgorithm(2))
    simulated = Simulation(model, sgd, size)
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


def unused_and_sparse_parameters_travel(rank: int) -> None:
    class Parts(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = torch.nn.Embedding(7, 3, sparse=True)
            self.one = torch.nn.Linear(3, 2)
            self.never = torch.nn.Linear(3, 2)

        def forward(self, x: torch.Tensor, use: bool) -> torch.Tensor:
            return self.one(self.words(x)) if use else torch.zeros(2, requires_grad=True)

    size = bagua.get_world_size()
    model = Parts()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.with_bagua([optimizer], LocalSGDAlgorithm(2))
    alone = [copy.deepcopy(model) for _ in range(size)]
    for step in range(4):
        for who, each in [*enumerate(alone), (rank, model)]:
            mine = optimizer if each is model else torch.optim.SGD(each.parameters(), lr=0.1)
            mine.zero_grad()
            # The loss of rank 0 depends on no parameter in steps 1 and 2.
            each(torch.tensor([who, step]), who != 0 or step in (0, 3)).square().sum().backward()
            with torch.no_grad():
                each.never.bias.add_(float(who))
            mine.step()
        assert model.bagua_ddp.step == step
        if step % 2:
            assert same_everywhere(*model.parameters())
            for params in zip(*(each.parameters() for each in alone), strict=True):
                mean = torch.stack([param.detach() for param in params]).mean(dim=0)
                for param in params:
                    param.data.copy_(mean)
            for mine_, theirs in zip(model.parameters(), alone[0].parameters(), strict=True):
                torch.testing.assert_close(mine_, theirs, rtol=1e-6, atol=1e-6)
    assert rounds(model) == 2


def models_that_overflow_together_or_alone_delay_nobody(rank: int) -> None:
    algorithm = LocalSGDAlgorithm(1)
    # By step: of which models the gradients of rank 0 overflow.
    overflows = {1: [0], 2: [1], 3: [0, 1]}
    for order in ((0, 1), (1, 0)):
        models = [torch.nn.Linear(5, 4), torch.nn.Linear(4, 3)]
        optimizers = [sgd(each) for each in models]
        for model, optimizer in zip(models, optimizers, strict=True):
            model.with_bagua([optimizer], algorithm)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
        for step in range(5):
            for optimizer in optimizers:
                optimizer.zero_grad()
            broken = overflows.get(step, []) if rank == 0 else []
            hooks = [models[each].weight.register_hook(lambda grad: grad * float("inf")) for each in broken]
            scaler.scale(models[1](models[0](data(rank, step)).tanh()).square().mean()).backward()
            bagua.barrier()
            for number in order:
                before = models[number].weight.detach().clone()
                scaler.step(optimizers[number])
                assert torch.equal(before, models[number].weight) == (number in broken)
            bagua.barrier()
            scaler.update(2.0)
            for hook in hooks:
                hook.remove()
        for model in models:
            assert rounds(model) == 5
            assert same_everywhere(*model.parameters())


def with_bagua_inside_a_round_begins_with_the_weights_of_rank_0(rank: int) -> None:
    size = bagua.get_world_size()
    model = net()
    optimizer = sgd(model)
    algorithm = DiLoCoAlgorithm(4)
    model.with_bagua([optimizer], algorithm)
    for step in range(2):
        local_step(model, optimizer, data(rank, step))
    assert not same_everywhere(*model.parameters())
    model.with_bagua([optimizer], algorithm)
    assert same_everywhere(*model.parameters())
    simulated = Simulation(model, sgd, size)
    for other in simulated.optimizers:
        other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for step in range(4):
        local_step(model, optimizer, data(rank, step))
        for other in range(size):
            local_step(simulated.models[other], simulated.optimizers[other], data(other, step))
        assert rounds(model) == (step == 3)
    simulated.round(0.7, 0.9, True)
    assert equal(model, simulated.models[rank])


def a_resumed_run_goes_on_to_the_bit(rank: int) -> None:
    for feedback in (False, True):
        algorithm = DiLoCoAlgorithm(
            4, hierarchical=False, compression="f16" if feedback else None, error_feedback=feedback
        )
        # Inside a round, and right after one.
        for saved in (6, 8):
            model = net()
            optimizer = sgd(model)
            model.with_bagua([optimizer], algorithm, bucket_size=SMALL)
            for step in range(13):
                if step == saved:
                    file = io.BytesIO()
                    states = [model.state_dict(), optimizer.state_dict(), model.bagua_algorithm.state_dict()]
                    assert states[2].keys() == {"algorithm", "step", "round", "anchor", "outer_momentum"} | (
                        {"error"} if feedback else set()
                    )
                    assert (states[2]["algorithm"], states[2]["step"], states[2]["round"]) == (
                        "diloco",
                        saved,
                        saved // 4,
                    )
                    torch.save(states, file)
                local_step(model, optimizer, data(rank, step))
            resumed = net()
            optimizer = sgd(resumed)
            resumed.with_bagua([optimizer], algorithm, bucket_size=SMALL if feedback else 1 << 20)
            file.seek(0)
            first, second, third = torch.load(file, weights_only=True)
            resumed.load_state_dict(first)
            optimizer.load_state_dict(second)
            resumed.bagua_algorithm.load_state_dict(third)
            for step in range(saved, 13):
                local_step(resumed, optimizer, data(rank, step))
            assert equal(resumed, model)
            assert rounds(resumed) == 3
    other = net().with_bagua([], LocalSGDAlgorithm())
    with pytest.raises(ValueError, match="'diloco'.*'local_sgd'"):
        other.bagua_algorithm.load_state_dict(third)


def a_model_can_go_back_to_an_earlier_state(rank: int) -> None:
    model = net()
    optimizer = sgd(model)
    model.with_bagua([optimizer], LocalSGDAlgorithm(2))
    local_step(model, optimizer, data(rank, 0))
    states = copy.deepcopy([model.state_dict(), optimizer.state_dict(), model.bagua_algorithm.state_dict()])
    local_step(model, optimizer, data(rank, 1))
    assert same_everywhere(*model.parameters())
    after = [param.detach().clone() for param in model.parameters()]
    model.load_state_dict(states[0])
    optimizer.load_state_dict(states[1])
    model.bagua_algorithm.load_state_dict(states[2])
    local_step(model, optimizer, data(rank, 1))
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(model.parameters(), after, strict=True))


def frozen_and_ignored_parameters_stay(rank: int) -> None:
    model = net()
    model._bagua_params_and_buffers_to_ignore = ["0.bias"]
    model[2].bias.requires_grad_(False)
    optimizer = sgd(model)
    model.with_bagua([optimizer], LocalSGDAlgorithm(1))
    frozen = model[2].bias.detach().clone()
    local_step(model, optimizer, data(rank, 0))
    assert same_everywhere(model[0].weight, model[2].weight)
    assert not same_everywhere(model[0].bias)
    assert torch.equal(model[2].bias, frozen)
    assert set(model.bagua_algorithm.state_dict()["anchor"]) == {"0.weight", "2.weight"}


CASES: list[Case] = [
    weights_equal_the_simulation_after_every_step,
    half_types_are_rounded_as_the_file_says,
    codecs_and_error_feedback_equal_the_oracle,
    an_interval_of_1_averages_weights,
    buffers_become_those_of_rank_0_after_a_round_only,
    an_overflow_on_one_rank_delays_nobody,
    an_overflow_in_the_last_step_does_not_hang,
    an_optimizer_that_is_not_called_delays_the_round_to_the_next_forward,
    every_optimizer_of_the_model_steps_before_a_round,
    a_second_backward_of_a_step_brings_no_second_round,
    no_sync_makes_one_step_of_several_backwards,
    unused_and_sparse_parameters_travel,
    models_that_overflow_together_or_alone_delay_nobody,
    with_bagua_inside_a_round_begins_with_the_weights_of_rank_0,
    a_resumed_run_goes_on_to_the_bit,
    a_model_can_go_back_to_an_earlier_state,
    frozen_and_ignored_parameters_stay,
]

WORLDS: list[tuple[int, Hosts]] = [
    (2, None),
    (3, None),
    (4, None),
    (4, ((0, 1), (2, 3))),
    (3, ((0, 1), (2,))),
]


def run(rank: int) -> dict[str, str]:
    return run_cases(rank, CASES)


@pytest.mark.parametrize(("size", "hosts"), WORLDS, ids=["2", "3", "4", "2+2", "2+1"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test(case: Case, size: int, hosts: Hosts) -> None:
    check(run, size, case, hosts)


def sent_in_each_step(rank: int) -> list[int]:
    torch.set_num_threads(1)
    bagua.init_process_group()
    model = torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 3))
    optimizer = sgd(model)
    model.with_bagua([optimizer], LocalSGDAlgorithm(4))

    def sent() -> int:
        groups = neutral.stats()["groups"].values()
        return sum(counts["wire_bytes_sent"] for group in groups for counts in group["ops"].values())

    found = []
    for step in range(8):
        before = sent()
        local_step(model, optimizer, data(rank, step))
        found.append(sent() - before)
    bagua.destroy_process_group()
    return found


def test_nothing_is_sent_between_rounds() -> None:
    for found in make_world(2, hosts=[[0], [1]]).run(sent_in_each_step):
        assert [count > 0 for count in found] == [False, False, False, True] * 2


def test_options_out_of_range_are_refused() -> None:
    for make in (LocalSGDAlgorithm, DiLoCoAlgorithm):
        for interval in (0, -1):
            with pytest.raises(ValueError, match=f"communication_interval={interval} "):
                make(interval)
        with pytest.raises(TypeError):
            make(2.5)
        with pytest.raises(ValueError, match="error_feedback without compression"):
            make(error_feedback=True)
        with pytest.raises(ValueError, match="nonsense"):
            make(compression="nonsense")
        with pytest.raises(TypeError):
            make(8, True)
    for outer_lr in (0.0, -0.7, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="outer_lr"):
            DiLoCoAlgorithm(outer_lr=outer_lr)
    for outer_momentum in (-0.1, 1.0, float("nan")):
        with pytest.raises(ValueError, match="outer_momentum"):
            DiLoCoAlgorithm(outer_momentum=outer_momentum)


def test_they_are_registered_by_name() -> None:
    assert Algorithm.init("local_sgd", communication_interval=3).describe() == (
        "local_sgd(communication_interval=3, hierarchical=True, compression=None, error_feedback=False)"
    )
    assert Algorithm.init("diloco").describe() == (
        "diloco(communication_interval=100, outer_lr=0.7, outer_momentum=0.9, nesterov=True, hierarchical=True, "
        "compression=None, error_feedback=False)"
    )
