"""Code as users write it, type-checked but never run."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from typing_extensions import assert_type

import bagua
import bagua.torch_api
from bagua.torch_api.algorithms import AsyncModelAverageAlgorithmImpl
from bagua.torch_api.algorithms.gradient_allreduce import GradientAllReduceAlgorithm
from bagua.torch_api.data_parallel import DistributedDataParallel, functional
from bagua.torch_api.process_group import ProcessGroup

Floats = np.ndarray[tuple[int], np.dtype[np.float32]]
Matrix = np.ndarray[tuple[int, int], np.dtype[np.float32]]


def neutral() -> None:
    group = bagua.init(rank=0, world_size=1, init_method="tcp://127.0.0.1:29500", timeout=30.0)
    assert_type(group, bagua.Group)
    assert_type(group.rank, int)
    assert_type(group.size, int)
    x = np.zeros(4, dtype=np.float32)
    assert_type(bagua.all_reduce(x, op="max"), Floats)
    handle = group.all_reduce(x, async_op=True)
    assert_type(handle.wait(timeout=1.0), Floats)
    assert_type(bagua.all_gather(x), np.ndarray[Any, Any])
    assert_type(bagua.all_gather(x, out=np.zeros((1, 4), np.float32), async_op=True), bagua.Handle[Matrix])
    assert_type(bagua.gather(x), np.ndarray[Any, Any] | None)
    assert_type(bagua.reduce(torch.zeros(3)), torch.Tensor | None)
    assert_type(bagua.recv(bytearray(4), 0), bytearray)
    assert_type(bagua.all_gather_object({"rank": 0}, timeout=1.0), list[dict[str, int]])
    assert_type(group.gather_object("text", 0), list[str] | None)
    assert_type(bagua.broadcast_object("text" if group.rank == 0 else None), Any)
    assert_type(bagua.scatter_object([1], src=0), Any)
    assert_type(handle.is_completed(), bool)
    try:
        bagua.barrier()
    except bagua.PeerLostError as error:
        assert_type(error.rank, int)
        assert_type(error.host, str)
        assert_type(error.record, str | None)
    except bagua.BaguaTimeoutError as error:
        assert_type(error.missing, tuple[int, ...])
    bagua.shutdown()
    with bagua.init() as block:
        assert_type(block, bagua.Group)


def torch_layer() -> None:
    bagua.torch_api.init_process_group()
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    wrapped = bagua.torch_api.with_bagua(model, [optimizer], GradientAllReduceAlgorithm(average=True))
    assert_type(wrapped, torch.nn.Linear)
    assert_type(wrapped(torch.zeros(1, 4)), Any)
    assert_type(bagua.torch_api.unwrap(wrapped), torch.nn.Linear)
    bagua.torch_api.with_bagua(model, [optimizer], "bytegrad")
    assert_type(bagua.torch_api.algorithm_of(wrapped).state_dict(), dict[str, Any])
    asynchronous = bagua.torch_api.algorithm_of(wrapped, AsyncModelAverageAlgorithmImpl)
    assert_type(asynchronous, AsyncModelAverageAlgorithmImpl)
    asynchronous.synchronize(wrapped)
    asynchronous.abort(wrapped, timeout=1.0)
    with bagua.torch_api.no_sync(wrapped):
        wrapped(torch.zeros(1, 4)).sum().backward()
    bagua.torch_api.allreduce_inplace(torch.zeros(3), op=bagua.torch_api.ReduceOp.SUM)
    assert_type(bagua.torch_api.get_rank(), int)

    with bagua.torch_api.init_process_group() as group:
        assert_type(group, ProcessGroup)


def wrapper() -> None:
    net = torch.nn.Linear(4, 2)
    model = DistributedDataParallel(net, optimizers=[torch.optim.SGD(net.parameters(), lr=0.1)], bucket_cap_mb=1)
    with model.no_sync(), model.join(divide_by_initial_world_size=False):
        model(torch.zeros(1, 4)).sum().backward()
    assert_type(model.module, torch.nn.Module)
    assert_type(model.require_backward_grad_sync, bool)
    assert_type(functional.all_reduce(torch.zeros(3), bagua.torch_api.ReduceOp.AVG), torch.Tensor)
