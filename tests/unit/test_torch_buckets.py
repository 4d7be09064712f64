"""Tensors, buckets and algorithms as far as they need no other rank."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import bagua
from bagua import torch_api
from bagua.torch_api import algorithms
from bagua.torch_api.bucket import BaguaBucket
from bagua.torch_api.model_engine.bucketing import split


def named(*tensors: Any, module: str = "net") -> list[torch.Tensor]:
    return [tensor.ensure_bagua_tensor(f"t{i}", module) for i, tensor in enumerate(tensors)]


def sizes(buckets: list[list[torch.Tensor]]) -> list[list[int]]:
    return [[tensor.numel() for tensor in bucket] for bucket in buckets]


def test_buckets_are_filled_up_to_their_limit_in_order() -> None:
    tensors = [torch.zeros(n) for n in (4, 4, 3, 100, 1, 8, 0)]
    assert sizes(split(tensors, 32)) == [[4, 4], [3], [100], [1], [8, 0]]
    assert sizes(split(tensors, 1)) == [[4], [4], [3], [100], [1], [8], [0]]
    assert sizes(split(tensors, 10**9)) == [[4, 4, 3, 100, 1, 8, 0]]
    assert split([], 1) == []
    with pytest.raises(ValueError, match="bucket size of 0 bytes"):
        split(tensors, 0)


def test_buckets_are_of_one_type_and_go_when_their_last_tensor_is_there() -> None:
    single, double = torch.float32, torch.float64
    tensors = [torch.zeros(i + 1, dtype=dtype) for i, dtype in enumerate((single, double, single, double))]
    assert sizes(split(tensors, 10**9)) == [[1, 3], [2, 4]]
    # The doubles are complete before the last single.
    assert sizes(split([*tensors, torch.zeros(5)], 10**9)) == [[2, 4], [1, 3, 5]]


def test_flattening_moves_tensors_together_and_keeps_values_and_strides() -> None:
    tensors = named(torch.arange(6.0).view(2, 3), torch.arange(6.0).view(2, 3).t(), torch.tensor(7.0), torch.empty(0))
    before = [tensor.clone() for tensor in tensors]
    bucket = BaguaBucket(tensors, "b", flatten=True, alignment=8)
    assert bucket.check_flatten()
    for tensor, old in zip(tensors, before, strict=True):
        assert torch.equal(tensor, old)
    assert tensors[1].stride() == (1, 3)
    assert bucket.padding_tensor is not None
    assert bucket.padding_tensor.bagua_tensor_name == "bagua_padding_tensor_bucket_b"
    assert bucket.padding_tensor.numel() == 3
    assert bucket.bytes() == 16 * 4
    flat = bucket.flattened_tensor()
    assert flat.tolist()[:6] == before[0].flatten().tolist()
    assert flat.data_ptr() != tensors[0].data_ptr()
    tensors[0].fill_(9.0)
    assert bucket.backend_tensor is not None
    assert bucket.backend_tensor[:6].tolist() == [9.0] * 6


def test_a_parameter_is_moved_without_becoming_another_one() -> None:
    layer = torch.nn.Linear(3, 2)
    before = [parameter.detach().clone() for parameter in layer.parameters()]
    bucket = BaguaBucket(named(*layer.parameters()), "w", flatten=True)
    assert bucket.check_flatten()
    for parameter, old in zip(layer.parameters(), before, strict=True):
        assert torch.equal(parameter, old)
    layer(torch.ones(1, 3)).sum().backward()
    assert layer.weight.grad is not None


def test_an_unflattened_bucket_leaves_memory_where_it_is() -> None:
    tensors = named(torch.zeros(4), torch.zeros(4))
    pointers = [tensor.data_ptr() for tensor in tensors]
    bucket = BaguaBucket(tensors, "b", flatten=False)
    assert [tensor.data_ptr() for tensor in tensors] == pointers
    assert not bucket.check_flatten()
    with pytest.raises(ValueError, match="'t0' of bucket 'g' has gaps"):
        BaguaBucket(named(torch.zeros(8)[::2]), "g", flatten=False)


def test_bad_buckets_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="bucket 'b' has no tensors"):
        BaguaBucket([], "b", flatten=True)
    with pytest.raises(ValueError, match=r"mixes 't0' \(torch.float32 on cpu\) with 't1' \(torch.float64 on cpu\)"):
        BaguaBucket(named(torch.zeros(1), torch.zeros(1, dtype=torch.float64)), "b", flatten=True)
    with pytest.raises(ValueError, match=r"\['t0'\] appear"):
        BaguaBucket([*named(torch.zeros(1)), *named(torch.zeros(1))], "b", flatten=True)
    other = torch.zeros(1).ensure_bagua_tensor("t1", "other")
    with pytest.raises(ValueError, match="models 'net' and 'other'"):
        BaguaBucket([*named(torch.zeros(1)), other], "b", flatten=True)
    with pytest.raises(ValueError, match="is not a Bagua tensor"):
        BaguaBucket([torch.zeros(1)], "b", flatten=True)
    with pytest.raises(ValueError, match="alignment 0"):
        BaguaBucket(named(torch.zeros(1)), "b", flatten=True, alignment=0)


def test_operations_are_appended_and_cleared_and_bad_ones_are_refused() -> None:
    bucket = BaguaBucket(named(torch.zeros(4)), "b", flatten=True)
    bucket.append_centralized_synchronous_op(hierarchical=True, average=False)
    bucket.append_python_op(print)
    assert len(bucket.backend_bucket.ops()) == 2
    assert bucket.clear_ops() is bucket
    assert bucket.backend_bucket.ops() == []
    weight = torch.zeros(4)
    bucket.append_centralized_synchronous_op(scattergather=True, compression="MinMaxUInt8", error_feedback=True)
    assert (bucket.error.dtype, bucket.error.tolist()) == (torch.float32, [0.0] * 4)
    bucket.append_decentralized_synchronous_op(torch.zeros(4))
    bucket.append_low_precision_decentralized_synchronous_op(weight, weight.clone(), weight.clone())
    assert len(bucket.backend_bucket.ops()) == 3
    bucket.clear_ops()
    assert bucket.error is None
    with pytest.raises(ValueError, match="compression needs scattergather=True"):
        bucket.append_centralized_synchronous_op(compression="MinMaxUInt8")
    with pytest.raises(ValueError, match="error_feedback without compression"):
        bucket.append_centralized_synchronous_op(error_feedback=True)
    with pytest.raises(ValueError, match="has 4 elements"):
        bucket.append_decentralized_synchronous_op(torch.zeros(3))
    with pytest.raises(ValueError, match="needs a compression"):
        bucket.append_low_precision_decentralized_synchronous_op(weight, weight, weight, compression=None)
    assert bucket.backend_bucket.ops() == []
    with pytest.raises(ValueError, match="must be 'all', not 'ring'"):
        bucket.append_asynchronous_model_average_op("ring")
    assert bucket.backend_bucket.ops() == []
    assert bucket.append_asynchronous_model_average_op("all") is bucket._async_op
    assert bucket.backend_bucket.ops() == ["async_model_average"]


def test_a_bagua_tensor_knows_its_name_and_its_effective_tensor() -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    assert not parameter.is_bagua_tensor()
    parameter.bagua_ensure_grad()
    same = parameter.ensure_bagua_tensor("w", "net", lambda p: p.grad, lambda p, g: setattr(p, "grad", g))
    assert same is parameter
    assert (parameter.bagua_tensor_name, parameter.bagua_module_name) == ("w", "net")
    assert parameter.bagua_getter_closure() is parameter.grad
    parameter.bagua_setter_closure(torch.full((2,), 3.0))
    assert parameter.grad.tolist() == [3.0, 3.0]
    backend = parameter.bagua_backend_tensor()
    assert (backend.data_ptr(), backend.num_elements()) == (parameter.grad.data_ptr(), 2)
    with pytest.raises(ValueError, match="already registered as 'w' and cannot become 'v'"):
        parameter.ensure_bagua_tensor("v")
    with pytest.raises(ValueError, match="belongs to model 'net', not to 'other'"):
        parameter.ensure_bagua_tensor("w", "other")
    view = parameter.to_bagua_tensor("view")
    assert view is not parameter
    assert view.data_ptr() == parameter.data_ptr()
    with pytest.raises(ValueError, match="'view' was registered without a setter"):
        view.bagua_setter_closure(view)
    with pytest.raises(ValueError, match="'view' belongs to no model"):
        view.bagua_mark_communication_ready()
    with pytest.raises(NotImplementedError, match="needs a Parameter"):
        torch.zeros(1).bagua_ensure_grad()


def test_algorithms_are_found_by_name() -> None:
    registry = algorithms.GlobalAlgorithmRegistry
    assert "gradient_allreduce" in registry.available_algorithms()
    assert "gradient_allreduce" in str(registry)
    made = algorithms.Algorithm.init("gradient_allreduce", hierarchical=True)
    assert isinstance(made, algorithms.GradientAllReduceAlgorithm)
    assert (made.hierarchical, made.average) == (True, True)
    with pytest.raises(ValueError, match=r"^no algorithm 'nothing'; known: .*gradient_allreduce"):
        registry.get("nothing")
    for misspelt in ("bytegrd", "ByteGrad", "byte_grad"):
        with pytest.raises(ValueError, match="; did you mean 'bytegrad'"):
            algorithms.Algorithm.init(misspelt)
    with pytest.raises(ValueError, match="already registered"):
        registry.register("gradient_allreduce", algorithms.GradientAllReduceAlgorithm)


def test_algorithms_and_buckets_show_their_options() -> None:
    made = algorithms.Algorithm.init("bytegrad", hierarchical=False)
    shown = "ByteGradAlgorithm(hierarchical=False, average=True, compression='MinMaxUInt8', error_feedback=False)"
    assert repr(made) == shown
    optimizer = algorithms.QAdamOptimizer([torch.nn.Parameter(torch.zeros(1))])
    assert repr(algorithms.QAdamAlgorithm(optimizer)).startswith("QAdamAlgorithm(q_adam_optimizer=QAdamOptimizer, ")
    bucket = BaguaBucket(named(torch.zeros(2, 3), torch.zeros(1)), "b", flatten=True, alignment=4)
    bucket.append_centralized_synchronous_op()
    assert repr(bucket) == (
        "<BaguaBucket 'b' of model 'net': tensors=2, elements=8, dtype=torch.float32, device='cpu', flatten=True, "
        "alignment=4, ops=['centralized']>"
    )
    arrays = bagua.Bucket("grads", {"w": np.zeros(4, np.float32)}).append_centralized()
    assert repr(arrays) == "<bagua.Bucket 'grads': tensors=['w'], bytes=16, ops=['centralized']>"


def test_an_algorithm_of_a_model_that_is_not_wrapped_is_an_error() -> None:
    with pytest.raises(ValueError, match="this Linear is not wrapped: call with_bagua first"):
        torch_api.algorithm_of(torch.nn.Linear(1, 1))
