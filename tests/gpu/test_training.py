"""Models on a GPU, trained by every algorithm: close to the same on the CPU, and equal on all ranks where they must be.

Products of matrices round in another order on a GPU, so that weights are close only, and a level of a compressed
gradient may differ by one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import bagua.torch_api as api
from bagua.torch_api import algorithms
from tests.cuda.ranks import Ranks, on_ranks
from tests.gpu.torch_ranks import in_torch, joined

STEPS = 20


class Variant(NamedTuple):
    """How a model is trained."""

    algorithm: Callable[[Any], Any]
    #: How far a weight may be from that of the CPU.
    close: float = 5e-5
    #: All ranks have the same weights afterwards.
    same: bool = True


VARIANTS = {
    "gradient_allreduce": Variant(lambda _: algorithms.GradientAllReduceAlgorithm()),
    "gradient_allreduce, sums": Variant(lambda _: algorithms.GradientAllReduceAlgorithm(average=False)),
    "bytegrad": Variant(lambda _: algorithms.ByteGradAlgorithm(hierarchical=False), 2e-2),
    "bytegrad, error feedback": Variant(lambda _: algorithms.ByteGradAlgorithm(False, error_feedback=True), 2e-2),
    "qadam": Variant(lambda optimizer: algorithms.QAdamAlgorithm(optimizer, hierarchical=False), 5e-2),
    "decentralized": Variant(lambda _: algorithms.DecentralizedAlgorithm(hierarchical=False), same=False),
    "decentralized, shift_one": Variant(lambda _: algorithms.DecentralizedAlgorithm(False, "shift_one"), same=False),
    "low_precision_decentralized": Variant(
        lambda _: algorithms.LowPrecisionDecentralizedAlgorithm(hierarchical=False), 5e-2, same=False
    ),
    "local_sgd": Variant(lambda _: algorithms.LocalSGDAlgorithm(2, hierarchical=False)),
    "diloco": Variant(lambda _: algorithms.DiLoCoAlgorithm(2, hierarchical=False), 1e-4),
    "powersgd": Variant(lambda _: algorithms.PowerSGDAlgorithm(1, min_compression=1.0), 5e-3),
}


def trained(rank: int, name: str, place: str) -> tuple[list[float], list[torch.Tensor]]:
    """The losses of the steps, and the weights in the end, on the CPU."""
    torch.manual_seed(1 + rank)
    model: Any = nn.Sequential(nn.Linear(64, 48), nn.Tanh(), nn.Linear(48, 10)).to(place)
    if name == "qadam":
        optimizer: Any = algorithms.QAdamOptimizer(model.parameters(), lr=0.005, warmup_steps=5)
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    model = model.with_bagua([optimizer], VARIANTS[name].algorithm(optimizer))
    random = torch.Generator().manual_seed(11 + rank)
    centres = torch.randn(10, 64, generator=torch.Generator().manual_seed(3))
    losses = []
    for _ in range(STEPS):
        y = torch.randint(0, 10, (32,), generator=random)
        x = centres[y] + 0.3 * torch.randn(32, 64, generator=random)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x.to(place)), y.to(place))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    weights = [each.detach().cpu() for each in model.state_dict().values()]
    return losses, weights


def here_and_there(rank: int, names: list[str]) -> list[tuple[str, float, bool, bool]]:
    """Per algorithm: the largest difference of a weight, whether the loss fell, whether all ranks have the same."""
    found = []
    # No TF32, which rounds to 10 bits.
    torch.set_float32_matmul_precision("highest")
    with joined():
        for name in names:
            _, here = trained(rank, name, "cpu")
            losses, there = trained(rank, name, "cuda")
            far = max(float((one - two).abs().max()) for one, two in zip(here, there, strict=True))
            mine = torch.cat([each.float().flatten() for each in there])
            every = torch.zeros(api.get_world_size() * mine.numel())
            api.allgather(mine, every)
            same = bool(every.view(-1, mine.numel()).eq(mine).all())
            found.append((name, far, losses[-1] < 0.7 * losses[0], same))
    return found


def check(found: list[tuple[str, float, bool, bool]]) -> None:
    for name, far, fell, same in found:
        assert far <= VARIANTS[name].close, (name, far)
        assert fell, name
        assert same or not VARIANTS[name].same, name


@pytest.mark.parametrize("name", VARIANTS)
def test_a_model_on_a_device_is_trained_as_on_the_cpu(ranks: Ranks, name: str) -> None:
    for found in ranks(2, here_and_there, [name]):
        check(found)


def test_a_model_is_trained_by_nccl_as_on_the_cpu(ranks: Ranks) -> None:
    names = ["gradient_allreduce", "bytegrad"]
    for found in ranks(1, here_and_there, names, BAGUA_CUDA_COLLECTIVE="nccl"):
        check(found)


@on_ranks(2, in_torch)
def test_forward_and_backward_may_have_streams_of_their_own(rank: int) -> None:
    for algorithm in (algorithms.GradientAllReduceAlgorithm(), algorithms.DecentralizedAlgorithm(hierarchical=False)):
        found = []
        for place in ("cpu", "cuda"):
            torch.manual_seed(1 + rank)
            model: Any = nn.Sequential(nn.Linear(64, 48), nn.Tanh(), nn.Linear(48, 10)).to(place)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
            model.with_bagua([optimizer], algorithm)
            main, forward, backward = torch.cuda.current_stream(), torch.cuda.Stream(), torch.cuda.Stream()
            random = torch.Generator().manual_seed(11 + rank)
            for _ in range(5):
                optimizer.zero_grad()
                forward.wait_stream(main)
                with torch.cuda.stream(forward):
                    x = torch.randn(32, 64, generator=random).to(place)
                    loss = model(x).square().mean()
                backward.wait_stream(forward)
                with torch.cuda.stream(backward):
                    loss.backward()
                    # Uses the gradients where only Bagua has ordered them.
                    optimizer.step()
                main.wait_stream(backward)
                # Nothing is freed while a stream may still use it.
                torch.cuda.synchronize()
            found.append([each.detach().cpu() for each in model.parameters()])
            model.bagua_ddp.close()
        for here, there in zip(*found, strict=True):
            torch.testing.assert_close(there, here, rtol=1e-4, atol=1e-5)


@on_ranks(2, in_torch)
def test_every_rank_gets_the_optimizer_state_of_the_first(rank: int) -> None:
    """The counters of an optimizer are on the host, or on the device with ``capturable``."""
    for capturable in (False, True):
        torch.manual_seed(1)
        model: Any = nn.Linear(4, 3).cuda()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01, capturable=capturable)
        if rank == 0:  # The states of the other ranks are empty.
            model(torch.ones(2, 4, device="cuda")).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        model.with_bagua([optimizer], algorithms.GradientAllReduceAlgorithm())
        states = list(optimizer.state.values())
        assert [state["step"].is_cuda for state in states] == [capturable] * 2
        mine = [state[name].cpu() for state in states for name in ("step", "exp_avg", "exp_avg_sq")]
        for own, other in zip(mine, api.broadcast_object(mine, 0), strict=True):
            assert torch.equal(own, other)
        model.bagua_ddp.close()
