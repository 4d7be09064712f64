"""Calls that are local return on one rank while the other ranks wait in a barrier."""

from __future__ import annotations

import gc
from collections.abc import Callable

import numpy as np
import pytest
import torch

import bagua as neutral
import bagua.torch_api as bagua
from bagua.torch_api.algorithms import GradientAllReduceAlgorithm
from bagua.torch_api.bucket import BaguaBucket
from bagua.torch_api.communication import get_backend
from tests.distributed.torch_ranks import cases_in, each_case

#: Two ranks on the first host, one and one on the others.
COUNT = 50_000

_names = iter(range(1 << 20))


def bucket(flatten: bool = True, *, count: int = 1000) -> BaguaBucket:
    name = f"local {next(_names)}"
    return BaguaBucket([torch.ones(count).ensure_bagua_tensor(name, name)], name, flatten, alignment=7)


def weights() -> torch.Tensor:
    return torch.zeros(1001)


def trains_alone() -> None:
    model, own = torch.nn.Linear(3, 2), bagua.new_group([bagua.get_rank()])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model = model.with_bagua([optimizer], GradientAllReduceAlgorithm(), process_group=own)
    model(torch.ones(4, 3)).sum().backward()
    optimizer.step()
    del model, optimizer
    gc.collect()


def communicates_alone() -> None:
    alone = bucket()
    backend = get_backend(alone.name, bagua.new_group([bagua.get_rank()]))
    backend.register_ordered_buckets([alone.append_centralized_synchronous_op()])
    backend.mark_communication_ready(alone.tensors[0])
    backend.wait_pending_comm_ops()


def dropped() -> None:
    flat, array = bucket(), bagua.empty(1000)
    flat.extra_memory("more")
    del flat, array
    gc.collect()


def group() -> neutral.Group:
    found: neutral.Group = bagua.communication._get_default_group().get_global_communicator().group
    return found


LOCAL: dict[str, Callable[[], object]] = {
    "empty": lambda: bagua.empty((3, 1000)),
    "empty for a group of others too": lambda: bagua.empty(10, group=bagua.communication._get_default_group()),
    "empty of a communicator": lambda: group().empty((5, 7), "int64"),
    "ensure_bagua_tensor": lambda: torch.ones(3).ensure_bagua_tensor("x", "no model"),
    "to_bagua_tensor": lambda: torch.ones(3).to_bagua_tensor("y"),
    "a flattened bucket": bucket,
    "a large flattened bucket": lambda: bucket(count=1 << 20),
    "a bucket that is not flattened": lambda: bucket(flatten=False),
    "a flattened tensor": lambda: bucket().flattened_tensor(),
    "memory of an operation": lambda: bucket().extra_memory("more"),
    "a centralized operation": lambda: bucket().append_centralized_synchronous_op(hierarchical=True),
    "an encoded operation": lambda: bucket().append_centralized_synchronous_op(
        scattergather=True, compression="onebit", error_feedback=True
    ),
    "an automatic operation": lambda: bucket().append_automatic_op("f16"),
    "a decentralized operation": lambda: bucket().append_decentralized_synchronous_op(weights(), False, "ring"),
    "one between hosts": lambda: bucket().append_decentralized_synchronous_op(weights(), True, "exponential"),
    "a compressed ring": lambda: bucket().append_low_precision_decentralized_synchronous_op(
        weights(), weights(), weights()
    ),
    "an asynchronous average": lambda: bucket().append_asynchronous_model_average_op(),
    "a callback": lambda: bucket().append_python_op(print).clear_ops(),
    "an array's bucket": lambda: (
        neutral.Bucket("b", {"x": np.ones(9, np.float32)})
        .append_centralized(compression="minmax_u8", error_feedback=True)
        .append_callback(print)
        .attach("more", np.ones(9, np.float32))
        .clear_ops()
    ),
    "a group of others": lambda: bagua.new_group([rank for rank in range(4) if rank != bagua.get_rank()]),
    "a group of its own": lambda: bagua.new_group([bagua.get_rank()]).get_intra_node_communicator(),
    "a backend of its own group": communicates_alone,
    "a model of its own group": trains_alone,
    "dropping": dropped,
}


def every_local_call_returns_on_one_rank_alone(rank: int) -> None:
    for at, call in enumerate(LOCAL.values()):
        if rank == at % 4:
            call()
        bagua.barrier()


def zero_copies(name: str) -> int:
    counts = neutral.stats()["groups"][name]["ops"].get("all_reduce", {"zero_copy": 0})
    return int(counts["zero_copy"])


def a_bucket_of_a_sub_group_is_built_on_its_ranks_only(rank: int) -> None:
    group = bagua.new_group([0, 1, 2])
    if rank == 3:
        return
    for named in (None, group):
        tensor = torch.zeros(COUNT).ensure_bagua_tensor("x", f"sub-group {named}")
        flat = BaguaBucket([tensor], f"sub-group {named}", flatten=True, group=named)
        flat.append_centralized_synchronous_op(average=False)
        backend = get_backend(f"sub-group {named}", group)
        backend.register_ordered_buckets([flat])
        before = zero_copies(group.group_name)
        for step in range(3):
            tensor.fill_(rank + step)
            backend.mark_communication_ready(tensor)
            backend.wait_pending_comm_ops()
            assert torch.equal(tensor, torch.full((COUNT,), 3.0 + 3 * step))
        # A reduction and a broadcast inside the first host, in place from the first step on.
        assert zero_copies(group.group_name) - before == (6 if rank < 2 else 0)


def a_rank_whose_bucket_lies_elsewhere_makes_the_others_copy(rank: int) -> None:
    pair = bagua.new_group([0, 1])
    if rank > 1:
        return
    model = "elsewhere"
    tensor = torch.zeros(COUNT).ensure_bagua_tensor("x", model)
    flat = BaguaBucket([tensor], model, flatten=rank == 0).append_centralized_synchronous_op(average=False)
    backend = get_backend(model, pair)
    backend.register_ordered_buckets([flat])
    for step in range(2):
        tensor.fill_(rank + step)
        backend.mark_communication_ready(tensor)
        backend.wait_pending_comm_ops()
        assert torch.equal(tensor, torch.full((COUNT,), 1.0 + 2 * step))
    assert zero_copies(pair.group_name) == 0


def a_peer_weight_of_another_size_is_refused(rank: int) -> None:
    tensor = torch.zeros(10).ensure_bagua_tensor("x", "sizes")
    bucket = BaguaBucket([tensor], "sizes", flatten=True, alignment=4)
    with pytest.raises(ValueError, match="12 elements"):
        bucket.append_decentralized_synchronous_op(torch.zeros(10))
    bucket.append_decentralized_synchronous_op(torch.zeros(12))


def a_backend_belongs_to_one_group(rank: int) -> None:
    own = bagua.communication.new_group([0])
    if rank == 0:
        backend = get_backend("alone", own)
        assert backend.size == 1
        assert get_backend("alone", own) is backend
        with pytest.raises(ValueError, match="alone"):
            get_backend("alone", bagua.communication._get_default_group())


CASES = cases_in(globals())

test = each_case(CASES, "2+1+1")
