"""bytegrad: gradients against the NumPy oracle, bytes between hosts, the choice of "auto"."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch

import bagua as neutral
import bagua.torch_api as bagua
from bagua.torch_api.algorithms import ByteGradAlgorithm, LocalSGDAlgorithm
from bagua.torch_api.bucket import BaguaBucket
from tests.distributed.compressed_oracle import CompressedAllReduce, Values
from tests.distributed.torch_ranks import HOSTED, cases_in, each_case, hosts, same_everywhere

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


def net() -> torch.nn.Module:
    """Buckets of 96 bytes have several tensors, or one that is larger, and elements that no number of ranks divides."""
    return torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 4), torch.nn.Linear(4, 3))


def sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def data(rank: int, step: int) -> torch.Tensor:
    return torch.randn(6, 5, generator=torch.Generator().manual_seed(1000 * rank + step))


def of_bucket(bucket: BaguaBucket, model: torch.nn.Module) -> Values:
    """The gradients of a bucket's parameters, one after the other."""
    grads = [model.get_parameter(tensor.bagua_tensor_name).grad for tensor in bucket.tensors]
    return np.concatenate([grad.numpy().ravel() for grad in grads])


def gradients_equal_the_oracle(rank: int) -> None:
    size = bagua.get_world_size()
    for codec, options in CODECS:
        for hierarchical, average, feedback in ((False, True, True), (True, True, True), (False, False, False)):
            members = hosts() if hierarchical else [[each] for each in range(size)]
            algorithm = ByteGradAlgorithm(
                hierarchical, average, compression=neutral.Codec(codec, **options), error_feedback=feedback
            )
            model = net()
            optimizer = sgd(model)
            model.with_bagua([optimizer], algorithm, bucket_size=96)
            buckets = model.bagua_buckets
            assert len(buckets) > 2
            assert size == 1 or any(bucket.padding_tensor is not None for bucket in buckets)
            oracles = [
                CompressedAllReduce(codec, options, len(members), size, average, feedback=feedback) for _ in buckets
            ]
            for step in range(4):
                alone = [copy.deepcopy(model) for _ in range(size)]
                for other, each in enumerate(alone):
                    each.zero_grad()
                    each(data(other, step)).square().mean().backward()
                optimizer.zero_grad()
                model(data(rank, step)).square().mean().backward()
                for bucket, oracle in zip(buckets, oracles, strict=True):
                    given = [of_bucket(bucket, each) for each in alone]
                    sums = [np.sum([given[each] for each in member], axis=0, dtype=np.float32) for member in members]
                    padding = -len(sums[0]) % size
                    expected = oracle.step(sums, padding)
                    if len(members) == 1:
                        # Nothing passes between hosts: full precision.
                        expected = sums[0] / np.float32(size if average else 1)
                    what = f"{algorithm.describe()} bucket {bucket.name} step {step}"
                    np.testing.assert_array_equal(of_bucket(bucket, model), expected, what)
                    if feedback:
                        leads = [member[0] for member in members]
                        mine = np.zeros(len(sums[0]), np.float32)
                        if rank in leads and len(members) > 1:
                            assert oracle.errors is not None
                            mine = oracle.errors[leads.index(rank)]
                        assert bucket.error is not None
                        np.testing.assert_array_equal(bucket.error.numpy(), mine, what)
                optimizer.step()


def auto_ends_with_the_same_choices_on_all_ranks(rank: int) -> None:
    model = net()
    optimizer = sgd(model)
    model.with_bagua([optimizer], ByteGradAlgorithm(False, compression="auto"), bucket_size=96)
    for step in range(12):
        optimizer.zero_grad()
        model(data(rank, step)).square().mean().backward()
        assert same_everywhere(*(param.grad for param in model.parameters()))
        optimizer.step()
    choices = model.bagua_algorithm.choices
    assert list(choices) == [bucket.name for bucket in model.bagua_buckets]
    assert all(choice is None or choice.startswith("minmax_u8") for choice in choices.values()), choices
    assert bagua.broadcast_object(choices) == choices


def a_parameter_that_the_codec_cannot_encode_is_named(rank: int) -> None:
    for algorithm in (
        ByteGradAlgorithm(),
        ByteGradAlgorithm(compression="auto"),
        LocalSGDAlgorithm(compression="minmax_u8"),
    ):
        model = net()
        model[2].double()
        with pytest.raises(TypeError, match=r"tensor '2\.bias' and 1 more: codec minmax_u8 cannot encode float64"):
            model.with_bagua([sgd(model)], algorithm)


CASES = cases_in(globals())


test = each_case(CASES, *HOSTED)
