"""local_sgd and diloco against a simulation of all ranks in one process, and what happens around a round."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import bagua as neutral
import bagua.torch_api as bagua
from bagua.torch_api.algorithms import Algorithm, DiLoCoAlgorithm, LocalSGDAlgorithm
from tests.distributed.compressed_oracle import CompressedAllReduce
from tests.distributed.local_sgd_simulation import (
    SMALL,
    Simulation,
    close,
    data,
    equal,
    local_step,
    net,
    rounds,
    sgd,
)
from tests.distributed.torch_ranks import HOSTED, cases_in, each_case, hosts, same_everywhere

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
    for algorithm, outer in variants():
        for do_flatten in (True, False):
            model = net()
            optimizer = sgd(model)
            model.with_bagua([optimizer], algorithm, do_flatten=do_flatten, bucket_size=SMALL)
            assert len(model.bagua_buckets) > 1
            simulated = Simulation(model)
            for step in range(8):
                local_step(model, optimizer, data(rank, step))
                simulated.train(step)
                if step % 3 == 2:
                    simulated.round(*outer)
                    assert same_everywhere(*model.parameters())
                assert equal(model, simulated.models[rank]), f"{algorithm.describe()} step {step}"
            assert rounds(model) == 2


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
        simulated = Simulation(model)
        members = hosts() if hierarchical else [[each] for each in range(size)]
        if len(members) == 1:
            continue
        names = [[tensor.bagua_tensor_name for tensor in bucket.tensors] for bucket in model.bagua_buckets]
        oracles = [CompressedAllReduce(codec, options, len(members), size, True, feedback=feedback) for _ in names]
        for step in range(6):
            local_step(model, optimizer, data(rank, step))
            simulated.train(step)
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


def buffers_become_those_of_rank_0_after_a_round_only(rank: int) -> None:
    for broadcast_buffers in (True, False):
        model = torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 3))
        optimizer = sgd(model)
        model.with_bagua([optimizer], LocalSGDAlgorithm(2), broadcast_buffers=broadcast_buffers)
        for step in range(6):
            local_step(model, optimizer, data(rank, step))
            assert same_everywhere(model[1].running_mean) == (step % 2 == 1 and broadcast_buffers)


def unused_and_sparse_parameters_travel(rank: int) -> None:
    class Parts(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = torch.nn.Embedding(7, 3, sparse=True)
            self.one = torch.nn.Linear(3, 2)
            self.never = torch.nn.Linear(3, 2)

        def forward(self, x: torch.Tensor, use: bool) -> torch.Tensor:
            return self.one(self.words(x)) if use else torch.zeros(2, requires_grad=True)

    def plain(model: torch.nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.1)

    model = Parts()
    optimizer = plain(model)
    model.with_bagua([optimizer], LocalSGDAlgorithm(2))
    simulated = Simulation(model, plain)
    for step in range(4):
        for who, each, mine in [
            *zip(range(bagua.get_world_size()), simulated.models, simulated.optimizers, strict=True),
            (rank, model, optimizer),
        ]:
            mine.zero_grad()
            # The loss of rank 0 depends on no parameter in steps 1 and 2.
            each(torch.tensor([who, step]), who != 0 or step in (0, 3)).square().sum().backward()
            with torch.no_grad():
                each.never.bias.add_(float(who))
            mine.step()
        assert model.bagua_ddp.step == step
        if step % 2:
            assert same_everywhere(*model.parameters())
            simulated.average()
            close(model, simulated.models[rank])
    assert rounds(model) == 2


CASES = cases_in(globals())

test = each_case(CASES, *HOSTED)


def test_options_out_of_range_are_refused() -> None:
    for make in (LocalSGDAlgorithm, DiLoCoAlgorithm):
        for interval in (0, -1):
            with pytest.raises(ValueError, match=f"communication_interval must be at least 1, not {interval}"):
                make(interval)
        with pytest.raises(TypeError):
            make(2.5)
        with pytest.raises(ValueError, match="error_feedback=True needs a compression"):
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
