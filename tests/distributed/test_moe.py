"""Experts spread over the ranks compute what one process computes that holds all of them; and are saved and loaded."""

from __future__ import annotations

import copy
import math
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import bagua.torch_api as bagua
from bagua.errors import BaguaError
from bagua.torch_api.checkpoint import load_checkpoint, save_checkpoint
from bagua.torch_api.moe import MoE, is_moe_param
from tests.distributed.torch_ranks import cases_in, each_case, same_everywhere

HIDDEN = 6
CLOSE = {"rtol": 1e-6, "atol": 1e-6}


def expert(number: int) -> nn.Module:
    """Expert `number` of the job, the same wherever it is made."""
    module = nn.Sequential(nn.Linear(HIDDEN, 9), nn.Tanh(), nn.Linear(9, HIDDEN)).double()
    generator = torch.Generator().manual_seed(100 + number)
    with torch.no_grad():
        for param in module.parameters():
            param.copy_(torch.randn(param.shape, generator=generator, dtype=torch.float64))
    return module


def gate_weight(experts: int) -> torch.Tensor:
    return torch.randn(experts, HIDDEN, generator=torch.Generator().manual_seed(7))


def layer(num_local_experts: int, **options: Any) -> MoE:
    """This rank's part of the layer."""
    moe = MoE(HIDDEN, expert(0), num_local_experts, **options)
    first = bagua.get_rank() * num_local_experts
    for i, mine in enumerate(moe.bagua_moe.experts.bagua_experts):
        mine.load_state_dict(expert(first + i).state_dict())
    with torch.no_grad():
        moe.bagua_moe.gate.wg.weight.copy_(gate_weight(moe.num_experts))
    return moe


def tokens_of(rank: int, count: int) -> torch.Tensor:
    return torch.randn(count, HIDDEN, generator=torch.Generator().manual_seed(50 + rank), dtype=torch.float64)


class Dense(nn.Module):
    """The whole layer in one process, token by token, for one rank's tokens at a time."""

    def __init__(
        self, experts: int, k: int = 1, factor: float = 1.0, least: int = 4, policy: str | None = None
    ) -> None:
        super().__init__()
        self.experts = nn.ModuleList(expert(number) for number in range(experts))
        self.gate = nn.Parameter(gate_weight(experts))
        self.k, self.factor, self.least, self.policy = k, factor, least, policy

    def forward(self, x: torch.Tensor, used: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        count, experts = len(x), len(self.experts)
        seen = x.float()
        if self.policy == "Jitter" and self.training:
            seen = seen * torch.empty_like(seen).uniform_(0.99, 1.01)
        logits = seen @ self.gate.t()
        gates = logits.softmax(1)
        kept = torch.zeros(count, experts)
        if self.k == 1:
            capacity = max(math.ceil(count / experts * self.factor), self.least)
            scores = logits - (-torch.rand(count, experts).log()).log() if self._noise(1) else logits
            first = scores.argmax(1)
            draw = (
                torch.rand(count, experts)
                if self.training
                else -torch.arange(count).float()[:, None] * torch.ones(experts)
            )
            for e in range(experts):
                mine = [t for t in range(count) if first[t] == e and (used is None or used[t])]
                for t in sorted(mine, key=lambda t, e=e: -draw[t, e])[:capacity]:
                    kept[t, e] = 1
            weights = gates * kept
        else:
            capacity = math.ceil(2 * count / experts * self.factor)
            first = gates.argmax(1)
            scores = logits - (-torch.rand(count, experts).log()).log() if self._noise(2) else logits
            second = scores.masked_fill(F.one_hot(first, experts).bool(), -math.inf).argmax(1)
            load = [0] * experts
            for choice in (first, second):
                for t in range(count):
                    e = int(choice[t])
                    kept[t, e] = load[e] < capacity
                    load[e] += 1
            weights = gates * kept
            weights = weights / weights.sum(1, keepdim=True).clamp_min(torch.finfo(torch.float32).eps)
        chosen = F.one_hot(first, experts).float()
        if used is not None:
            chosen = chosen * used.float()[:, None]
        balance = (gates.mean(0) * chosen.mean(0)).sum() * experts
        output = sum(weights[:, e, None].double() * one(x) for e, one in enumerate(self.experts))
        return output, balance

    def _noise(self, k: int) -> bool:
        return self.training and (k == 2 or self.policy == "RSample")


def compare(
    rank: int, counts: list[int], local: int = 2, training: bool = True, use: bool = False, **options: Any
) -> None:
    """Output, loss and every gradient of a layer, against the dense one that saw all ranks' tokens."""
    ranks = bagua.get_world_size()
    names = {"k": "k", "capacity_factor": "factor", "min_capacity": "least", "noisy_gate_policy": "policy"}
    moe = layer(local, eval_capacity_factor=options.get("capacity_factor", 1.0), **options).train(training)
    dense = Dense(local * ranks, **{names[key]: value for key, value in options.items()}).train(training)
    inputs = [tokens_of(r, count).requires_grad_() for r, count in enumerate(counts)]
    outputs, losses = [], []
    for r, x in enumerate(inputs):
        torch.manual_seed(900 + r)
        output, balance = dense(x, torch.arange(len(x)) % 3 != 0 if use else None)
        outputs.append(output)
        losses.append((output * torch.cos(output.detach())).sum() + 3 * balance)
    torch.stack(losses).sum().backward()

    x = tokens_of(rank, counts[rank]).requires_grad_()
    torch.manual_seed(900 + rank)
    output, balance, exp_counts = moe(x, torch.arange(len(x)) % 3 != 0 if use else None)
    torch.testing.assert_close(output, outputs[rank], **CLOSE)
    ((output * torch.cos(output.detach())).sum() + 3 * balance).backward()
    torch.testing.assert_close(x.grad, inputs[rank].grad, **CLOSE)
    for i, mine in enumerate(moe.bagua_moe.experts.bagua_experts):
        for one, other in zip(mine.parameters(), dense.experts[rank * local + i].parameters(), strict=True):
            torch.testing.assert_close(one.grad, other.grad, **CLOSE)
    total = moe.bagua_moe.gate.wg.weight.grad.clone()
    bagua.allreduce_inplace(total)
    torch.testing.assert_close(total, dense.gate.grad, rtol=1e-5, atol=1e-5)
    assert exp_counts.sum() == (len(x) - len(range(0, len(x), 3)) if use else len(x))


def a_top_1_layer_equals_the_dense_one(rank: int) -> None:
    compare(rank, [16] * bagua.get_world_size(), capacity_factor=100.0)


def a_top_1_layer_drops_the_tokens_that_the_dense_one_drops(rank: int) -> None:
    compare(rank, [16] * bagua.get_world_size(), capacity_factor=0.5, min_capacity=1)


def a_top_2_layer_equals_the_dense_one(rank: int) -> None:
    compare(rank, [16] * bagua.get_world_size(), k=2, capacity_factor=100.0)


def a_top_2_layer_drops_the_tokens_that_the_dense_one_drops(rank: int) -> None:
    compare(rank, [16] * bagua.get_world_size(), k=2, capacity_factor=0.4)


def one_expert_on_each_rank_is_enough(rank: int) -> None:
    compare(rank, [12] * bagua.get_world_size(), local=1, k=2)


def ranks_may_have_different_numbers_of_tokens(rank: int) -> None:
    counts = [5 + 4 * r for r in range(bagua.get_world_size())]
    compare(rank, counts, capacity_factor=0.7, min_capacity=1)
    compare(rank, counts, k=2, capacity_factor=0.7)


def unused_tokens_are_seen_by_no_expert(rank: int) -> None:
    compare(rank, [16] * bagua.get_world_size(), use=True)


class Model(nn.Module):
    """Two layers around a mixture of experts, and a plain parameter that has "expert" in its name."""

    def __init__(self, local: int = 2, k: int = 1) -> None:
        super().__init__()
        self.first = nn.Linear(HIDDEN, HIDDEN).double()
        self.moe = layer(local, k=k, capacity_factor=100.0)
        self.experts_opinion = nn.Linear(HIDDEN, 1).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.experts_opinion(self.moe(torch.tanh(self.first(x)))[0])


class DenseModel(nn.Module):
    def __init__(self, model: Model) -> None:
        super().__init__()
        self.first = copy.deepcopy(model.first)
        self.moe = Dense(model.moe.num_experts, factor=100.0)
        self.experts_opinion = copy.deepcopy(model.experts_opinion)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.experts_opinion(self.moe(torch.tanh(self.first(x)))[0])


def training_equals_that_of_the_dense_model(rank: int) -> None:
    ranks = bagua.get_world_size()
    torch.manual_seed(1)
    model = Model()
    dense = DenseModel(model)
    first = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    second = torch.optim.SGD(dense.parameters(), lr=0.1, momentum=0.9)
    model.with_bagua([first], bagua.algorithms.GradientAllReduceAlgorithm())
    for step in range(5):
        first.zero_grad()
        second.zero_grad()
        model(tokens_of(rank + 10 * step, 8)).square().mean().backward()
        torch.stack([dense(tokens_of(r + 10 * step, 8)).square().mean() for r in range(ranks)]).mean().backward()
        first.step()
        second.step()
    for one, other in zip(model.first.parameters(), dense.first.parameters(), strict=True):
        torch.testing.assert_close(one, other, **CLOSE)
    for i, mine in enumerate(model.moe.bagua_moe.experts.bagua_experts):
        for one, other in zip(mine.parameters(), dense.moe.experts[2 * rank + i].parameters(), strict=True):
            torch.testing.assert_close(one, other, **CLOSE)
    assert same_everywhere(*model.first.parameters(), *model.moe.bagua_moe.gate.parameters())


def a_sum_of_gradients_leaves_experts_their_sum(rank: int) -> None:
    torch.manual_seed(1)
    model = Model()
    alone = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.with_bagua([optimizer], bagua.algorithms.GradientAllReduceAlgorithm(average=False))
    for network in (model, alone):
        torch.manual_seed(2)
        network(tokens_of(rank, 8)).sum().backward()
    for one, other in zip(model.moe.parameters(), alone.moe.parameters(), strict=True):
        if is_moe_param(one):
            assert torch.equal(one.grad, other.grad)


def experts_are_neither_broadcast_nor_averaged(rank: int) -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.common = nn.Linear(3, 2)
            self.mine = nn.BatchNorm1d(2)
            self.mine.expert = True
            for param in self.mine.parameters():
                param.expert = True

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.mine(self.common(x))

    model = Own()
    with torch.no_grad():
        model.mine.weight.fill_(rank + 1.0)
        model.mine.running_mean.fill_(rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.randn(4, 3)).sum().backward()
    optimizer.step()
    buffer = optimizer.state[model.mine.bias]["momentum_buffer"].fill_(rank).clone()
    mean, weight = model.mine.running_mean.clone(), model.mine.weight.clone()
    model.with_bagua([optimizer], bagua.algorithms.GradientAllReduceAlgorithm())
    assert [name for name, _ in model.bagua_ddp.bagua_build_params()] == ["common.weight", "common.bias"]
    assert torch.equal(model.mine.weight, weight)
    assert torch.equal(model.mine.running_mean, mean)
    assert torch.equal(optimizer.state[model.mine.bias]["momentum_buffer"], buffer)
    assert same_everywhere(*model.common.parameters(), optimizer.state[model.common.bias]["momentum_buffer"])
    optimizer.zero_grad()
    x = torch.randn(4, 3)
    alone = copy.deepcopy(model)
    model(x).square().sum().backward()
    alone(x).square().sum().backward()
    assert torch.equal(model.mine.weight.grad, alone.mine.weight.grad)
    assert not torch.equal(model.common.weight.grad, alone.common.weight.grad)


def wrong_arguments_are_named(rank: int) -> None:
    for options, text in (
        ({"k": 3}, "k must be 1 or 2"),
        ({"num_local_experts": 0}, "num_local_experts must be at least 1"),
        ({"noisy_gate_policy": "Loud"}, "noisy_gate_policy must be one of"),
    ):
        with pytest.raises(ValueError, match=text):
            MoE(HIDDEN, nn.Linear(HIDDEN, HIDDEN), **options)
    with pytest.raises(ValueError, match="used_token works with k=1 only"):
        MoE(HIDDEN, nn.Linear(HIDDEN, HIDDEN), 2, k=2)(torch.randn(8, HIDDEN), torch.ones(8))


def folder(rank: int) -> Path:
    """A folder that all ranks share."""
    return Path(bagua.broadcast_object(tempfile.mkdtemp(prefix="bagua-moe-") if rank == 0 else None))


def trained(local: int = 2) -> tuple[Model, torch.optim.Optimizer]:
    model = Model(local)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    model(tokens_of(bagua.get_rank(), 8)).square().mean().backward()
    optimizer.step()
    return model, optimizer


def experts_are_saved_and_loaded(rank: int) -> None:
    path, ranks = folder(rank), bagua.get_world_size()
    model, optimizer = trained()
    save_checkpoint(7, path, model, optimizer)
    files = {file.name for file in (path / "iter_0000007").iterdir()}
    assert files == {
        "mp_rank_00_model_states.pt",
        *(f"expert_{number}_mp_rank_00_model_states.pt" for number in range(2 * ranks)),
        *(f"expert_parallel_rank_{r}_mp_rank_00_optim_states.pt" for r in range(ranks)),
    }
    number = 2 * rank + 1
    stored = torch.load(path / "iter_0000007" / f"expert_{number}_mp_rank_00_model_states.pt", weights_only=True)
    key = f"moe.bagua_moe.experts.bagua_experts.{number}.0.weight"
    assert torch.equal(stored[key], model.moe.bagua_moe.experts.bagua_experts[1][0].weight)
    whole = torch.load(path / "iter_0000007" / "mp_rank_00_model_states.pt", weights_only=True)
    assert "experts_opinion.weight" in whole["model"]
    assert not any("bagua_experts" in name for name in whole["model"])

    other, optimizer2 = Model(), None
    optimizer2 = torch.optim.Adam(other.parameters(), lr=0.5)
    assert load_checkpoint(path, other, optimizer2) == 7
    expected = model.state_dict()
    for name, value in other.state_dict().items():
        # What is not an expert's is rank 0's.
        if "bagua_experts" in name:
            assert torch.equal(value, expected[name]), name
    assert same_everywhere(*other.first.parameters(), *other.experts_opinion.parameters())
    assert optimizer2.param_groups[0]["lr"] == 0.01
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(optimizer.state[one]["exp_avg"], optimizer2.state[two]["exp_avg"])


def an_error_of_one_rank_is_an_error_on_all(rank: int) -> None:
    path = folder(rank)
    model, optimizer = trained()
    save_checkpoint(1, path, model, optimizer)
    if rank == 1:
        optimizer.param_groups[0]["note"] = object()
    expected = TypeError if rank == 1 else BaguaError
    with pytest.raises(expected, match=r"\['note'\] is a builtins.object|rank\(s\) 1 failed to collect"):
        save_checkpoint(2, path, model, optimizer)
    assert load_checkpoint(path, model, optimizer) == 1


def layers_with_different_numbers_of_experts_are_not_saved(rank: int) -> None:
    with pytest.raises(NotImplementedError, match="layers with 1, 2 experts per rank"):
        save_checkpoint(1, folder(rank), nn.Sequential(layer(1), layer(2)))


CASES = cases_in(globals())

test = each_case(CASES, 2, 4)
