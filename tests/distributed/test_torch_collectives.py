"""The verbs on tensors: results against NumPy, refused arguments, and groups that a rank is not in."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

import bagua.torch_api as bagua
from bagua.torch_api import ReduceOp
from bagua.torch_api.process_group import DTYPES
from tests.distributed.torch_ranks import cases_in, each_case

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
COMBINE: dict[ReduceOp, Callable[..., Any]] = {
    ReduceOp.SUM: np.add,
    ReduceOp.PRODUCT: np.multiply,
    ReduceOp.MIN: np.minimum,
    ReduceOp.MAX: np.maximum,
    ReduceOp.BOR: np.bitwise_or,
    ReduceOp.BAND: np.bitwise_and,
    ReduceOp.BXOR: np.bitwise_xor,
}


def data(rank: int, count: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Returns the values that a rank contributes: small whole numbers, so that no type has to round."""
    generator = torch.Generator().manual_seed(31 * rank + count)
    if dtype.is_complex:
        parts = torch.randint(0, 4, (2, count), generator=generator).double()
        return torch.complex(parts[0], parts[1]).to(dtype)
    return torch.randint(0, 2 if dtype is torch.bool else 4, (count,), generator=generator).to(dtype)


def everybody(count: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return [data(rank, count, dtype) for rank in range(bagua.get_world_size())]


def oracle(count: int, dtype: torch.dtype, op: ReduceOp) -> torch.Tensor:
    wide = torch.complex128 if dtype.is_complex else torch.float64 if dtype in FLOATS else dtype
    arrays = [tensor.to(wide).numpy() for tensor in everybody(count, dtype)]
    result = arrays[0]
    for array in arrays[1:]:
        result = COMBINE[ReduceOp.SUM if op is ReduceOp.AVG else op](result, array)
    result = result / len(arrays) if op is ReduceOp.AVG else result
    return torch.from_numpy(np.ascontiguousarray(result)).to(dtype)


def kinds() -> Iterator[tuple[torch.dtype, ReduceOp]]:
    for dtype, op in itertools.product(DTYPES, ReduceOp):
        bitwise = op in (ReduceOp.BOR, ReduceOp.BAND, ReduceOp.BXOR)
        undefined = (
            ((dtype in FLOATS or dtype.is_complex) and bitwise)
            or (op in (ReduceOp.MIN, ReduceOp.MAX) and dtype.is_complex)
            or (op is ReduceOp.AVG and dtype not in FLOATS and not dtype.is_complex)
            or (op is ReduceOp.SUM and dtype is torch.bool)
        )
        if not undefined:
            yield dtype, op


def finish(handle: Any, async_op: bool) -> None:
    if not async_op:
        assert handle is None
        return
    handle.wait(20.0)
    assert handle.is_completed()


def all_reduce_equals_numpy_for_every_type_and_operation(rank: int) -> None:
    for (dtype, op), count, async_op in itertools.product(kinds(), (0, 1, 7, 1023), (False, True)):
        expected = oracle(count, dtype, op)
        mine, result = data(rank, count, dtype), torch.full((count,), True, dtype=dtype)
        finish(bagua.allreduce(mine, result, op, async_op=async_op), async_op)
        torch.testing.assert_close(result, expected, msg=f"{dtype} {op.name} {count}")
        assert torch.equal(mine, data(rank, count, dtype))
        finish(bagua.allreduce_inplace(mine, op, async_op=async_op), async_op)
        assert torch.equal(mine, result)


def reduce_reaches_only_its_destination(rank: int) -> None:
    for dst, async_op in itertools.product(range(bagua.get_world_size()), (False, True)):
        expected = oracle(7, torch.float32, ReduceOp.SUM)
        result = torch.zeros(7)
        finish(bagua.reduce(data(rank, 7), result, dst, async_op=async_op), async_op)
        assert torch.equal(result, expected if rank == dst else torch.zeros(7))
        tensor = data(rank, 7)
        finish(bagua.reduce_inplace(tensor, dst, async_op=async_op), async_op)
        assert torch.equal(tensor, expected if rank == dst else data(rank, 7))


def broadcast_gives_everybody_the_values_of_its_source(rank: int) -> None:
    for src, dtype, async_op in itertools.product(range(bagua.get_world_size()), DTYPES, (False, True)):
        tensor = data(rank, 9, dtype).view(3, 3)
        finish(bagua.broadcast(tensor, src, async_op=async_op), async_op)
        assert torch.equal(tensor, data(src, 9, dtype).view(3, 3))


def all_gather_puts_chunks_in_rank_order(rank: int) -> None:
    size = bagua.get_world_size()
    for count, async_op in itertools.product((0, 1, 5), (False, True)):
        expected = torch.cat(everybody(count))
        result = torch.zeros(size * count)
        finish(bagua.allgather(data(rank, count), result, async_op=async_op), async_op)
        assert torch.equal(result, expected)
        result = torch.zeros(size * count)
        result[rank * count : (rank + 1) * count] = data(rank, count)
        finish(bagua.allgather_inplace(result, async_op=async_op), async_op)
        assert torch.equal(result, expected)


def gather_and_scatter_move_chunks_to_and_from_one_rank(rank: int) -> None:
    size, count = bagua.get_world_size(), 3
    for root, async_op in itertools.product(range(size), (False, True)):
        whole = torch.cat(everybody(count))
        mine = slice(rank * count, (rank + 1) * count)
        result = torch.zeros(size * count)
        finish(bagua.gather(data(rank, count), result, root, async_op=async_op), async_op)
        assert torch.equal(result, whole if rank == root else torch.zeros(size * count))
        result[mine] = data(rank, count)
        finish(bagua.gather_inplace(result, count, root, async_op=async_op), async_op)
        if rank == root:
            assert torch.equal(result, whole)
        chunk = torch.zeros(count)
        finish(bagua.scatter(whole * (rank == root), chunk, root, async_op=async_op), async_op)
        assert torch.equal(chunk, data(rank, count))
        result = whole.clone() if rank == root else torch.zeros(size * count)
        finish(bagua.scatter_inplace(result, count, root, async_op=async_op), async_op)
        assert torch.equal(result[mine], data(rank, count))


def reduce_scatter_leaves_each_rank_its_chunk(rank: int) -> None:
    size, count = bagua.get_world_size(), 3
    for op, async_op in itertools.product((ReduceOp.SUM, ReduceOp.AVG, ReduceOp.MAX), (False, True)):
        expected = oracle(size * count, torch.float32, op)[rank * count : (rank + 1) * count]
        chunk, whole = torch.zeros(count), data(rank, size * count)
        finish(bagua.reduce_scatter(whole, chunk, op, async_op=async_op), async_op)
        torch.testing.assert_close(chunk, expected)
        finish(bagua.reduce_scatter_inplace(whole, op, async_op=async_op), async_op)
        assert torch.equal(whole[rank * count : (rank + 1) * count], chunk)


def all_to_all_transposes_chunks(rank: int) -> None:
    size, count = bagua.get_world_size(), 2
    parts = [tensor.view(size, count) for tensor in everybody(size * count)]
    expected = torch.cat([part[rank] for part in parts])
    for async_op in (False, True):
        mine, result = data(rank, size * count), torch.zeros(size * count)
        finish(bagua.alltoall(mine, result, async_op=async_op), async_op)
        assert torch.equal(result, expected)
        finish(bagua.alltoall_inplace(mine, async_op=async_op), async_op)
        assert torch.equal(mine, expected)


def all_to_all_v_takes_counts_and_places(rank: int) -> None:
    size = bagua.get_world_size()
    # Rank s sends s + 1 elements to every rank r, all of value 10 * s + r.
    sends = [rank + 1] * size
    recvs = [source + 1 for source in range(size)]
    send = torch.cat([torch.full((rank + 1,), 10.0 * rank + r) for r in range(size)])
    expected = torch.cat([torch.full((source + 1,), 10.0 * source + rank) for source in range(size)])
    starts = [0, *itertools.accumulate(recvs)][:size]
    for async_op in (False, True):
        result = torch.zeros(sum(recvs))
        displs = [r * (rank + 1) for r in range(size)]
        finish(bagua.alltoall_v(send, sends, displs, result, recvs, starts, async_op=async_op), async_op)
        assert torch.equal(result, expected)
        tensor = data(rank, 2 * size)
        finish(
            bagua.alltoall_v_inplace(tensor, [1] * size, [2 * r + 1 for r in range(size)], async_op=async_op), async_op
        )
        assert torch.equal(tensor[1::2], torch.stack([other[2 * rank + 1] for other in everybody(2 * size)]))
        assert torch.equal(tensor[::2], data(rank, 2 * size)[::2])


def send_and_recv_pair_up(rank: int) -> None:
    size = bagua.get_world_size()
    # A ring, odd sizes included: everybody sends at once, so one of both must not block.
    right, left = (rank + 1) % size, (rank - 1) % size
    if size > 1:
        for _ in range(3):
            tensor = torch.zeros(5)
            if rank % 2:
                bagua.recv(tensor, left)
                bagua.send(data(rank, 5), right)
            else:
                handle = bagua.send(data(rank, 5), right, async_op=True)
                bagua.recv(tensor, left)
                finish(handle, True)
            assert torch.equal(tensor, data(left, 5))


def several_tensors_go_in_one_message(rank: int) -> None:
    size = bagua.get_world_size()
    for async_op in (False, True):
        tensors = [torch.full((2, 2), float(rank)), torch.tensor(float(rank)), torch.full((3, 2), float(rank)).t()]
        finish(bagua.allreduce_coalesced_inplace(tensors, ReduceOp.MAX, async_op=async_op), async_op)
        assert all((tensor == size - 1).all() for tensor in tensors)
        tensors = [torch.full((2,), rank), torch.full((0,), rank), torch.full((1, 1), rank)]
        finish(bagua.broadcast_coalesced(tensors, size - 1, async_op=async_op), async_op)
        assert all((tensor == size - 1).all() for tensor in tensors)
    with pytest.raises(TypeError, match="different dtypes"):
        bagua.broadcast_coalesced([torch.zeros(1), torch.zeros(1, dtype=torch.float64)])


def objects_travel_from_any_rank(rank: int) -> None:
    for src in range(bagua.get_world_size()):
        assert bagua.broadcast_object({"from": rank, "text": "x" * 10 * rank}, src) == {
            "from": src,
            "text": "x" * 10 * src,
        }
    assert bagua.broadcast_object(None) is None


def bad_arguments_are_refused_before_anything_is_sent(rank: int) -> None:
    size = bagua.get_world_size()
    f, i, b = torch.zeros(4), torch.zeros(4, dtype=torch.int64), torch.zeros(4, dtype=torch.bool)
    small = torch.zeros(3).to(torch.float8_e4m3fn)
    refused: list[tuple[type[Exception], str, Callable[[], Any]]] = [
        (TypeError, "AVG of int64", lambda: bagua.allreduce_inplace(i, ReduceOp.AVG)),
        (TypeError, "AVG of bool", lambda: bagua.allreduce_inplace(b, ReduceOp.AVG)),
        (TypeError, "SUM of bool", lambda: bagua.allreduce(b, b.clone())),
        (TypeError, "BOR of float32", lambda: bagua.reduce_inplace(f, 0, ReduceOp.BOR)),
        (
            TypeError,
            "AVG of int64",
            lambda: bagua.reduce_scatter(torch.zeros(size, dtype=torch.int64), i[:1], ReduceOp.AVG),
        ),
        (ValueError, "4 is not a valid ReduceOp", lambda: bagua.allreduce_inplace(f, 4)),  # type: ignore[arg-type]
        (TypeError, "tensor has dtype torch.float8_e4m3fn", lambda: bagua.allreduce_inplace(small)),
        (TypeError, "torch.float8_e4m3fn", lambda: bagua.broadcast(small)),
        (TypeError, "must be a torch.Tensor, not list", lambda: bagua.broadcast([1.0])),  # type: ignore[arg-type]
        (NotImplementedError, "tensor is on meta", lambda: bagua.broadcast(torch.zeros(1, device="meta"))),
        (NotImplementedError, "sparse_coo", lambda: bagua.allreduce_inplace(torch.zeros(2, 2).to_sparse())),
        (TypeError, "torch.float32, recv_tensor torch.int64", lambda: bagua.allreduce(f, i)),
        (ValueError, "4 elements, recv_tensor 3", lambda: bagua.allreduce(f, f[:3].clone())),
        (ValueError, "to receive", lambda: bagua.allgather(f, torch.zeros(4 * size + 1))),
        (ValueError, "to send", lambda: bagua.reduce_scatter(torch.zeros(4 * size + 1), f)),
        (ValueError, f"rank {size} is not a rank", lambda: _peer_of(size)),
        (ValueError, "dst -1 is not a rank", lambda: bagua.reduce_inplace(f, -1)),
        (ValueError, "do not fit", lambda: bagua.alltoall_v_inplace(f, [9] * size, [0] * size)),
        (ValueError, "0 counts and 0 displacements", lambda: bagua.alltoall_v_inplace(f, [], [])),
        (ValueError, f"needs {5 * size}", lambda: bagua.gather_inplace(f[:4], 5, 0)),
        (TypeError, "comm must be", lambda: bagua.barrier("world")),  # type: ignore[arg-type]
    ]
    if size > 1:
        refused += [
            (ValueError, "cannot divide evenly", lambda: bagua.allgather_inplace(torch.zeros(size + 1))),
            (ValueError, "cannot divide evenly", lambda: bagua.alltoall_inplace(torch.zeros(size + 1))),
            (ValueError, "cannot divide evenly", lambda: bagua.reduce_scatter_inplace(torch.zeros(size + 1))),
        ]
    for kind, text, call in refused:
        with pytest.raises(kind, match=text):
            call()


def _peer_of(rank: int) -> None:
    try:
        bagua.broadcast(torch.zeros(1), rank)
    except ValueError as error:
        raise ValueError(str(error).replace("src ", "rank ")) from error


def sub_groups_count_their_own_ranks(rank: int) -> None:
    size = bagua.get_world_size()
    ranks = list(range(1, size)) or [0]
    # In any order; rank 0 of the group is rank 1 of the world.
    group = bagua.new_group(list(reversed(ranks)))
    comm = group.get_global_communicator()
    member = rank in ranks
    assert bagua.communication._rank_not_in_group(group) is not member
    assert (comm.rank(), comm.nranks()) == ((ranks.index(rank), len(ranks)) if member else (-1, -1))
    tensor = torch.tensor([float(rank)])
    for communicator in (comm, group):
        for src in range(len(ranks)):
            value = bagua.broadcast_object(rank, src, communicator)
            assert value == (ranks[src] if member else rank)
        tensor.fill_(float(rank))
        handle = bagua.allreduce_inplace(tensor, comm=communicator, async_op=True)
        assert handle is not None
        handle.wait()
        assert handle.is_completed()
        assert tensor.item() == (sum(ranks) if member else rank)
        bagua.barrier(communicator)
    assert bagua.communication._pg_group_ranks[group] == {world: i for i, world in enumerate(ranks)}


def groups_of_torch_have_a_counterpart(rank: int) -> None:
    import torch.distributed as dist

    size = bagua.get_world_size()
    ranks = list(range(0, size, 2))
    theirs = dist.new_group(ranks)
    if rank in ranks:
        ours = theirs.bagua_patch().bagua_pg
        assert ours.ranks == ranks
        assert theirs.bagua_get_global_communicator().nranks() == len(ranks)
        assert theirs.bagua_pg is ours
        assert bagua.from_torch_group(theirs).ranks == ranks
        tensor = torch.tensor([float(rank)])
        bagua.allreduce_inplace(tensor, comm=ours)
        assert tensor.item() == sum(ranks)


CASES = cases_in(globals())

test = each_case(CASES, 1, 2, 3, 4)
