"""Compressed gradients in torch's FSDP2, on gloo and on "bagua": every shard of every gradient against a simulation of
the exchange, which starts from the gradients that each rank computes without FSDP.
"""

from __future__ import annotations

import io
import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import bagua
import bagua.fsdp
from bagua.fsdp import CompressedShards, compress
from tests.distributed.c10d_ranks import LIMIT, Pair, cases_in, each_case, run_cases
from tests.distributed.compressed_oracle import CompressedAllReduce, CompressedReduceScatter, Values
from tests.distributed.left_out import needs_torch

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
STEPS = 3
#: The FSDP modules of `net`, and their own parameters.
PARTS = {"0": ["0.weight", "0.bias"], "": ["2.weight", "2.bias"]}


class Grid(NamedTuple):
    """Replicas of the model, each sharded over the same number of ranks: rank = replica * shards + shard."""

    replicas: int
    shards: int
    #: This rank's groups: those who share a replica with it, and those who have the same shard.
    inner: dist.ProcessGroup
    outer: dist.ProcessGroup


def grid(pair: Pair, backend: str) -> Grid:
    """2 x 2 on four ranks; on fewer, a replica on each."""
    replicas = 2 if pair.size == 4 else pair.size
    shards = pair.size // replicas
    ranks = np.arange(pair.size).reshape(replicas, shards)
    made: list[Any] = []
    for lines in (ranks, ranks.T):
        for line in lines.tolist():
            group = dist.new_group(line, backend=backend, timeout=LIMIT)
            made += [group] if pair.rank in line else []
    return Grid(replicas, shards, *made)


def net() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 4))


def data(rank: int, step: int) -> torch.Tensor:
    return torch.randn(6, 5, generator=torch.Generator().manual_seed(1000 * rank + step))


def sharded(group: dist.ProcessGroup, reduce_dtype: torch.dtype | None = None) -> Any:
    model = net()
    policy = torch.distributed.fsdp.MixedPrecisionPolicy(reduce_dtype=reduce_dtype)
    for each in (model[0], model):  # type: ignore[index]
        torch.distributed.fsdp.fully_shard(each, mesh=DeviceMesh.from_group(group, "cpu"), mp_policy=policy)
    return model


def backward(model: nn.Module, rank: int, step: int) -> None:
    model(data(rank, step)).square().mean().backward()


def full(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: each.full_tensor().detach() for name, each in model.named_parameters()}  # type: ignore[operator]


def train(model: nn.Module, rank: int, steps: range) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in steps:
        backward(model, rank, step)
        optimizer.step()
        optimizer.zero_grad()


def flat(gradients: list[torch.Tensor], shards: int) -> torch.Tensor:
    """Returns the input that FSDP gives to its reduce_scatter: for each rank j, its rows of all parameters, padded."""
    rows = []
    for gradient in gradients:
        count = -(-len(gradient) // shards) * shards - len(gradient)
        rows.append(torch.cat([gradient, gradient.new_zeros(count, *gradient.shape[1:])]).reshape(shards, -1))
    return torch.cat(rows, 1).reshape(-1)


class Simulation:
    """The gradients of all ranks, from those of their own data. Without a codec, numbers are averaged as they are."""

    def __init__(
        self,
        inner: tuple[str, dict[str, Any]] | None,
        outer: tuple[str, dict[str, Any]] | None,
        replicas: int,
        shards: int,
        feedback: bool,
        average: bool = True,
    ) -> None:
        self.replicas, self.shards = replicas, shards
        self._inner = inner and {
            key: CompressedReduceScatter(*inner, shards, shards, average, feedback=feedback)
            for key in itertools.product(PARTS, range(replicas))
        }
        self._outer = outer and {
            key: CompressedAllReduce(*outer, replicas, replicas, True, feedback=feedback)
            for key in itertools.product(PARTS, range(shards))
        }

    def step(self, part: str, inputs: list[Values]) -> list[Values]:
        """The shard of each rank, from the flat gradients of each."""
        found: list[Values] = []
        for replica in range(self.replicas):
            mine = inputs[replica * self.shards :][: self.shards]
            if self._inner and self.shards > 1:
                found += self._inner[part, replica].parts(mine)
            else:
                found += np.split(np.sum(mine, 0) / np.float32(self.shards), self.shards)
        if self._outer:
            for shard in range(self.shards):
                mean = self._outer[part, shard].step(found[shard :: self.shards])
                found[shard :: self.shards] = [mean] * self.replicas
        return found


def check(
    model: Any, pair: Pair, simulation: Simulation, dtype: torch.dtype = torch.float32, before: int = 1, after: int = 1
) -> None:
    """Every gradient is the simulation's, bit for bit, if FSDP divides by these numbers before and after it."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        plain = net()
        plain.load_state_dict(full(model))
        backward(plain, pair.rank, step)
        backward(model, pair.rank, step)
        own = {name: each.grad for name, each in plain.named_parameters()}
        sent: Any = {
            part: (flat([own[name] for name in names], simulation.shards).to(dtype) / before).numpy()
            for part, names in PARTS.items()
        }
        everyone: list[Any] = [None] * pair.size
        dist.all_gather_object(everyone, sent, group=pair.gloo)
        found = {name: each.grad.to_local() for name, each in model.named_parameters()}
        for part, names in PARTS.items():
            shards = simulation.step(part, [theirs[part] for theirs in everyone])
            expected = (torch.from_numpy(shards[pair.rank].copy()) / after).float()
            begin = 0
            for name in names:
                length = -(-len(own[name]) // simulation.shards) * own[name][0].numel()
                mine = expected[begin:][: found[name].numel()].reshape(found[name].shape)
                assert torch.equal(found[name], mine), (step, name, found[name], mine)
                begin += length
        optimizer.step()
        optimizer.zero_grad()


def gradients_are_the_simulations(pair: Pair) -> None:
    for group, (name, options), feedback in itertools.product((pair.gloo, pair.ours), CODECS, (False, True)):
        model = sharded(group)
        compress(model, bagua.Codec(name, **options), error_feedback=feedback)
        check(model, pair, Simulation((name, options), None, 1, pair.size, feedback))


def sums_are_divided_by_fsdp(pair: Pair) -> None:
    codec = ("minmax_u8", {})
    model = sharded(pair.gloo)
    compress(model)
    model.set_force_sum_reduction_for_comms(True)
    model[0].set_force_sum_reduction_for_comms(True)
    check(model, pair, Simulation(codec, None, 1, pair.size, False, average=False), after=pair.size)
    if pair.size == 2:
        # FSDP divides float16 by about the square root of the number of ranks before it adds.
        model = sharded(pair.gloo, torch.float16)
        compress(model, error_feedback=True)
        check(model, pair, Simulation(codec, None, 1, pair.size, True, average=False), torch.float16, before=2)


def replicas_are_averaged(pair: Pair) -> None:
    for backend in ("gloo", "bagua"):
        ranks = grid(pair, backend)
        for inner, outer in ((None, CODECS[0]), (None, CODECS[4]), (CODECS[6], CODECS[3])):
            model = sharded(ranks.inner)
            feedback = outer is not CODECS[0]
            compress(
                model,
                None if inner is None else bagua.Codec(inner[0], **inner[1]),
                error_feedback=feedback,
                replicas=ranks.outer,
                replica_codec=bagua.Codec(outer[0], **outer[1]),
            )
            check(model, pair, Simulation(inner, outer, ranks.replicas, ranks.shards, feedback))


def replicas_begin_with_the_first_ones_parameters(pair: Pair) -> None:
    replicas = 2 if pair.size == 4 else pair.size
    mesh = init_device_mesh("cpu", (replicas, pair.size // replicas), mesh_dim_names=("replicate", "shard"))
    model = sharded(mesh["shard"].get_group())
    expected = full(model)
    with torch.no_grad():
        for each in model.parameters():
            each.to_local().add_(mesh.get_local_rank("replicate"))
    compress(model, None, replicas=mesh["replicate"])
    for name, each in full(model).items():
        assert torch.equal(each, expected[name])
    train(model, pair.rank, range(2))
    everyone: list[Any] = [None] * pair.size
    dist.all_gather_object(everyone, full(model), group=pair.gloo)
    assert all(torch.equal(each[name], everyone[0][name]) for each in everyone for name in expected)


def records_are_all_that_is_sent(pair: Pair) -> None:
    sent: list[int] = []
    real = dist.ProcessGroup.send

    def counting(group: dist.ProcessGroup, tensors: list[torch.Tensor], *place: int) -> Any:
        sent.extend(tensor.nbytes for tensor in tensors)
        return real(group, tensors, *place)

    def refused(*_: Any, **__: Any) -> None:
        raise AssertionError("FSDP's own reduce_scatter was called")

    model = nn.Linear(96, 96, bias=False)
    torch.distributed.fsdp.fully_shard(model, mesh=DeviceMesh.from_group(pair.gloo, "cpu"))
    compress(model)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist.ProcessGroup, "send", counting)
        for name in ("reduce_scatter_tensor", "reduce_scatter_single"):
            patch.setattr(dist, name, refused, raising=False)
        model(torch.randn(2, 96)).sum().backward()
    record = bagua.Codec("minmax_u8").encoded_bytes(96 * 96 // pair.size)
    assert sent == [record] * (pair.size - 1)
    assert record < 0.26 * 4 * 96 * 96 / pair.size


def a_state_goes_on_where_it_was_saved(pair: Pair) -> None:
    for name, options in (("onebit", {}), ("random_k", {"k": 0.3, "seed": 5})):

        def begun(name: str, options: dict[str, Any]) -> tuple[Any, CompressedShards]:
            model = sharded(pair.gloo)
            return model, compress(model, bagua.Codec(name, **options), error_feedback=True)

        model, state = begun(name, options)
        train(model, pair.rank, range(3))
        file = io.BytesIO()
        torch.save([state.state_dict(), [each.to_local() for each in model.parameters()]], file)
        train(model, pair.rank, range(3, 5))
        file.seek(0)
        saved, weights = torch.load(file, weights_only=True)
        for steps in (0, 2):
            other, again = begun(name, options)
            train(other, pair.rank, range(steps))
            again.load_state_dict(saved)
            with torch.no_grad():
                for each, kept in zip(other.parameters(), weights, strict=True):
                    each.to_local().copy_(kept)
            train(other, pair.rank, range(3, 5))
            assert all(torch.equal(full(other)[name], each) for name, each in full(model).items())
            assert again.state_dict()["calls"] == state.state_dict()["calls"]


def a_state_that_does_not_fit_is_refused(pair: Pair) -> None:
    model = sharded(pair.gloo)
    state = compress(model, error_feedback=True)
    train(model, pair.rank, range(1))
    saved = state.state_dict()
    with pytest.raises(ValueError, match="pass error_feedback=True"):
        compress(sharded(pair.gloo)).load_state_dict(saved)
    with pytest.raises(ValueError, match="the state has the numbers of shards"):
        state.load_state_dict({**saved, "shards": dict.fromkeys(saved["shards"], 7)})
    state.load_state_dict({**saved, "errors": {name: torch.zeros(3) for name in saved["errors"]}})
    with pytest.raises(ValueError, match="error memory of 3 elements"):
        backward(model, pair.rank, 0)


def consolidated_ranks_owe_the_same_in_total(pair: Pair) -> None:
    ranks = grid(pair, "gloo")
    model = sharded(ranks.inner)
    state = compress(model, "onebit", error_feedback=True, replicas=ranks.outer, replica_codec="onebit")
    state.consolidate()
    assert state.state_dict()["errors"] == {}
    train(model, pair.rank, range(2))

    def everyones() -> list[Any]:
        found: list[Any] = [None] * pair.size
        dist.all_gather_object(found, state.state_dict()["errors"], group=pair.gloo)
        return found

    before = everyones()
    state.consolidate()
    after = everyones()
    assert len(before[0]) == (4 if ranks.shards > 1 else 2)
    for name, error in after[pair.rank].items():
        peers = before if name.endswith(":reduce_scatter") else before[pair.rank % ranks.shards :: ranks.shards]
        assert any(each[name].count_nonzero() for each in peers)
        torch.testing.assert_close(error, torch.stack([each[name] for each in peers]).double().mean(0).float())


def what_is_not_finite_is_not_remembered(pair: Pair) -> None:
    model = sharded(pair.gloo)
    state = compress(model, error_feedback=True)
    train(model, pair.rank, range(2))
    before = state.state_dict()["errors"]
    (model(data(pair.rank, 2)).square().mean() * (torch.inf if pair.rank == 0 else 1)).backward()
    for name, error in state.state_dict()["errors"].items():
        assert error.isfinite().all()
        assert pair.rank != 0 or torch.equal(error, before[name])


def mistakes_raise_errors(pair: Pair) -> None:
    fully_shard = torch.distributed.fsdp.fully_shard
    with pytest.raises(ValueError, match="call fully_shard on it"):
        compress(net())
    mesh = init_device_mesh("cpu", (1, pair.size), mesh_dim_names=("slow", "fast"))
    two: Any = fully_shard(net(), mesh=mesh)
    with pytest.raises(ValueError, match=r'fully_shard\(module, mesh=mesh\["fast"\]\)\n.*replicas=mesh\["slow"\]\)'):
        compress(two)
    model = sharded(pair.gloo)
    with pytest.raises(ValueError, match="leaves nothing to compress"):
        compress(model, None)
    with pytest.raises(ValueError, match="with one dimension, not 2"):
        compress(model, replicas=mesh)
    if pair.size > 1:
        with pytest.raises(ValueError, match="must be the only one in both"):
            compress(model, replicas=pair.gloo)
    doubles = net().double()
    fully_shard(doubles, mesh=DeviceMesh.from_group(pair.gloo, "cpu"))
    with pytest.raises(ValueError, match="cannot encode float64"):
        compress(doubles)
    compress(model)
    model.set_gradient_divide_factor(3.5)
    with pytest.raises(NotImplementedError, match="set_force_sum_reduction_for_comms"):
        backward(model, pair.rank, 0)


@needs_torch((2, 15), "its replicate takes other arguments")
def replicated_modules_are_refused(pair: Pair) -> None:
    from torch.distributed._composable.replicate_with_fsdp import replicate

    model: Any = net()
    replicate(model, mesh=init_device_mesh("cpu", (pair.size,), mesh_dim_names=("replicate",)))
    with pytest.raises(ValueError, match="whose second size is 1"):
        compress(model)


@needs_torch((2, 15), "it has one parameter group for each module")
def several_parameter_groups_are_refused(pair: Pair) -> None:
    from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, ShardPlacementResult
    from torch.distributed.tensor import Shard

    meshes = [FSDPMeshInfo(DeviceMesh.from_group(group, "cpu"), shard_mesh_dim=0) for group in (pair.gloo, pair.ours)]

    def placement(parameter: nn.Parameter) -> ShardPlacementResult:
        return ShardPlacementResult(Shard(0), meshes[parameter.ndim - 1])

    model: Any = net()
    torch.distributed.fsdp.fully_shard(model, mesh=meshes[0].mesh, shard_placement_fn=placement)
    with pytest.raises(ValueError, match="has 2 parameter groups"):
        compress(model)


@pytest.mark.slow
def training_ends_where_it_does_without_a_codec(pair: Pair) -> None:
    def losses(model: Any) -> Iterator[float]:
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        for step in range(50):
            x = data(pair.rank, step)
            loss = (model(x) - x[:, :4].sin()).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            dist.all_reduce(loss.detach(), group=pair.gloo)
            yield float(loss)

    ranks = grid(pair, "gloo")
    plain = sharded(pair.gloo)
    expected = list(losses(plain))[-1]
    model = sharded(pair.gloo)
    compress(model)
    across = sharded(ranks.inner)
    compress(across, None, replicas=ranks.outer)
    for each in (model, across):
        found = list(losses(each))
        assert found[-1] < 0.7 * found[0]
        assert abs(found[-1] - expected) < 0.01 * expected


OLD = "its FSDP2 does not accept another reduce_scatter"
CASES = [needs_torch((2, 9), OLD)(case) for case in cases_in(globals())]


def in_the_world(rank: int) -> dict[str, str]:
    return run_cases(rank, CASES)


test = each_case(CASES, 2, 3, 4, run=in_the_world)


def test_a_torch_without_the_functions_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.distributed.fsdp.FSDPModule, "set_custom_reduce_scatter")
    with pytest.raises(NotImplementedError, match=r"needs torch 2\.9 or newer"):
        compress(net())
