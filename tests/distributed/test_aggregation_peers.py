"""The seam to the other ranks: one contract, which every implementation passes."""

from __future__ import annotations

import itertools

import pytest
import torch

import bagua.torch_api as bagua
from bagua.aggregation import AllReduceAggregation
from bagua.aggregation.backends import Alone, BaguaPeers, Peers, TorchPeers, find
from bagua.errors import BaguaError
from tests.distributed.aggregation_ranks import Several, each_case, gradients, numbers
from tests.distributed.torch_ranks import cases_in, same_everywhere
from tests.world import make_world


def implementations() -> list[Peers]:
    """All that reach every rank of this world."""
    found: list[Peers] = [find(), find("torch"), find(torch.distributed.group.WORLD)]
    found += [find(bagua.communication._get_default_group()), find(bagua.new_group())]
    found += [Alone()] if bagua.get_world_size() == 1 else []
    return found


def rank_and_size_are_those_of_the_world(rank: int) -> None:
    for peers in implementations():
        assert (peers.rank, peers.size) == (rank, bagua.get_world_size())


def all_reduce_combines_every_dtype_in_place(rank: int) -> None:
    size = bagua.get_world_size()
    kinds = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int8, torch.int32)
    for peers, kind, op in itertools.product(implementations(), kinds, ("sum", "mean", "min", "max")):
        if op == "mean" and not kind.is_floating_point:
            continue
        for shape in ((7,), (0,), (3, 2)):
            everybody = torch.stack([(3 * numbers(r, shape)).to(kind).double() for r in range(size)])
            data = everybody[rank].to(kind, copy=True)
            address = data.data_ptr()
            peers.all_reduce(data, op)  # type: ignore[arg-type]
            assert data.data_ptr() == address
            expected = {
                "sum": everybody.sum(0),
                "mean": everybody.mean(0),
                "min": everybody.amin(0) if shape != (0,) else everybody[0],
                "max": everybody.amax(0) if shape != (0,) else everybody[0],
            }[op]
            eps = torch.finfo(kind).eps if kind.is_floating_point else 0.0
            # Half precision is rounded once, whatever the number of ranks.
            times = 1 if kind in (torch.float16, torch.bfloat16) else size
            near = (data.double() - expected).abs() <= times * eps * everybody.abs().sum(0)
            assert bool(near.all()), (type(peers).__name__, kind, op, data, expected)
            if kind is not torch.bfloat16:
                assert same_everywhere(data)


def all_gather_has_a_row_for_each_rank(rank: int) -> None:
    size = bagua.get_world_size()
    for peers in implementations():
        for kind in (torch.uint8, torch.int64, torch.float32):
            rows = peers.all_gather(torch.arange(5).to(kind) + rank)
            assert rows.dtype is kind
            assert torch.equal(rows, torch.stack([torch.arange(5).to(kind) + r for r in range(size)]))


def exchange_swaps_with_any_set_of_peers(rank: int) -> None:
    size = bagua.get_world_size()
    everybody = [r for r in range(size) if r != rank]
    line = [r for r in (rank + 1, rank - 1) if 0 <= r < size]
    for peers in implementations():
        for chosen in (everybody, everybody[::-1], line, []):
            received = peers.exchange(torch.arange(4.0) + rank, chosen)
            assert [tensor.tolist() for tensor in received] == [[r, r + 1.0, r + 2, r + 3] for r in chosen]


def a_group_of_some_ranks_is_numbered_anew(rank: int) -> None:
    size = bagua.get_world_size()
    if size < 3:
        return
    ours, theirs = bagua.new_group([1, 2]), torch.distributed.new_group([1, 2])
    for group in (ours, theirs):
        if rank in (1, 2):
            peers = find(group)
            assert (peers.rank, peers.size) == (rank - 1, 2)
            assert [tensor.tolist() for tensor in peers.exchange(torch.tensor([rank]), [2 - rank])] == [[3 - rank]]
            model = Several((2,))
            model.list[0].grad = torch.full((2,), float(rank))
            AllReduceAggregation(2, group=group).agg_grad()(model, "avg_world")
            assert gradients(model)[0].tolist() == [1.5, 1.5]
    if rank not in (1, 2):
        with pytest.raises(ValueError, match="not a member"):
            find(ours)


def what_is_chosen_is_what_was_asked_for(rank: int) -> None:
    assert isinstance(find(), BaguaPeers)
    assert isinstance(find("torch"), TorchPeers)
    assert isinstance(find(world_size=1), Alone)
    with pytest.raises(ValueError, match="'gloo'"):
        find("gloo")
    with pytest.raises(TypeError, match="int"):
        find(3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="cannot be reached"):
        Alone().exchange(torch.ones(1), [1])


CASES = cases_in(globals())

test_peers = each_case(CASES)


def only_torch_is_initialised(rank: int) -> list[float]:
    torch.distributed.init_process_group("gloo")
    model = Several((2,))
    model.list[0].grad = torch.full((2,), float(rank))
    with pytest.raises(BaguaError, match="group="):
        AllReduceAggregation(2).agg_grad()(model, "avg_world")
    AllReduceAggregation(2, group="torch").agg_grad()(model, "avg_world")
    torch.distributed.destroy_process_group()
    with pytest.raises(BaguaError, match="no process group yet"):
        AllReduceAggregation(2).agg_grad()(model, "avg_world")
    with pytest.raises(BaguaError, match="not initialised"):
        AllReduceAggregation(2, group="torch").agg_grad()(model, "avg_world")
    return gradients(model)[0].tolist()


def test_an_initialised_torch_group_is_enough_if_it_is_named() -> None:
    assert make_world(2).run(only_torch_is_initialised) == [[0.5, 0.5]] * 2
